"""Legal calls of the vendor's operators, as keyword arguments that a test may spoil one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BLOCKS, BLOCK = 8, 128
HEADS, KV_HEADS, DIM = 6, 2, 64
SCALE = DIM**-0.5


def npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("npu")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal_mask() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def decode(**changes: Any) -> dict[str, Any]:
    """FIA v1, three rows of one query, pages [blocks, block_size, H]."""
    call: dict[str, Any] = {
        "query": npu(random(3, 1, HEADS * DIM, seed=1)),
        "key": npu(random(BLOCKS, BLOCK, KV_HEADS * DIM, seed=2)),
        "value": npu(random(BLOCKS, BLOCK, KV_HEADS * DIM, seed=3)),
        "actual_seq_lengths_kv": [130, 5, 256],
        "block_table": npu(torch.tensor([[3, 5], [7, 0], [2, 6]], dtype=torch.int32)),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": SCALE,
        "input_layout": "BSH",
        "block_size": BLOCK,
    }
    return call | changes


def prefill(**changes: Any) -> dict[str, Any]:
    """FIA v1, one row of seven queries at the end of 130 keys, causal."""
    call = decode(
        query=npu(random(1, 7, HEADS, DIM, seed=1)),
        actual_seq_lengths=[7],
        actual_seq_lengths_kv=[130],
        block_table=npu(torch.tensor([[3, 5]], dtype=torch.int32)),
        input_layout="BSND",
        sparse_mode=3,
        atten_mask=npu(causal_mask()),
    )
    return call | changes


def packed(**changes: Any) -> dict[str, Any]:
    """FIA v2 in TND: rows of 4, 1 and 3 queries, head size 128, pages [blocks, heads, block_size, dim]."""
    call: dict[str, Any] = {
        "query": npu(random(8, HEADS, 128, seed=1)),
        "key": npu(random(BLOCKS, KV_HEADS, BLOCK, 128, seed=2)),
        "value": npu(random(BLOCKS, KV_HEADS, BLOCK, 128, seed=3)),
        "actual_seq_qlen": [4, 5, 8],
        "actual_seq_kvlen": [130, 9, 256],
        "block_table": npu(torch.tensor([[3, 5], [7, 0], [2, 6]], dtype=torch.int32)),
        "num_query_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "softmax_scale": 128**-0.5,
        "input_layout": "TND",
        "block_size": BLOCK,
        "sparse_mode": 3,
        "atten_mask": npu(causal_mask()),
    }
    return call | changes


def cache_write(**changes: Any) -> dict[str, Any]:
    """`_npu_reshape_and_cache`; `npu_scatter_pa_kv_cache` takes the same under another name for the slots."""
    call: dict[str, Any] = {
        "key": npu(random(3, KV_HEADS, DIM, seed=1)),
        "value": npu(random(3, KV_HEADS, DIM, seed=2)),
        "key_cache": torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="npu"),
        "value_cache": torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="npu"),
        "slot_indices": npu(torch.tensor([130, 0, 1023], dtype=torch.int32)),
    }
    return call | changes


def cache_write_pa(**changes: Any) -> dict[str, Any]:
    call = cache_write()
    call["slot_mapping"] = call.pop("slot_indices")
    return call | {"cache_mode": "Norm"} | changes


def scatter(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "input": torch.zeros(10, 4, dtype=torch.bfloat16, device="npu"),
        "indices": npu(torch.tensor([[3], [7]])),
        "updates": npu(random(2, 4)),
    }
    return call | changes


def paged(**changes: Any) -> dict[str, Any]:
    """`_npu_paged_attention`; lengths are an int32 tensor on the host."""
    call: dict[str, Any] = {
        "query": npu(random(3, HEADS, DIM, seed=1)),
        "key_cache": npu(random(BLOCKS, BLOCK, KV_HEADS, DIM, seed=2)),
        "value_cache": npu(random(BLOCKS, BLOCK, KV_HEADS, DIM, seed=3)),
        "num_kv_heads": KV_HEADS,
        "num_heads": HEADS,
        "scale_value": SCALE,
        "block_table": npu(torch.tensor([[3, 5], [7, 0], [2, 6]], dtype=torch.int32)),
        "context_lens": torch.tensor([130, 5, 256], dtype=torch.int32),
        "out": torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16, device="npu"),
    }
    return call | changes


def gather(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "key_cache": npu(random(BLOCKS, BLOCK, KV_HEADS, DIM, seed=2)),
        "value_cache": npu(random(BLOCKS, BLOCK, KV_HEADS, DIM, seed=3)),
        "block_tables": npu(torch.tensor([[3, 5], [7, 0]], dtype=torch.int32)),
        "seq_lens": npu(torch.tensor([130, 4], dtype=torch.int32)),
        "key": torch.zeros(134, KV_HEADS, DIM, dtype=torch.bfloat16, device="npu"),
        "value": torch.zeros(134, KV_HEADS, DIM, dtype=torch.bfloat16, device="npu"),
    }
    return call | changes


def rotary(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "query": npu(random(1, 5, HEADS, DIM, seed=1)),
        "key": npu(random(1, 5, KV_HEADS, DIM, seed=2)),
        "cos": npu(random(1, 5, 1, DIM, seed=3)),
        "sin": npu(random(1, 5, 1, DIM, seed=4)),
    }
    return call | changes


def heads_first(**changes: Any) -> dict[str, Any]:
    """FIA v1 in BNSD, pages [blocks, heads, block_size, dim]."""
    call = decode(
        query=npu(random(3, HEADS, 1, DIM, seed=1)),
        key=npu(random(BLOCKS, KV_HEADS, BLOCK, DIM, seed=2)),
        value=npu(random(BLOCKS, KV_HEADS, BLOCK, DIM, seed=3)),
        input_layout="BNSD",
    )
    return call | changes


def output_of(**changes: Any) -> dict[str, Any]:
    """What `infer_output` takes of `decode`."""
    call = decode()
    names = ("query", "value", "input_layout", "block_table", "num_heads", "num_key_value_heads")
    return {name: call[name] for name in names} | changes


def output_of_v2(**changes: Any) -> dict[str, Any]:
    call = packed()
    names = ("query", "value", "input_layout", "block_table", "num_query_heads", "num_key_value_heads")
    return {name: call[name] for name in names} | changes


def norm(**changes: Any) -> dict[str, Any]:
    return {"input": npu(random(2, 64)), "gamma": npu(random(64))} | changes


def add_norm(**changes: Any) -> dict[str, Any]:
    return {"x1": npu(random(2, 64)), "x2": npu(random(2, 64)), "gamma": npu(random(64))} | changes


def gate(**changes: Any) -> dict[str, Any]:
    return {"input": npu(random(2, 64))} | changes


def turn(**changes: Any) -> dict[str, Any]:
    call = {"input": npu(random(1, 5, HEADS, DIM)), "r1": npu(random(1, 5, 1, DIM)), "r2": npu(random(1, 5, 1, DIM))}
    return call | changes


def filtered(**changes: Any) -> dict[str, Any]:
    call = {"logits": npu(random(2, 50)), "p": npu(torch.full((2,), 0.5, dtype=torch.bfloat16))}
    return call | {"k": npu(torch.tensor([3, 50], dtype=torch.int32))} | changes


def cast(**changes: Any) -> dict[str, Any]:
    return {"input": npu(random(16, 16)), "acl_format": 2} | changes


FIA = "npu_fused_infer_attention_score"

LEGAL: dict[str, list[Callable[..., dict[str, Any]]]] = {
    FIA: [decode, prefill, heads_first],
    f"{FIA}_v2": [packed],
    f"_{FIA}_get_max_workspace": [decode, prefill],
    f"_{FIA}_v2_get_max_workspace": [packed],
    f"_{FIA}_infer_output": [output_of],
    f"_{FIA}_v2_infer_output": [output_of_v2],
    "_npu_paged_attention": [paged],
    "_npu_paged_attention_get_workspace": [paged],
    "_npu_reshape_and_cache": [cache_write],
    "npu_scatter_pa_kv_cache": [cache_write_pa],
    "npu_scatter_nd_update": [scatter],
    "npu_scatter_nd_update_": [scatter],
    "npu_gather_pa_kv_cache": [gather],
    "npu_gather_pa_kv_cache_functional": [gather],
    "npu_apply_rotary_pos_emb": [rotary],
    "npu_rms_norm": [norm],
    "npu_add_rms_norm": [add_norm],
    "npu_swiglu": [gate],
    "npu_rotary_mul": [turn],
    "npu_top_k_top_p": [filtered],
    "npu_format_cast": [cast],
}
"""Legal calls by operator, of every operator that the emulator has."""
