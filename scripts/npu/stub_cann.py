"""Stub libraries in the place of CANN, so that the wheel of torch_npu can be imported on a machine without it.

The wheel's libraries name CANN's, and symbols in them. For each library that the loader does not find this builds an
empty one, and in one of them every symbol that is not found elsewhere, as a function that answers with an error of the
runtime. So `import torch_npu` works and there is no device, but schemas and
meta kernels are those that the vendor registers. Nothing can run, and a machine with CANN must not see this folder.

    python scripts/npu/stub_cann.py FOLDER      # with torch_npu in FOLDER/site; makes FOLDER/stubs
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

RUNTIME_ERROR = 507899
"""ACL's code for an internal error of the driver: what a call without a device is told."""


def run(*command: str | Path, **environment: str) -> str:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True, env=environment or None
    ).stdout


def dependencies(libraries: list[Path], search: list[Path]) -> tuple[set[str], set[Path]]:
    """Names that the loader does not find, and the files that it finds, of the libraries and all that they need."""
    missing: set[str] = set()
    found: set[Path] = set()
    for library in libraries:
        for line in run("ldd", library, LD_LIBRARY_PATH=":".join(map(str, search))).splitlines():
            name, _, place = line.strip().partition(" => ")
            if place.startswith("not found"):
                missing.add(name)
            else:
                path = re.search(r"(/\S+)", line)
                found |= {Path(path.group(1))} if path is not None else set()
    return missing, found


def symbols(path: Path, which: str) -> set[str]:
    """Names without versions; weak ones that are undefined are left out: the loader does not need them."""
    found = set()
    for line in run("nm", "-D", which, path).splitlines():
        kind, name = line.split()[-2:]
        if kind not in "wv" or which == "--defined-only":
            found.add(name.partition("@")[0])
    return found


def source(names: set[str]) -> str:
    """C text that defines the symbols; what would return text returns none."""
    answers = {name: 0 if name in ("aclGetRecentErrMsg", "aclrtGetSocName") else RUNTIME_ERROR for name in names}
    return "".join(f"long {name}(void) {{ return {answer}; }}\n" for name, answer in sorted(answers.items()))


def build(folder: Path) -> tuple[list[str], int]:
    """Make the stubs; returns the libraries' names and the number of symbols."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed for this Python; run scripts/setup.sh's environment")
    torch_libraries = Path(spec.origin).parent / "lib"
    package = folder / "site" / "torch_npu"
    ours = sorted([*package.glob("_C*.so"), *(package / "lib").glob("*.so")])
    if not ours:
        raise SystemExit(f"no torch_npu in {package}")
    missing, found = dependencies(ours, [torch_libraries, package / "lib"])
    python = [Path(sys.executable).resolve(), *Path(sys.base_prefix).glob("lib/libpython3*.so*")]
    providers = {*found, *ours, *python}
    wanted = set().union(*(symbols(path, "--undefined-only") for path in ours))
    wanted -= set().union(*(symbols(path, "--defined-only") for path in providers))
    stubs = folder / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    (stubs / "symbols.c").write_text(source(wanted))
    (stubs / "empty.c").write_text("")
    keeper = "libascendcl.so"  # every other library of the wheel needs it
    for name in sorted(missing | {keeper}):
        text = "symbols.c" if name == keeper else "empty.c"
        run("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", stubs / text, "-o", stubs / name)
    return sorted(missing), len(wanted)


if __name__ == "__main__":
    names, number = build(Path(sys.argv[1]))
    print(f"{number} symbols in stubs of {', '.join(names)}")
