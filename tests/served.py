"""A real `rung serve` in a subprocess, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
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
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            stats = self.get("/server_info")["stats"]
            if stats["num_running"] == stats["num_waiting"] == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {stats}")


def serve_command(model: Path, *flags: str) -> list[str]:
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--model", str(model)]
    return [*command, "--device", "cpu", "--max-total-tokens", "4096", *flags]


def start_server(model: Path, folder: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    """Start a server and wait until it is ready."""
    log = folder / "server.log"
    command = serve_command(model, "--port", "0", *flags)
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
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    return Server(process, url, log)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the server did not start: {log.read_text()}")
