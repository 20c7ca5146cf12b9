"""Compiles the kernels that NPUs can share down to planned on-chip memory for Ascend, and reports what became of them.

Runs in a process of its own, with the folder of `scripts/npu/lowering_env` first on the path: Triton-Ascend is a whole
`triton` package. Three stages run here: Triton's front end, its adapter to linalg, and the open part of the compiler
(`bishengir-compile`), which plans buffers and synchronisation and leaves `module.hivm.opt.mlir`. The closed last stage
is not on PyPI; that it is missing is the expected end. The report is JSON, one entry a kernel.

    PYTHONPATH=<that folder>:<repository>:<repository>/tests/lowering python tests/lowering/lower.py Ascend910B3
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from devices.cuda.aot import DIVISIBLE, KernelCase
from devices.cuda.kernel_cases import CASES

ELEMENT_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}

SHARED = (
    "update_tables page64",
    "write_kv 8x128 bf16",
    "merge d128",
    "copy_pages 8x64x128",
    "rms_norm add 4096",
    "rms_norm heads 128",
    "rotate 40x128 halves",
    "rotate 40x128 interleaved",
    "silu gate 12288",
    "conv decode w4",
    "conv prefill w4",
    "gated delta 128x128",
    "mamba2 64x128",
)
"""Cases of `devices.cuda.kernel_cases` that lower; docs/cuda.md says why the others do not."""

VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("update_tables page64", "update_tables page128", {"PAGE": 128}),
    ("update_tables page64", "update_tables page512", {"PAGE": 512}),
    ("rms_norm add 4096", "rms_norm 4096", {"ADDS": False}),
    ("rotate 40x128 halves", "rotate a part", {"WIDTH": 160, "REST_BLOCK": 32}),
    ("silu gate 12288", "gelu gate 12288", {"ACTIVATION": "gelu"}),
    ("silu gate 12288", "gelu_tanh gate 12288", {"ACTIVATION": "gelu_tanh"}),
)
"""Case, name, other constants: what a case of the GPU's tests does not show."""


def shared_cases() -> list[KernelCase]:
    named = {case.name: case for case in CASES}
    varied = [replace(named[of], name=name, constants={**named[of].constants, **new}) for of, name, new in VARIANTS]
    return [named[name] for name in SHARED] + varied


def kernel_of(case: KernelCase) -> Any:
    module, _, function = case.kernel.partition(":")
    return getattr(import_module(f"devices.cuda.kernels.{module}"), function)


def to_linalg(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], arch: str) -> tuple[str, int]:
    """Front end and adapter: the module's text, and how many loads of tensors the source has.

    Raises CalledProcessError when the adapter refuses.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    signature = {name: types[name].removesuffix(DIVISIBLE) for name in kernel.arg_names if name not in constants}
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
    loads = len(re.findall(r"tt\.load .*: tensor<", str(module)))
    text: str = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text), loads


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


def element_accesses(text: str) -> int:
    """Loads and stores of one element whose place is a loop's counter: the loop goes over elements, which is slow."""
    counters = re.findall(r"scf\.for (%\w+) =", text)
    places = re.findall(r"memref\.(?:load|store) [^\[\n]*\[([^\]\n]*)\]", text)
    indexed = [name for name in set(counters) if any(name in place.split(", ") for place in places)]
    return sum(name in place.split(", ") for name in indexed for place in places)


def statistics(module: str) -> dict[str, Any]:
    """Of the device function: peak bytes on chip, and how often it touches single elements, 64 bits and memory."""
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
        "element_accesses": element_accesses(text),
        "barriers": text.count("pipe_barrier[<PIPE_ALL>]"),
        "int64_vectors": len(re.findall(r"memref<\d+(?:x\d+)*xi64[^\n]*address_space<ub>", text)),
        "gm_reads": sum(n for name, n in calls.items() if name.startswith("load_gm_to_ubuf")),
    }


def main(arch: str) -> None:
    import careless
    import triton

    compiler = Path(triton.__file__).parents[1] / "ascendnpuir" / "bin" / "bishengir-compile"
    jobs = {case.name: (kernel_of(case), case.arguments, case.constants) for case in shared_cases()}
    jobs["careless"] = (careless.careless_kernel, careless.TYPES, {"page_size": 128})
    report = {}
    for name, (kernel, types, constants) in jobs.items():
        linalg, loads = to_linalg(kernel, types, constants, arch)
        report[name] = statistics(to_hivm(linalg, arch, compiler)) | {"source_loads": loads}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
