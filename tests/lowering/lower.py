"""Compiles our Ascend kernels down to planned on-chip memory and reports what became of them, as JSON.

Runs in a process of its own, with the folder of `scripts/npu/lowering_env` first on the path: Triton-Ascend is a whole
`triton` package. Three stages run here: Triton's front end, its adapter to linalg, and the open part of the compiler
(`bishengir-compile`), which plans buffers and synchronisation and leaves `module.hivm.opt.mlir`. The closed last stage
is not on PyPI; that it is missing is the expected end.

    PYTHONPATH=<that folder>:<repository> python tests/lowering/lower.py Ascend910B3
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ELEMENT_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}

PAGES = {"table": "*i32", "rows": "*i32", "starts": "*i32", "lens": "*i32", "firsts": "*i32", "offsets": "*i32"}
SIGNATURE = PAGES | {"out": "*i32", "pages": "*i32", "positions": "*i32", "batch": "i32", "width": "i32"}
SIGNATURE |= {"num_changes": "i32"}


def variants() -> dict[str, tuple[str, dict[str, int]]]:
    """Name of a variant -> kernel and its compile-time values."""
    found: dict[str, tuple[str, dict[str, int]]] = {"update": ("update_kernel", {"block": 256})}
    for shift in (4, 7, 8):
        found[f"slots page {1 << shift}"] = ("slots_kernel", {"shift": shift, "page_size": 1 << shift})
        decode = {"shift": shift, "page_size": 1 << shift, "block": 128}
        found[f"decode page {1 << shift}"] = ("decode_slots_kernel", decode)
    return found


def to_linalg(kernel: Any, constants: dict[str, int], arch: str) -> str:
    """Front end and adapter. Raises CalledProcessError when the adapter refuses."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    signature = {name: SIGNATURE[name] for name in kernel.arg_names if name not in constants}
    source = ASTSource(kernel, signature, constants=dict(constants), attrs=ascend.AscendAttrsDescriptor())
    target = GPUTarget("npu", arch, 0)
    backend = make_backend(target)
    options = backend.parse_options(dict(source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(), backend.get_module_map()
    metadata = {"target": target, "hash": "-", **options.__dict__}
    module = ascend.make_ttir(source.make_ir(options, codegen, modules, context), metadata, options)
    text: str = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text)


def to_hivm(linalg: str, arch: str, compiler: Path) -> str:
    """Buffers planned, synchronisation inserted: the module's text. Raises RuntimeError with what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "kernel.mlir").write_text(linalg)
        switches = ["enable-auto-multi-buffer=True", "enable-auto-bind-sub-block=True", "enable-hfusion-compile=true"]
        switches += ["enable-hivm-compile=true", "enable-triton-kernel-compile=true", f"save-temps={here}/temps"]
        arguments = [f"--{switch}" for switch in (f"target={arch}", *switches)]
        command = [str(compiler), str(here / "kernel.mlir"), *arguments, "-o", str(here / "kernel")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        planned = here / "temps" / "module.hivm.opt.mlir"
        if not planned.exists():
            raise RuntimeError((done.stderr + done.stdout)[-2000:])
        return planned.read_text()


def buffer_bytes(memref: str) -> int:
    matched = re.match(r"memref<((?:\d+x)*)(\w+)", memref)
    if matched is None:
        return 0
    elements = 1
    for extent in matched.group(1).split("x"):
        elements *= int(extent) if extent else 1
    kind = matched.group(2)
    return -(-elements // 8) if kind == "i1" else elements * ELEMENT_BYTES[kind]


def statistics(module: str) -> dict[str, Any]:
    """Of the device function: peak bytes by memory, and how often it touches single elements, loops and calls."""
    functions = re.split(r"(?=^  func\.func @)", module, flags=re.M)
    (text,) = [f for f in functions if "function_kind<DEVICE>" in f.split("\n", 1)[0]]
    constants = dict(re.findall(r"(%c\w+) = arith\.constant (-?\d+) : i64", text))
    peak: Counter[str] = Counter()
    for places, memref in re.findall(r"hivm\.hir\.pointer_cast\(([^)]*)\)[^:]*: (memref<[^\n]*)", text):
        space = re.search(r"address_space<(\w+)>", memref)
        for place in places.split(","):
            if space is not None and place.strip() in constants:
                end = int(constants[place.strip()]) + buffer_bytes(memref)
                peak[space.group(1)] = max(peak[space.group(1)], end)
    calls = Counter(re.findall(r"(?:func\.)?call @(\w+)\(", text))
    return {
        "ub_bytes": peak["ub"],
        "scalar_stores": len(re.findall(r"memref\.store .*address_space<(?:ub|gm)>", text)),
        "scalar_loads": len(re.findall(r"memref\.load .*address_space<(?:ub|gm)>", text)),
        "loops": len(re.findall(r"scf\.(?:for|while)", text)),
        "int64_vectors": len(re.findall(r"memref<\d+(?:x\d+)*xi64[^\n]*address_space<ub>", text)),
        "gm_writes": sum(n for name, n in calls.items() if name.startswith("store_ubuf_to_gm")),
        "calls": dict(calls),
    }


def main(arch: str) -> None:
    import careless
    import triton

    from devices.npu.kernels.slots import kernels

    compiler = Path(triton.__file__).parents[1] / "ascendnpuir" / "bin" / "bishengir-compile"
    built = kernels()
    report = {}
    built["careless"] = careless.kernel()
    for name, (kernel, constants) in (variants() | {"careless": ("careless", {"page_size": 128})}).items():
        report[name] = statistics(to_hivm(to_linalg(built[kernel], constants, arch), arch, compiler))
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
