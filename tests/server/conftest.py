"""Real servers in subprocesses: `rung serve` with a tiny model, and with the default one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models import save_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0


@dataclass
class Server:
    """A running `rung serve`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0)

    def post(self, path: str, body: Any, status: int = 200, key: str | None = None) -> Any:
        """The JSON answer to a POST, whose status must be this."""
        with self.http(key) as client:
            content = json.dumps(body)  # in ASCII, so that a lone surrogate can be sent
            answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str, status: int = 200, key: str | None = None) -> Any:
        with self.http(key) as client:
            answer = client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def engine_pid(self) -> int:
        """The engine process: the server's child that is not multiprocessing's resource tracker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError("the engine process is not there")

    def wait_until_idle(self) -> None:
        """Nothing runs, and the books are right: what an aborted client leaves behind."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            stats = self.get("/server_info")["stats"]
            if stats["num_running"] == stats["num_waiting"] == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {stats}")


def start_server(model: Path, folder: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    """Start a server and wait until it is ready."""
    log = folder / "server.log"
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--model", str(model)]
    command += ["--device", "cpu", "--port", "0", "--max-total-tokens", "4096", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stderr=stderr,
            stdout=stderr,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        said = [line for line in log.read_text().splitlines() if "serving " in line]
        if said:
            url = said[0].rsplit(" ", 1)[1]
            if httpx.get(f"{url}/health").status_code == 200:
                return Server(process, url, log)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-served")
    save_tiny_llama(path, max_position_embeddings=2048)
    return path


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the tiny model and no keys."""
    running = start_server(tiny_model, tmp_path_factory.mktemp("server"), "--dtype", "float32")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0, running.log.read_text()


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for message in messages %}<|im_start|>"
    "{{ message['role'] }}\n{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}"
    "{{ call.function.name }}({{ call.function.arguments.items() | list }}){% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
"""Takes tools, and wants the arguments of calls as objects, as most do."""


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny model whose template takes tools, and that may think."""
    path = tmp_path_factory.mktemp("tiny-tools")
    save_tiny_llama(path, max_position_embeddings=2048)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TOOL_TEMPLATE}))
    flags = ("--dtype", "float32", "--reasoning-parser", "qwen3")
    running = start_server(path, tmp_path_factory.mktemp("tool-server"), *flags)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0, running.log.read_text()


@pytest.fixture
def own_server(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers for one test, which may break them."""
    started: list[Server] = []

    def start(*flags: str, env: dict[str, str] | None = None) -> Server:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(start_server(tiny_model, folder, "--dtype", "float32", *flags, env=env))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default model, under the name "smol"."""
    from engine.weights.catalog import cache_dir, list_entries

    path = cache_dir() / list_entries()[0].filename
    if not path.exists():
        pytest.skip(f"{path} is not here; run: rung model fetch {list_entries()[0].name}")
    running = start_server(path, tmp_path_factory.mktemp("smol"), "--served-model-name", "smol")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(30) == 0, running.log.read_text()
