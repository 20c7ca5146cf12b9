"""The kernels as they are launched for common models: what `devices.cuda.aot` compiles and budgets.json keeps.

To add a kernel: a `KernelCase` here with the types of its arguments and the constants of a real shape, then
`python -m devices.cuda.aot --only NAME --write`. Compiling is CPU time in every run of the tests: few cases, real ones.
Tile sizes come from `devices.cuda.configurations`, so that what is judged is what is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from devices.cuda.aot import KernelCase
from devices.cuda.arguments import FP8, AttentionShape, LatentShape
from devices.cuda.configurations import (
    LEAST_SPAN,
    MERGE_BLOCK,
    decode_tiles,
    extend_tiles,
    latent_tiles,
)
from devices.cuda.layer_cases import LAYER_CASES

FLOOR = "max(bytes / bandwidth, flops / rate)"


def _types(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8e4nv"}


def _shape(heads: int, kv_heads: int, dim: int, page_size: int, kv_dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(kv_heads, heads // kv_heads, dim, 1 << (dim - 1).bit_length(), page_size, kv_dtype)


def _decode(name: str, shape: AttentionShape, arch: int, target: str, **options: Any) -> KernelCase:
    queries = options.pop("queries", 1)
    tiles = decode_tiles(arch, shape, queries)
    kv = _NAMES[shape.kv_dtype]
    return KernelCase(
        name=f"decode {name}",
        kernel="decode:split_kernel",
        arguments={
            **_types("*bf16", "q", "out", "sinks"),
            **_types(f"*{kv}", "k_pages", "v_pages"),
            **_types("*fp32", "partial_out", "partial_lse", "k_scale", "v_scale"),
            **_types("*i32", "page_table", "requests", "query_starts", "seq_lens"),
            **_types("i32", "table_stride", "num_kv_heads", "split_tokens"),
            "q_stride": "i32:16",
            "scale": "fp32",
        },
        constants={
            "GROUP": shape.group,
            "ROWS": queries * shape.group,
            "DIM": shape.dim,
            "BLOCK_DIM": shape.block_dim,
            "PAGE": shape.page_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "WINDOW": 0,
            "CAP": 0.0,
            "LEAST": LEAST_SPAN,
            "HAS_SCALES": shape.kv_dtype == FP8,
            "HAS_SINKS": False,
            "SINGLE": False,
        }
        | options,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        archs=(arch,),
        wide=64 if shape.kv_dtype == FP8 else 128,
        narrow_allowed=16,
        buffers=2,
        ctas_per_sm=tiles.ctas_per_sm if queries == 1 else 1,
        floor=f"{FLOOR}; bytes: sum(min(len, window)) Hk 2D b + B Hq 2D b; flops: 4 sum(len) Hq D",
        target=target,
    )


def _extend(name: str, shape: AttentionShape, arch: int, target: str, **options: Any) -> KernelCase:
    tiles = extend_tiles(arch, shape, 2)
    kv = _NAMES[shape.kv_dtype]
    return KernelCase(
        name=f"extend {name}",
        kernel="extend:extend_kernel",
        arguments={
            **_types("*bf16", "q", "out", "sinks"),
            **_types(f"*{kv}", "k_pages", "v_pages"),
            **_types("*fp32", "k_scale", "v_scale"),
            **_types("*i32", "page_table", "tile_request", "tile_query", "query_starts", "seq_lens"),
            **_types("i32", "table_stride", "num_kv_heads"),
            "q_stride": "i32:16",
            "scale": "fp32",
        },
        constants={
            "GROUP": shape.group,
            "DIM": shape.dim,
            "BLOCK_DIM": shape.block_dim,
            "PAGE": shape.page_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "WINDOW": 0,
            "CAP": 0.0,
            "HAS_SCALES": shape.kv_dtype == FP8,
            "HAS_SINKS": False,
        }
        | options,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        archs=(arch,),
        wide=128,
        narrow_allowed=20,
        wgmma=tiles.block_m >= 64,
        buffers=2,
        floor=f"{FLOOR}; flops: 4 Hq D sum(new (prefix + (new + 1) / 2)); bytes: sum(prefix + new) Hk 2D b",
        target=target,
    )


def _merge(dim: int) -> KernelCase:
    return KernelCase(
        name=f"merge d{dim}",
        kernel="decode:merge_kernel",
        arguments={
            **_types("*bf16", "out", "sinks"),
            **_types("*fp32", "partial_out", "partial_lse"),
            **_types("*i32", "requests", "query_starts", "seq_lens"),
            **_types("i32", "num_kv_heads", "split_tokens", "num_splits"),
        },
        constants={
            "GROUP": 4,
            "ROWS": 4,
            "DIM": dim,
            "BLOCK_DIM": dim,
            "BLOCK_N": 64,
            "BLOCK_S": MERGE_BLOCK,
            "WINDOW": 0,
            "LEAST": LEAST_SPAN,
            "HAS_SINKS": False,
        },
        wide=128,
        narrow_allowed=12,
        floor=f"{FLOOR}; bytes: B Hq S (D + 1) 4 + B Hq D b",
        target="0.75 of the floor; part of decode's",
    )


def _latent(heads: int, arch: int) -> KernelCase:
    shape = LatentShape(heads, 512, 64, 64)
    tiles = latent_tiles(arch, shape, 2)
    return KernelCase(
        name=f"latent decode 512+64 h{heads}",
        kernel="latent:split_latent_kernel",
        arguments={
            **_types("*bf16", "q", "pages"),
            **_types("*fp32", "partial_out", "partial_lse"),
            **_types("*i32", "page_table", "requests", "query_starts", "seq_lens"),
            **_types("i32", "table_stride", "split_tokens"),
            "q_stride": "i32:16",
            "scale": "fp32",
        },
        constants={
            "HEADS": heads,
            "ROWS": heads,
            "LATENT": shape.latent,
            "ROTARY": shape.rotary,
            "PAGE": shape.page_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "LEAST": LEAST_SPAN,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        archs=(arch,),
        wide=128,
        narrow_allowed=12,
        wgmma=tiles.block_m >= 64,
        buffers=2,
        floor=f"{FLOOR}; bytes: sum(len) 576 b + B H (2 512 + 64) 2 + partial; flops: 2 sum(len) H 1088",
        target="H=16: 0.65 (B64 len 8k: 141 us); H=128: 0.35 of the rate",
    )


def _cache() -> Iterator[KernelCase]:
    tables = ("tables", "rows", "change_starts", "change_at", "change_page", "starts", "token_starts", "slots")
    yield KernelCase(
        name="update_tables page64",
        kernel="page_tables:update_tables_kernel",
        arguments={**_types("*i32", *tables), **_types("i32", "entries", "width")},
        constants={"PAGE": 64, "BLOCK": 1024},
        floor="one launch: 8 bytes a token",
        target="<= 12 us for 256 rows with 8192 new tokens; <= 6 us for decode",
    )
    for kv_dtype, archs in ((torch.bfloat16, (80, 90)), (FP8, (90,))):
        kv = _NAMES[kv_dtype]
        yield KernelCase(
            name=f"write_kv 8x128 {kv}",
            kernel="kv_cache:write_kernel",
            arguments={
                **_types("*bf16", "k", "v"),
                **_types(f"*{kv}", "k_pages", "v_pages"),
                **_types("*fp32", "k_scale", "v_scale"),
                "slots": "*i32",
                **_types("i32:16", "k_stride", "v_stride"),
            },
            constants={
                "HEADS": 8,
                "BLOCK_H": 8,
                "DIM": 128,
                "BLOCK_DIM": 128,
                "PAGE": 64,
                "HAS_SCALES": kv_dtype == FP8,
            },
            archs=archs,
            wide=64 if kv_dtype == FP8 else 128,  # 8 numbers a thread
            narrow_allowed=4,
            floor="T Hk 2D (b + b_kv) bytes",
            target="0.75 (8192 tokens of 8x128 bf16: 15.6 us)",
        )
    yield KernelCase(
        name="copy_pages 8x64x128",
        kernel="kv_cache:copy_kernel",
        arguments={**_types("*bf16", "k_pages", "v_pages"), **_types("*i32", "sources", "targets")},
        constants={"SIZE": 8 * 64 * 128, "BLOCK": 2048},
        num_warps=8,
        wide=128,
        narrow_allowed=2,
        floor="2 (bytes of the pages)",
        target="0.75",
    )


BF16 = torch.bfloat16
LLAMA = _shape(32, 8, 128, 64, BF16)
GPT_OSS = _shape(64, 8, 64, 64, BF16)
GEMMA = _shape(8, 4, 256, 64, BF16)
SMOLLM = _shape(9, 3, 64, 16, BF16)

CASES: tuple[KernelCase, ...] = (
    *_cache(),
    *(_decode("g4 d128", LLAMA, a, "0.80 at B64 len 4k (250 us); 0.60 at B1 len 32k") for a in (80, 90)),
    _decode("g4 d128 single", LLAMA, 90, "0.80 at B256 len 4k", SINGLE=True),
    _decode("g4 d128 fp8", _shape(32, 8, 128, 64, FP8), 90, "0.60 at B64 len 4k"),
    *(_decode("g4 d128 verify8", LLAMA, a, "0.70 at B64 len 4k", queries=8) for a in (80, 90)),
    _decode("g8 d64 window sinks", GPT_OSS, 90, "0.70 at B64", WINDOW=128, HAS_SINKS=True),
    *(_decode("g2 d256 cap", GEMMA, a, "0.75 at B64 len 4k", CAP=50.0) for a in (80, 90)),
    _decode("g3 d64 page16", SMOLLM, 80, "0.50: tiles of 16 tokens"),
    _merge(128),
    *(_extend("g4 d128", LLAMA, a, "0.50 of the rate for new >= 2k") for a in (80, 90)),
    *(_extend("g8 d64", GPT_OSS, a, "0.43 of the rate for new >= 2k") for a in (80, 90)),
    *(_extend("g2 d256", GEMMA, a, "0.60 of the rate for new >= 2k") for a in (80, 90)),
    _extend("g4 d128 window", LLAMA, 90, "0.40 of the rate", WINDOW=4096),
    _latent(16, 90),
    *(_latent(128, arch) for arch in (80, 90)),
    *LAYER_CASES,
)
