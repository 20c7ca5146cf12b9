"""The CPU's kernels compiled for one set of instructions, where a test wants others than `-march=native` gives."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from devices.cpu.kernels import build

PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "avx512 vnni": ("avx512_vnni", ("-march=icelake-server",)),
    "avx512": ("avx512bw", ("-march=skylake-avx512",)),
    "avx vnni": ("avx_vnni", ("-march=x86-64-v3", "-mavxvnni")),
    "avx2": ("avx2", ("-march=x86-64-v3",)),
    "plain": ("", ()),
}
"""A feature that the processor must have, and what makes the compiler use it."""


def compiled(path: str, folder: Path, names: Sequence[str]) -> ctypes.CDLL:
    """The sources `<name>.cpp`, whose functions begin with `<name>_`; skips where the processor lacks the feature."""
    feature, flags = PATHS[path]
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if feature and feature not in known:
        pytest.skip(f"this processor has no {feature}")
    target = folder / "kernels.so"
    sources = [str(build.SOURCE_FOLDER / f"{name}.cpp") for name in names]
    options = ["-O1", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi", *flags]
    openmp = [str(file) for file in build._openmp_of_torch()]
    command = [build.COMPILER, *options, "-Wl,--as-needed", *sources, *openmp, "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    library = ctypes.CDLL(str(target))
    for name in names:
        build.declared(library, f"{name}_")
    return library
