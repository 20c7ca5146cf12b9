"""Arguments of `npu_fused_infer_attention_score_v2` for rows with a few new tokens each: a verify step in one call.

    layout BSH    row 0  | q q q . |      padded to the longest row; what comes out for the padding means nothing
                  row 1  | q q q q |
    layout TND    | q q q | q q q q |     one row behind the other, lengths of queries cumulative

`VerifyAttention` is BSH and takes any heads. `SinkAttention` is TND, because attention sinks (a learned score of each
head that takes weight and gives no value, arXiv:2309.17453) exist in no other layout; there heads are of 128 and KV is
bf16. Of TND with pages the documentation says both that it is not supported and how its lengths and its cache are
given. Its sparse mode 3 wants rows that have tokens before the new ones, so a band with an open end takes its place.
The engine calls neither yet: it has no speculation, and none of its models has sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from devices.npu.arguments.attention import (
    BAND,
    CAUSAL,
    V2,
    AttentionShape,
    check_cache,
    check_prefill_page,
    check_table,
    check_triangle,
)
from devices.npu.arguments.contract import (
    HALF_DTYPES,
    INT32_MAX,
    Call,
    ContractViolation,
    check_contiguous,
    check_dtype,
    check_one_device,
    check_same_dtype,
)

PACKED_HEAD_DIM = 128
"""TND has heads of 128; of 192 for keys only with values of 128 or 192, which no cache here is."""

MAX_PACKED_ROWS, MAX_PACKED_TOKENS = 4096, 1 << 20


@dataclass(frozen=True, slots=True)
class VerifyAttention:
    """One call but for its query, key and value.

    Attributes:
        query_lens: new tokens of each row; the longest row has at least two.
        kv_lens: readable tokens of each row, the new ones among them.
        block_table: page ids, int32 [batch, pages], on the device.
        mask: the fixed triangle.
        window: a token sees itself and the `window - 1` before it; None sees all.
    """

    shape: AttentionShape
    page_size: int
    query_lens: list[int]
    kv_lens: list[int]
    block_table: torch.Tensor
    mask: torch.Tensor
    window: int | None = None

    def __post_init__(self) -> None:
        _check_rows(self.query_lens, self.kv_lens, self.block_table, self.page_size, self.mask, self.window)
        if self.longest < 2:
            rule = "with one query token in every row sparse_mode is ignored; give a decode call"
            raise ContractViolation(V2, rule, self.query_lens)

    @property
    def longest(self) -> int:
        return max(self.query_lens)

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
        """The call for one layer.

        Args:
            query: [batch, longest, num_heads * head_dim], a row's tokens at its beginning;
            key, value: [pages, page_size, num_kv_heads * head_dim].
        """
        check_dtype(V2, "query", query, HALF_DTYPES)
        want = (len(self.query_lens), self.longest, self.shape.num_heads * self.shape.head_dim)
        _check_tensors(self.shape, self.page_size, want, query, key, value, self.block_table)
        common = _kwargs(self.shape, self.page_size, self.kv_lens, self.block_table, self.mask)
        layout = {"input_layout": "BSH", "actual_seq_qlen": self.query_lens}
        if self.window is None:
            return Call((query, key, value), common | layout | {"sparse_mode": CAUSAL})
        band = {"sparse_mode": BAND, "pre_tokens": self.window - 1, "next_tokens": 0}
        return Call((query, key, value), common | layout | band)


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """One call but for its query, key and value, with a sink for each head.

    Attributes:
        query_lens: new tokens of each row, not cumulative; kv_lens, block_table, mask, window: see `VerifyAttention`.
        sink: bf16 [num_heads], on the device.
    """

    shape: AttentionShape
    page_size: int
    query_lens: list[int]
    kv_lens: list[int]
    block_table: torch.Tensor
    mask: torch.Tensor
    sink: torch.Tensor
    window: int | None = None

    def __post_init__(self) -> None:
        if self.shape.head_dim != PACKED_HEAD_DIM:
            raise ContractViolation(V2, f"heads are of {PACKED_HEAD_DIM} in layout TND", self.shape.head_dim)
        check_dtype(V2, "learnable_sink", self.sink, (torch.bfloat16,))
        if tuple(self.sink.shape) != (self.shape.num_heads,):
            rule = f"learnable_sink has a number for each of {self.shape.num_heads} query heads"
            raise ContractViolation(V2, rule, f"shape {tuple(self.sink.shape)}")
        check_contiguous(V2, learnable_sink=self.sink)
        _check_rows(self.query_lens, self.kv_lens, self.block_table, self.page_size, self.mask, self.window)
        if len(self.query_lens) > MAX_PACKED_ROWS:
            raise ContractViolation(V2, f"at most {MAX_PACKED_ROWS} rows in layout TND", len(self.query_lens))
        if sum(self.query_lens) > MAX_PACKED_TOKENS:
            raise ContractViolation(V2, f"at most {MAX_PACKED_TOKENS} tokens in layout TND", sum(self.query_lens))
        if self.window is not None and max(self.query_lens) == 1:
            rule = "with one query token in every row sparse_mode is ignored, and layout TND takes no mask for a window"
            raise ContractViolation(V2, rule, f"window {self.window}")

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
        """The call for one layer.

        Args:
            query: [tokens, num_heads, 128]; key, value: [pages, page_size, num_kv_heads * 128].
        """
        check_dtype(V2, "query", query, (torch.bfloat16,))
        want = (sum(self.query_lens), self.shape.num_heads, PACKED_HEAD_DIM)
        _check_tensors(self.shape, self.page_size, want, query, key, value, self.block_table)
        check_one_device(V2, query=query, learnable_sink=self.sink)
        return Call(
            (query, key, value),
            _kwargs(self.shape, self.page_size, self.kv_lens, self.block_table, self.mask)
            | {
                "input_layout": "TND",
                "actual_seq_qlen": list(accumulate(self.query_lens)),
                "sparse_mode": BAND,
                "pre_tokens": INT32_MAX if self.window is None else self.window - 1,
                "next_tokens": 0,
                "learnable_sink": self.sink,
            },
        )


def _check_rows(
    query_lens: list[int],
    kv_lens: list[int],
    table: torch.Tensor,
    page_size: int,
    mask: torch.Tensor,
    window: int | None,
) -> None:
    check_table(V2, table, kv_lens, page_size)
    check_prefill_page(V2, page_size)
    check_triangle(V2, mask)
    if not len(query_lens) == len(kv_lens) == table.shape[0]:
        got = f"{len(query_lens)} query lengths, {len(kv_lens)} of keys, {table.shape[0]} rows of block_table"
        raise ContractViolation(V2, "each row has a length of its own", got)
    if not all(type(new) is int and 1 <= new <= length for new, length in zip(query_lens, kv_lens, strict=True)):
        rule = "a row has at least one new token and no more than it can read"
        raise ContractViolation(V2, rule, f"{query_lens} of {kv_lens}")
    if window is not None and window < 1:
        raise ContractViolation(V2, "a window has at least one token", window)


def _check_tensors(
    shape: AttentionShape,
    page_size: int,
    want: tuple[int, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
) -> None:
    check_same_dtype(V2, query=query, key=key, value=value)
    if tuple(query.shape) != want:
        raise ContractViolation(V2, f"query is {list(want)}", f"shape {tuple(query.shape)}")
    check_cache(V2, shape, page_size, key, value)
    check_contiguous(V2, query=query, key=key, value=value)
    check_one_device(V2, query=query, key=key, value=value, block_table=table)


def _kwargs(
    shape: AttentionShape, page_size: int, kv_lens: list[int], table: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    return {
        "atten_mask": mask,
        "actual_seq_kvlen": kv_lens,
        "block_table": table,
        "num_query_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "softmax_scale": shape.scale,
        "block_size": page_size,
    }
