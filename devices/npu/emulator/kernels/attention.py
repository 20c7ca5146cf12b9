"""Fused inference attention (FIA), versions 1 and 2: one call in one form, its rules, and its computation.

Both versions are read into an `AttentionCall`. The rules stand in `attention_rules.py`. The computation is dense
attention in fp32, row by row (decode rows of similar length together), over exactly the tokens that the lengths say:
what lies behind them in a page, even NaN, is never multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from devices.npu.emulator.kernels.attention_rules import MASK_TRAP, AttentionCall, check_attention
from devices.npu.emulator.kernels.layouts import Layout, from_bsnd, read_layout, split_heads, to_bsnd
from devices.npu.emulator.rules import ContractViolation, strictness

_NOT_EMULATED_V1 = (
    "pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2", "antiquant_scale",
    "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale",
    "value_antiquant_offset", "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix",
    "actual_shared_prefix_len", "query_rope", "key_rope", "key_rope_antiquant_scale",
)  # fmt: skip
_NOT_EMULATED_V2 = (
    "query_rope", "key_rope", "pse_shift", "dequant_scale_query", "dequant_scale_key", "dequant_offset_key",
    "dequant_scale_value", "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out",
    "quant_scale_p",
)  # fmt: skip


def fused_infer_attention_v1(**given: Any) -> Any:
    """`npu_fused_infer_attention_score`, `.default` and `.out`: (attention, log-sum-exp)."""
    _refuse(given, _NOT_EMULATED_V1, "npu_fused_infer_attention_score")
    call = AttentionCall(
        operator="npu_fused_infer_attention_score",
        query=given["query"],
        key=given["key"],
        value=given["value"],
        mask=given["atten_mask"],
        query_lens=given["actual_seq_lengths"],
        kv_lens=given["actual_seq_lengths_kv"],
        block_table=given["block_table"],
        num_heads=given["num_heads"],
        num_kv_heads=given["num_key_value_heads"] or given["num_heads"],
        scale=given["scale"],
        pre_tokens=given["pre_tokens"],
        next_tokens=given["next_tokens"],
        layout_name=given["input_layout"],
        sparse_mode=given["sparse_mode"],
        block_size=given["block_size"],
        sink=None,
        lens_names=("actual_seq_lengths", "actual_seq_lengths_kv"),
    )
    return _run(call, given["softmax_lse_flag"], given.get("out"))


def fused_infer_attention_v2(**given: Any) -> Any:
    """`npu_fused_infer_attention_score_v2`, `.default` and `.out`: (attention, log-sum-exp)."""
    _refuse(given, _NOT_EMULATED_V2, "npu_fused_infer_attention_score_v2")
    call = AttentionCall(
        operator="npu_fused_infer_attention_score_v2",
        query=given["query"],
        key=given["key"],
        value=given["value"],
        mask=given["atten_mask"],
        query_lens=given["actual_seq_qlen"],
        kv_lens=given["actual_seq_kvlen"],
        block_table=given["block_table"],
        num_heads=given["num_query_heads"],
        num_kv_heads=given["num_key_value_heads"] or given["num_query_heads"],
        scale=given["softmax_scale"],
        pre_tokens=given["pre_tokens"],
        next_tokens=given["next_tokens"],
        layout_name=given["input_layout"],
        sparse_mode=given["sparse_mode"],
        block_size=given["block_size"],
        sink=given["learnable_sink"],
        lens_names=("actual_seq_qlen", "actual_seq_kvlen"),
    )
    return _run(call, given["return_softmax_lse"], given.get("out"))


def _refuse(given: dict[str, Any], names: Sequence[str], operator: str) -> None:
    used = [name for name in names if given[name] is not None]
    if used:
        raise ContractViolation("not-emulated", operator, f"the emulator has no {', '.join(used)}")


def workspace(**given: Any) -> torch.Tensor:
    """Scratch memory for a call; its size means nothing here."""
    return torch.empty(1024, dtype=torch.uint8)


def infer_output_v1(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors for `.out` of version 1."""
    return _infer_output(given, given["num_heads"], given["softmax_lse_flag"])


def infer_output_v2(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors for `.out` of version 2."""
    return _infer_output(given, given["num_query_heads"], given["return_softmax_lse"])


def _infer_output(given: dict[str, Any], num_heads: int, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    query = given["query"]
    layout = read_layout("infer_output", given["input_layout"], query)
    batch, tokens, heads, _ = to_bsnd(query, layout.query, num_heads).shape
    output = from_bsnd(to_bsnd(torch.empty_like(query), layout.query, num_heads), layout.output)
    shape = (tokens, heads, 1) if layout.packed else (batch, heads, tokens, 1)
    return output, torch.empty(shape if lse else (1,), dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a call: its queries `[start, start + num_queries)` of batch row `batch`, over `num_keys` keys
    that begin at `key_start` of its memory (packed keys only; else 0)."""

    index: int
    batch: int
    start: int
    num_queries: int
    num_keys: int
    key_start: int = 0


def _run(call: AttentionCall, lse: bool, out: list[torch.Tensor] | None) -> Any:
    layout = read_layout(call.operator, call.layout_name, call.query)
    check_attention(call, layout)
    query = to_bsnd(call.query, layout.query, call.num_heads)
    rows = _rows(call, layout, query)
    result = torch.zeros((*query.shape[:3], _value_dim(call, layout)), dtype=call.query.dtype)
    log_sums = torch.full((query.shape[0], query.shape[2], query.shape[1]), torch.inf, dtype=torch.float32)
    if not layout.packed:
        for row in rows:
            result[row.batch, row.num_queries :] = (
                torch.nan
            )  # queries behind a row's length: not said, so never a number
    keys = _Keys(call, layout)
    if _decodes_together(call, layout, rows):
        _decode(call, query, rows, keys, result, log_sums)
    else:
        for row in rows:
            if row.num_queries and row.num_keys:
                _attend(call, query, row, keys, result, log_sums)
    attention = from_bsnd(result, layout.output)
    if not lse:
        sums = torch.zeros(1)
    elif layout.packed:
        sums = log_sums[0].transpose(0, 1).unsqueeze(-1).contiguous()
    else:
        sums = log_sums.unsqueeze(-1)
    if out is None:
        return attention, sums
    out[0].copy_(attention.view_as(out[0]))
    if lse:
        out[1].copy_(sums)
    return out[0], out[1]


def _rows(call: AttentionCall, layout: Layout, query: torch.Tensor) -> list[Row]:
    """The sequences, as the lists of lengths say."""
    if layout.packed:
        ends = list(call.query_lens or [])
        kv = list(call.kv_lens or [])
        key_ends = [0] * len(ends) if call.paged else kv
        lens = kv if call.paged else [end - start for start, end in zip([0, *kv], kv, strict=False)]
        starts, key_starts = [0, *ends[:-1]], [0, *key_ends[:-1]]
        return [
            Row(index, 0, start, end - start, lens[index], 0 if call.paged else key_starts[index])
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    batch, tokens = query.shape[:2]
    query_lens = [tokens] * batch if call.query_lens is None or tokens == 1 else _spread(call.query_lens, batch)
    whole = 0 if call.paged else to_bsnd(call.key, layout.query, call.num_kv_heads).shape[1]
    kv_lens = [whole] * batch if call.kv_lens is None else _spread(call.kv_lens, batch)
    return [Row(row, row, 0, query_lens[row], kv_lens[row]) for row in range(batch)]


def _spread(lens: Sequence[int], batch: int) -> list[int]:
    """One length for each row: a list of one is for all, and of a longer one the first are taken."""
    return list(lens) * batch if len(lens) == 1 else list(lens[:batch])


def _value_dim(call: AttentionCall, layout: Layout) -> int:
    if call.paged:
        return call.value.shape[-1] // call.num_kv_heads if call.value.dim() == 3 else call.value.shape[-1]
    return to_bsnd(call.value, layout.query, call.num_kv_heads).shape[-1]


class _Keys:
    """Keys and values of a row, [keys, kv_heads, dim] in fp32, out of pages or a padded or packed tensor."""

    def __init__(self, call: AttentionCall, layout: Layout) -> None:
        self.call = call
        self.table = call.block_table
        self.head_major = call.paged and call.key.dim() == 4
        if not call.paged:
            self.key = to_bsnd(call.key, layout.query, call.num_kv_heads)
            self.value = to_bsnd(call.value, layout.query, call.num_kv_heads)

    def of(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        if self.table is None:
            end = row.key_start + row.num_keys
            return (
                self.key[row.batch, row.key_start : end].float(),
                self.value[row.batch, row.key_start : end].float(),
            )
        pages = -(-row.num_keys // self.call.block_size)
        ids = self.table[row.index, :pages].long()
        return tuple(
            self.pages(cache, ids[None])[0, : row.num_keys].float() for cache in (self.call.key, self.call.value)
        )  # type: ignore[return-value]

    def pages(self, cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Pages `ids` [rows, pages] of a cache, as [rows, tokens, kv_heads, dim]."""
        found = cache.index_select(0, ids.flatten()).view(*ids.shape, *cache.shape[1:])
        if self.head_major:
            return found.transpose(2, 3).flatten(1, 2)
        return split_heads(found.flatten(1, 2), self.call.num_kv_heads)


def _grouped(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[queries, heads, dim] as [queries, kv_heads, group, dim] in fp32."""
    num, heads, dim = queries.shape
    return queries.float().reshape(num, num_kv_heads, heads // num_kv_heads, dim)


def _attend(
    call: AttentionCall, query: torch.Tensor, row: Row, keys: _Keys, result: torch.Tensor, log_sums: torch.Tensor
) -> None:
    """One row's queries over its keys."""
    span = slice(row.start, row.start + row.num_queries)
    q = _grouped(query[row.batch, span], call.num_kv_heads)
    k, v = keys.of(row)
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * call.scale
    masked = _masked(call, row)
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    weights, sums = _softmax(scores, call.sink)
    attended = torch.einsum("hgqk,khd->qhgd", weights, v)
    result[row.batch, span] = attended.flatten(1, 2).to(result.dtype)
    log_sums[row.batch, :, span] = sums.flatten(0, 1)


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights over the last dimension of [kv_heads, group, queries, keys], and their log-sum-exp. A sink [heads] is one
    more score with no value. A query with every key masked gets zeros."""
    highest = scores.amax(dim=-1, keepdim=True)
    extra = None
    if sink is not None:
        extra = sink.float().view(*scores.shape[:2], 1, 1)
        highest = torch.maximum(highest, extra)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (scores - highest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if extra is not None:
        total = total + (extra - highest).exp()
    sums = (total.log() + highest).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1.0), sums


def _masked(call: AttentionCall, row: Row) -> torch.Tensor | None:
    """True where a query does not see a key, [queries, keys]; None when it sees all."""
    queries, keys = row.num_queries, row.num_keys
    mode = call.effective_mode
    if mode in (0, 1):
        return _explicit(call, row)
    shift = 0 if mode == 2 else keys - queries
    # Distance of a key from the query's own place: 0 is itself, negative came before.
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - shift
    if mode == 4:
        return (distance < -call.pre_tokens) | (distance > call.next_tokens)
    return distance > 0


def _explicit(call: AttentionCall, row: Row) -> torch.Tensor | None:
    """The caller's own mask of sparse modes 0 and 1, cut to the row."""
    mask = call.mask
    if mask is None:
        return None
    if mask.dim() == 2 and call.query_len_is_one:
        part = mask[row.batch % mask.shape[0]][None]
    elif mask.dim() == 4:
        part = mask[row.batch % mask.shape[0], 0]
    else:
        part = mask.view(mask.shape[-2], mask.shape[-1])
    part = part[: row.num_queries, : row.num_keys].bool()
    if not strictness().masks and mask.dim() == 4 and mask.shape[:3] == (1, 1, 1):
        part = part.clone()
        part[:, MASK_TRAP:] = False
    return part


def _decodes_together(call: AttentionCall, layout: Layout, rows: list[Row]) -> bool:
    """Whether all rows are one query over paged keys without a mask of their own, and padding them costs little."""
    if not call.paged or call.sink is not None or not all(row.num_queries == 1 for row in rows):
        return False
    if call.mask is not None and not (layout.packed and call.sparse_mode == 3):
        return False
    lens = [row.num_keys for row in rows]
    return len(rows) > 1 and min(lens) > 0 and max(lens) * len(lens) <= 2 * sum(lens)


def _head_major(tokens: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, kv_heads, dim] as [rows, kv_heads, tokens, dim] in fp32, in memory of its own."""
    return tokens.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _decode(
    call: AttentionCall, query: torch.Tensor, rows: list[Row], keys: _Keys, result: torch.Tensor, log_sums: torch.Tensor
) -> None:
    """Rows of one query each, padded to the longest; entries behind a row's pages are read as its first page."""
    assert call.block_table is not None
    lens = [row.num_keys for row in rows]
    pages = -(-max(lens) // call.block_size)
    used = -(-np.asarray(lens) // call.block_size)
    table = call.block_table[: len(rows), :pages].long()
    table = torch.where(torch.from_numpy(np.arange(pages)[None] < used[:, None]), table, table[:, :1])
    k, v = (_head_major(keys.pages(cache, table)) for cache in (call.key, call.value))
    q = _grouped(query.flatten(0, 1)[: len(rows)], call.num_kv_heads)
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(call.scale)
    for row, length in enumerate(lens):
        # Whatever lies behind the end: its score is replaced, its value too, for even a weight of 0 times NaN is NaN.
        scores[row, ..., length:] = -torch.inf
        v[row, :, length:] = 0.0
    weights, sums = _softmax(scores, None)
    attended = torch.matmul(weights, v).flatten(1, 2).to(result.dtype)
    result.flatten(0, 1)[: len(rows)] = attended
    # [rows, heads]: a packed layout has its rows along the tokens, another along the batch.
    packed = result.shape[0] == 1
    flat = sums.flatten(1)
    log_sums.copy_(flat.T[None] if packed and len(rows) == result.shape[1] else flat.unsqueeze(-1))
