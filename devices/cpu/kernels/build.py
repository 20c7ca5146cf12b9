"""Compiles the kernels once for a compiler and a processor, and loads the library with ctypes.

The library's name is a hash of all that went into it, and it appears under that name complete: processes that start
together may each compile it, none can load half of it. It links the OpenMP runtime that torch brought, so that there
is one pool of threads; sources include nothing of torch and compile in seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger("rung")

COMPILER = "g++"
# Comparisons of floats are vectorised with -fno-trapping-math only; NaN and infinity stay what they are.
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
KERNEL_FOLDER = Path("~/.cache/rung/kernels")
SOURCE_FOLDER = Path(__file__).parent
TIMEOUT_S = 300

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    **{f"linear_{types}": "plpppllli" for types in ("bf16_bf16", "bf16_f32", "f32_f32")},
    **{f"rms_norm_{dtype}": "pppllfi" for dtype in ("bf16", "f32")},
    **{f"add_rms_norm_{dtype}": "pppppllfi" for dtype in ("bf16", "f32")},
    **{f"norm_linear_{dtype}": "pppfppppli" for dtype in ("bf16", "f32")},
    **{f"linear_norm_{dtype}": "plpppfpppli" for dtype in ("bf16", "f32")},
    **{f"gated_mlp_{dtype}": "plpppppli" for dtype in ("bf16", "f32")},
    **{f"silu_mul_{dtype}": "pplli" for dtype in ("bf16", "f32")},
    **{f"rotate_{dtype}": "plpppllli" for dtype in ("bf16", "f32")},
    **{f"packed_linear_{types}": "plpppllli" for types in ("bf16_bf16", "bf16_f32", "f32_f32")},
    **{f"bf16_linear_{dtype}": "plpppllli" for dtype in ("bf16", "f32")},
    **{f"packed_rows_{dtype}": "pppli" for dtype in ("bf16", "f32")},
    "bf16_rows": "ppplli",
    "largest_f32": "plpplli",
    "attention_pairs": "plplplpppplppplpi",
    **{f"attention_{q}_{kv}": "plplplpppplppplpi" for q in ("bf16", "f32") for kv in ("bf16", "f32")},
}
"""Function -> its arguments, a letter each (`_TYPES`); the extern "C" parts of the sources have their names."""


class KernelsUnavailable(Exception):
    """The kernels cannot be built or loaded here; the text is one line that says why."""


@functools.cache
def load_kernels(folder: Path = KERNEL_FOLDER) -> ctypes.CDLL:
    """The library, compiled into `folder` if it is not there yet.

    Raises:
        KernelsUnavailable: there is no compiler, it failed, or the folder cannot be written.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise KernelsUnavailable(f"there is no {COMPILER} to build the CPU kernels with")
    try:
        path = folder.expanduser() / f"cpu-{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        library = declared(ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        raise KernelsUnavailable(f"{COMPILER} could not build the CPU kernels: {first}") from error
    except (OSError, AttributeError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the CPU kernels cannot be built or loaded: {error}") from error
    return library


def declared(library: ctypes.CDLL, prefix: str = "") -> ctypes.CDLL:
    """`library`, whose functions whose names begin with `prefix` know their arguments."""
    for name, letters in _SIGNATURES.items():
        if name.startswith(prefix):
            function = getattr(library, name)
            function.argtypes, function.restype = [_TYPES[letter] for letter in letters], None
    return library


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the CPU kernels, once: %s", path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        # The runtime that torch loaded comes first: with --as-needed the compiler's own is then not needed.
        files = [str(path) for path in (*_sources("*.cpp"), *_openmp_of_torch())]
        command = [compiler, *FLAGS, "-Wl,--as-needed", *files, "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        os.replace(target, path)


def _openmp_of_torch() -> list[Path]:
    root = Path(torch.__file__).parent
    return [*(root / "lib").glob("libgomp*.so*"), *(root.parent / "torch.libs").glob("libgomp*.so*")][:1]


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCE_FOLDER.glob(pattern))


def _fingerprint(compiler: str) -> str:
    """A hash of sources, flags, compiler, processor and OpenMP runtime."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=TIMEOUT_S).stdout
    runtime = ",".join(map(str, _openmp_of_torch())).encode()
    parts = [path.read_bytes() for path in [*_sources("*.h"), *_sources("*.cpp")]]
    parts += [" ".join(FLAGS).encode(), version, runtime, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
