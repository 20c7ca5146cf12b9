"""Compiles kernels for GPUs that are not here, and reads from the binary what a GPU would meet.

`triton.compile` needs no driver when it is told the target, and Triton ships the tools that read what comes out. A
kernel that spills registers, loads tiles in narrow pieces, misses the tensor cores or asks for more shared memory than
a multiprocessor has is slow, or does not start, on every machine: that a CPU can tell. Speed itself it cannot tell.

    python -m devices.cuda.aot            the table
    python -m devices.cuda.aot --write    writes budgets.json for this Triton; tests/kernels/test_compiled.py keeps it

`budgets.json`: floors and targets, and by version of Triton what was made of each case and the bytes that it spills.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

BUDGETS = Path(__file__).with_name("budgets.json")

DIVISIBLE = ":16"
"""Ends the type of an argument that is a multiple of 16, as a launch finds out by looking at the value."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor has (CUDA C++ Programming Guide, table of compute capabilities)."""

    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    ctas: int = 32


MULTIPROCESSORS = {80: Multiprocessor(163 << 10), 90: Multiprocessor(227 << 10)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel as it is launched for one shape of model.

    Attributes:
        name: stands in budgets.json.
        kernel: "module:function" below `devices.cuda.kernels`.
        arguments: Triton type of each argument that is no constant: "*bf16", "i32", "fp32"; pointers are taken to be
            aligned to 16 bytes, numbers only when the type ends in ":16".
        constants: values of the constexpr arguments.
        max_registers: of a thread, that the compiler may use; 0 leaves it to the compiler.
        archs: compute capabilities, times ten.
        wide: bits that a thread must load or store at once where it moves tiles; 0 asks nothing.
        narrow_allowed: number of narrower instructions, which move scalars (page ids, lengths) and no tiles.
        wgmma: whether the Hopper tensor-core instruction must be there on sm_90.
        buffers: K and V tiles that must be in flight at once.
        ctas_per_sm: programs that the launcher counts on.
        floor, target: the time no machine can beat, as a formula of `docs/devices.md`, and the share of it to reach.
    """

    name: str
    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 0
    archs: tuple[int, ...] = (80, 90)
    wide: int = 0
    narrow_allowed: int = 0
    wgmma: bool = False
    buffers: int = 0
    ctas_per_sm: int = 0
    floor: str
    target: str


@dataclass(frozen=True, slots=True)
class Binary:
    """What the compiler made of a case for one architecture.

    Attributes:
        spills: instructions that move registers to or from local memory.
        ctas_per_sm: programs that fit on a multiprocessor at once.
        loads, stores: instructions that read (asynchronous copies too) and write global memory, by bits a thread.
        buffers: how many tiles of each pipelined load are in flight, in order of their allocation.
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    ctas_per_sm: int
    wgmma: int
    mma: int
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    buffers: tuple[int, ...] = ()


def compile_case(case: KernelCase, arch: int) -> Binary:
    """Compile for one architecture; takes 0.1 to 5 s of CPU, or nothing when Triton's cache has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = case.kernel.partition(":")
    kernel = getattr(import_module(f"devices.cuda.kernels.{module}"), function)
    names: list[str] = kernel.arg_names
    missing = set(names) ^ (set(case.arguments) | set(case.constants))
    if missing:
        raise ValueError(f"{case.name}: arguments of the kernel and of its case differ in {sorted(missing)}")
    signature = {name: case.arguments.get(name, "constexpr").removesuffix(DIVISIBLE) for name in names}
    aligned = [name for name, kind in case.arguments.items() if kind.startswith("*") or kind.endswith(DIVISIBLE)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers or None}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _read(compiled.asm["cubin"], compiled.asm["ttgir"], compiled.metadata.shared, case.num_warps, arch)


def _read(cubin: bytes, ttgir: str, shared_bytes: int, num_warps: int, arch: int) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage[:500]!r}")
    registers, stack_bytes = map(int, found.groups())
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)", listing, re.M)
    count = Counter(opcode for opcode, _ in opcodes)
    return Binary(
        registers=registers,
        stack_bytes=stack_bytes,
        spills=count["LDL"] + count["STL"],
        shared_bytes=shared_bytes,
        ctas_per_sm=_ctas_per_sm(registers, shared_bytes, num_warps, arch),
        wgmma=count["HGMMA"] + count["QGMMA"],
        mma=count["HMMA"] + count["QMMA"],
        loads=_by_width(opcodes, ("LDG", "LDGSTS")),
        stores=_by_width(opcodes, ("STG",)),
        buffers=tuple(map(int, re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x", ttgir))),
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _by_width(opcodes: list[tuple[str, str]], wanted: tuple[str, ...]) -> dict[str, int]:
    widths: Counter[str] = Counter()
    for opcode, suffix in opcodes:
        if opcode in wanted:
            found = re.search(r"\.(?:U|S)?(128|64|16|8)\b", suffix)
            widths[found.group(1) if found else "32"] += 1
    return dict(sorted(widths.items(), key=lambda item: -int(item[0])))


def _ctas_per_sm(registers: int, shared_bytes: int, num_warps: int, arch: int) -> int:
    has = MULTIPROCESSORS[arch]
    per_warp = -(-registers * 32 // 256) * 256  # registers are handed out to warps in units of 256
    reserved = 1024  # shared memory that the system takes of every program
    return min(
        has.registers // (per_warp * num_warps),
        has.shared_bytes // (shared_bytes + reserved),
        has.warps // num_warps,
        has.ctas,
    )


def offences(case: KernelCase, arch: int, binary: Binary, known_stack_bytes: int = 0) -> list[str]:
    """What is wrong with it on any machine, whatever the budget says.

    Args:
        known_stack_bytes: what this version of Triton spills however the kernel is configured.
    """
    found = []
    if binary.stack_bytes > known_stack_bytes or (binary.spills and not known_stack_bytes):
        found.append(f"{binary.spills} spilling instructions, {binary.stack_bytes} bytes of stack")
    limit = MULTIPROCESSORS[arch].shared_bytes
    if binary.shared_bytes > limit - 1024:
        found.append(f"{binary.shared_bytes} bytes of shared memory, the limit is {limit - 1024}")
    for what, widths in (("loads", binary.loads), ("stores", binary.stores)):
        narrow = sum(number for width, number in widths.items() if int(width) < case.wide)
        if narrow > case.narrow_allowed:
            found.append(f"{narrow} {what} narrower than {case.wide} bits: {widths}")
    if case.wgmma and arch == 90 and not binary.wgmma:
        found.append("no wgmma")
    if case.buffers and sum(number >= case.buffers for number in binary.buffers) < 2:
        found.append(f"K and V have {binary.buffers} buffers, {case.buffers} were declared")
    if binary.ctas_per_sm < case.ctas_per_sm:
        found.append(
            f"{binary.ctas_per_sm} programs fit on a multiprocessor, the launcher counts on {case.ctas_per_sm}"
        )
    return found


def budget_of(binary: Binary) -> dict[str, Any]:
    return {name: value for name, value in asdict(binary).items() if name not in ("stack_bytes", "spills")}


def main() -> None:
    import triton

    from devices.cuda.kernel_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write budgets.json for this version of Triton")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    spilled: dict[str, int] = {}
    for case in CASES:
        for arch in case.archs if options.only in case.name else ():
            binary = compile_case(case, arch)
            key = f"{case.name} sm_{arch}"
            measured[key] = budget_of(binary)
            if binary.stack_bytes:
                spilled[key] = binary.stack_bytes
            print(f"{key:44s} {measured[key]}", *offences(case, arch, binary), sep="\n    ", flush=True)
    if options.write:
        budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
        budgets["targets"] = {case.name: {"floor": case.floor, "target": case.target} for case in CASES}
        versions = budgets.setdefault("triton", {})
        versions[triton.__version__] = (versions.get(triton.__version__, {}) if options.only else {}) | measured
        spills = budgets.setdefault("spills", {})
        kept = {key: size for key, size in spills.get(triton.__version__, {}).items() if key not in measured}
        spills[triton.__version__] = (kept if options.only else {}) | spilled
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
