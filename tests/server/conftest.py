"""Real servers in subprocesses: `rung serve` with a tiny model, and with the default one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Server, start_server
from tiny_models import save_tiny_llama


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
