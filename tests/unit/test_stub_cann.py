"""Stub libraries: what a library lacks on this machine is there afterwards, and answers with an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub_cann

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

NEEDS_CANN = "int aclInit(void); const char *aclrtGetSocName(void);"
USES = "int start(void) { return aclInit(); } int is_named(void) { return aclrtGetSocName() != 0; }"


def gcc(*words: object) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *map(str, words)], check=True)


def load(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print(lib.start(), lib.is_named())"
    library = folder / "site" / "torch_npu" / "lib" / "libtorch_npu.so"
    return subprocess.run(
        [sys.executable, "-c", code, str(library)],
        env={"LD_LIBRARY_PATH": str(folder / "stubs")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_library_loads_without_what_it_needs(tmp_path: Path) -> None:
    lib = tmp_path / "site" / "torch_npu" / "lib"
    lib.mkdir(parents=True)
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "cann.c").write_text("int aclInit(void) { return 0; } const char *aclrtGetSocName(void) { return 0; }")
    (tmp_path / "uses.c").write_text(f"{NEEDS_CANN} {USES}")
    for name in ("libascendcl.so", "libhccl.so"):
        gcc(tmp_path / "cann.c", f"-Wl,-soname,{name}", "-o", real / name)
    gcc(
        tmp_path / "uses.c",
        "-Wl,--no-as-needed",
        f"-L{real}",
        "-lascendcl",
        "-lhccl",
        "-lm",
        "-o",
        lib / "libtorch_npu.so",
    )
    assert "libascendcl.so: cannot open" in load(tmp_path).stderr
    assert stub_cann.build(tmp_path) == (["libascendcl.so", "libhccl.so"], 2)
    assert load(tmp_path).stdout == f"{stub_cann.RUNTIME_ERROR} 0\n"


def test_a_folder_without_the_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no torch_npu in"):
        stub_cann.build(tmp_path)
