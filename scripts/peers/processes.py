"""An engine's process as the benchmark sees it: commands in, answers out over a pipe."""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert import dtype_of, model_for
from environments import HERE, Peer, SetupError, python_of, variables_of

Command = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all engines of a run have in common."""

    source: Path
    weights: str
    quantization: str | None
    threads: int
    env_dir: Path


@dataclass(frozen=True, slots=True)
class Size:
    """What an engine must hold: prompts with their answers, and conversations."""

    max_batch: int
    max_len: int
    sessions: int = 0
    session_len: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything ready to start an engine's process, so that its start can be timed alone."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str]
    log: Path


def prepare(peer: Peer, setting: Setting, size: Size) -> Launch:
    """Install the engine and convert the weights where that was not done yet. Raises SetupError."""
    python = python_of(peer, setting.env_dir)
    model = model_for(peer.model_kind, setting.source, setting.weights, setting.env_dir / "models")
    command = [str(python), str(HERE / peer.worker), "--model", str(model), "--dtype", dtype_of(setting.weights)]
    command += ["--threads", str(setting.threads), "--max-batch", str(size.max_batch), "--max-len", str(size.max_len)]
    command += ["--sessions", str(size.sessions), "--session-len", str(size.session_len)]
    if setting.quantization is not None and peer.model_kind == "own":
        command += ["--quantization", setting.quantization]
    setting.env_dir.mkdir(parents=True, exist_ok=True)
    variables = variables_of(peer, setting.env_dir, setting.threads)
    return Launch(peer.name, tuple(command), variables, setting.env_dir / f"{peer.name}-worker.log")


class Worker:
    """A running engine. Its standard error goes to a file."""

    def __init__(self, launch: Launch) -> None:
        """Start and wait until the model is loaded. Raises SetupError."""
        self.name, self._log = launch.name, launch.log
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=launch.variables,
            )
        self.version: str = self._read()["ready"]

    def ask(self, command: Command) -> dict[str, float]:
        """Raises SetupError when the process has died."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the read says why
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End it; an engine that does not leave when its input ends is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            status = self._process.wait()
            raise SetupError(f"ended with status {status}: {lines[-1] if lines else 'no message'}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer
