"""ATB's paged attention: decode, one query a row, lengths in an int32 tensor on the host."""

from __future__ import annotations

import torch

from devices.npu.emulator.kernels.cache import ATB_DOCS, check_range
from devices.npu.emulator.rules import require, strictness


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """Attention of query [rows, heads, dim] over caches [blocks, block_size, kv_heads, dim], into `out`."""
    _check(query, key_cache, num_kv_heads, num_heads, block_table, context_lens)
    block_size = key_cache.shape[1]
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            out[row].zero_()
            continue
        ids = block_table[row, : -(-length // block_size)]
        check_range("_npu_paged_attention", ids, key_cache.shape[0], f"block ids of row {row}", ATB_DOCS, "block-ids")
        index = ids.long()
        k = key_cache[index].flatten(0, 1)[:length].float()
        v = value_cache[index].flatten(0, 1)[:length].float()
        q = query[row].float().view(num_kv_heads, -1, query.shape[-1])
        weights = torch.einsum("hgd,khd->hgk", q, k).mul_(scale_value).softmax(dim=-1)
        out[row] = torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1).to(out.dtype)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    operator, switches = "_npu_paged_attention", strictness()
    if switches.dtypes:
        require(
            query.dtype in (torch.float16, torch.bfloat16) or not switches.attention_dtypes,
            "attention-dtype",
            operator,
            f"query is {query.dtype}; it must be float16 or bfloat16 ({ATB_DOCS})",
        )
        require(
            block_table.dtype is torch.int32, "table-dtype", operator, f"block_table is {block_table.dtype}, not int32"
        )
    if switches.host_lists:
        require(
            context_lens.dtype is torch.int32 and context_lens.shape == (query.shape[0],),
            "host-lists",
            operator,
            f"context_lens is {context_lens.dtype} {tuple(context_lens.shape)}; it must be int32 on the host, one for "
            f"each of {query.shape[0]} rows ({ATB_DOCS})",
        )
    if switches.shapes:
        require(
            num_heads % num_kv_heads == 0 and query.shape[1] == num_heads and key_cache.shape[2] == num_kv_heads,
            "heads",
            operator,
            f"{num_heads} heads over {num_kv_heads}; query {tuple(query.shape)}, cache {tuple(key_cache.shape)}",
        )
        require(
            query.shape[2] <= 256, "head-size", operator, f"head size {query.shape[2]}; the limit is 256 ({ATB_DOCS})"
        )
    if switches.pages:
        size = key_cache.shape[1]
        require(
            size % 16 == 0 and size <= 128,
            "page-size",
            operator,
            f"block_size={size}; it must be a multiple of 16 up to 128 ({ATB_DOCS})",
        )
