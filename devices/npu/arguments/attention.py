"""Arguments of fused inference attention over paged KV: `npu_fused_infer_attention_score` and its `_v2`.

Layout BSH throughout: its rules with paged KV are free of contradictions, whereas the documentation of TND both
excludes paged KV and describes it. A batch has one query length; requests with one new token (decode) form one call,
every other request (prefill, chunk) is a call of its own. Several rows with a few tokens each, and sinks:
`devices.npu.arguments.several`.

| rule | one query token | more |
|---|---|---|
| page size | multiple of 16, at most 512 | 128, 256, 384 or 512 |
| mask | none, or [batch, 1, 1, table width * page size] | the fixed triangle of 2048, sparse mode 3 or 4 |
| `pre_tokens` | ignored: a window has to be a mask | the tokens before a query's own that it sees |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from devices.npu.arguments.contract import (
    HALF_DTYPES,
    INT32_MAX,
    Call,
    ContractViolation,
    check_contiguous,
    check_dtype,
    check_lengths,
    check_one_device,
    check_same_dtype,
)
from devices.pages import page_count

V1 = "npu_fused_infer_attention_score"
V2 = "npu_fused_infer_attention_score_v2"

MASK_SIZE = 2048
"""Rows and columns of the triangle that sparse modes 2, 3 and 4 want, whatever the lengths are."""

CAUSAL, BAND = 3, 4
"""Sparse modes: a triangle ending at the last query and key, and a band of it."""

MAX_BATCH, MAX_HEADS, MAX_GROUP, MAX_HEAD_DIM, MAX_PAGE = 65536, 256, 64, 512, 512
MAX_HIDDEN = 65535
PREFILL_PAGES = (128, 256, 384, 512)


def is_decode_page(page_size: int) -> bool:
    """Whether one query token may read 16-bit KV in such pages."""
    return 0 < page_size <= MAX_PAGE and page_size % 16 == 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A layer's heads; checked once, when the attention is made."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if not 0 < self.num_heads <= MAX_HEADS:
            raise ContractViolation(V1, f"there are at most {MAX_HEADS} query heads", self.num_heads)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads or self.group > MAX_GROUP:
            rule = f"query heads are a multiple of key heads, at most {MAX_GROUP} times as many"
            raise ContractViolation(V1, rule, f"{self.num_heads} and {self.num_kv_heads}")
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % 16:
            raise ContractViolation(V1, f"the head size is a multiple of 16, at most {MAX_HEAD_DIM}", self.head_dim)
        if self.num_kv_heads * self.head_dim > MAX_HIDDEN:
            rule = f"key heads * head size is at most {MAX_HIDDEN} in a cache of [pages, page, heads * size]"
            raise ContractViolation(V1, rule, self.num_kv_heads * self.head_dim)
        if self.num_heads * self.head_dim >= MAX_HIDDEN:
            rule = f"query heads * head size is below {MAX_HIDDEN} in layout BSH"
            raise ContractViolation(V1, rule, self.num_heads * self.head_dim)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def check_table(operator: str, table: torch.Tensor, kv_lens: list[int], page_size: int) -> None:
    """Page ids, int32 [batch, pages], as wide as the longest row has pages; their range is the operator's caller's."""
    check_dtype(operator, "block_table", table, (torch.int32,))
    if table.dim() != 2 or not 0 < table.shape[0] <= MAX_BATCH:
        rule = f"block_table is [batch, pages] with 1 to {MAX_BATCH} rows"
        raise ContractViolation(operator, rule, f"shape {tuple(table.shape)}")
    check_contiguous(operator, block_table=table)
    check_lengths(operator, "actual_seq_lengths_kv", kv_lens, table.shape[0])
    needed = page_count(max(kv_lens), page_size) if page_size > 0 else 0
    if needed > table.shape[1]:
        rule = f"block_table is as wide as the longest row has pages, {needed}"
        raise ContractViolation(operator, rule, f"width {table.shape[1]}")


def check_prefill_page(operator: str, page_size: int) -> None:
    if page_size not in PREFILL_PAGES:
        rule = "block_size is a multiple of 128, from 128 to 512, with more than one query token"
        raise ContractViolation(operator, rule, page_size)


def check_triangle(operator: str, mask: torch.Tensor | None) -> None:
    """The mask that sparse modes 2, 3 and 4 want."""
    if mask is None or tuple(mask.shape) != (MASK_SIZE, MASK_SIZE):
        got = None if mask is None else f"shape {tuple(mask.shape)}"
        rule = f"sparse modes 2, 3 and 4 need the fixed atten_mask of {MASK_SIZE} x {MASK_SIZE}"
        raise ContractViolation(operator, rule, got)
    check_dtype(operator, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8))


def check_cache(operator: str, shape: AttentionShape, page_size: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """One layer's pages, [pages, page_size, num_kv_heads * head_dim]."""
    cache = (page_size, shape.num_kv_heads * shape.head_dim)
    if key.dim() != 3 or tuple(key.shape[1:]) != cache or key.shape != value.shape:
        rule = f"key and value are [pages, {cache[0]}, {cache[1]}]"
        raise ContractViolation(operator, rule, f"shapes {tuple(key.shape)} and {tuple(value.shape)}")
    if key.numel() > INT32_MAX:
        raise ContractViolation(operator, "key and value have fewer than 2**31 elements each", key.numel())


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One call but for its query, key and value: what all layers of a plan share, checked once.

    Attributes:
        query_len: new tokens of each row.
        kv_lens: readable tokens of each row, on the host; not cumulative, since the KV is paged.
        block_table: page ids, int32 [batch, pages], on the device. Their range is not checked by the operator.
        mask: bool, 1 hides.
        sparse_mode: 0, `CAUSAL` or `BAND`.
        pre_tokens: with `BAND`, how many tokens before its own a query sees.
    """

    shape: AttentionShape
    page_size: int
    query_len: int
    kv_lens: list[int]
    block_table: torch.Tensor
    mask: torch.Tensor | None = None
    sparse_mode: int = 0
    pre_tokens: int | None = None

    def __post_init__(self) -> None:
        check_table(self.operator, self.block_table, self.kv_lens, self.page_size)
        if self.query_len == 1:
            self._check_decode()
        else:
            self._check_prefill()

    @property
    def operator(self) -> str:
        return V2 if self.sparse_mode == BAND else V1

    @property
    def batch(self) -> int:
        return int(self.block_table.shape[0])

    def _check_decode(self) -> None:
        if not is_decode_page(self.page_size):
            rule = f"block_size is a multiple of 16, at most {MAX_PAGE}, with one query token and 16-bit KV"
            raise ContractViolation(V1, rule, self.page_size)
        if self.sparse_mode != 0 or self.pre_tokens is not None:
            rule = "sparse_mode and pre_tokens are ignored with one query token; give a window as a mask"
            raise ContractViolation(V1, rule, f"sparse_mode {self.sparse_mode}, pre_tokens {self.pre_tokens}")
        if self.mask is not None:
            check_dtype(V1, "atten_mask", self.mask, (torch.bool, torch.int8, torch.uint8))
            want = (self.batch, 1, 1, self.block_table.shape[1] * self.page_size)
            if tuple(self.mask.shape) != want:
                rule = f"with one query token atten_mask is [batch, 1, 1, table width * page] = {list(want)}"
                raise ContractViolation(V1, rule, f"shape {tuple(self.mask.shape)}")
            check_contiguous(V1, atten_mask=self.mask)

    def _check_prefill(self) -> None:
        operator = self.operator
        check_prefill_page(operator, self.page_size)
        if self.query_len < 1 or self.query_len > min(self.kv_lens):
            rule = "a row has at least one new token and no more than it can read"
            raise ContractViolation(operator, rule, f"{self.query_len} of {self.kv_lens}")
        if self.sparse_mode not in (CAUSAL, BAND):
            raise ContractViolation(operator, f"sparse_mode is {CAUSAL} (causal) or {BAND} (band)", self.sparse_mode)
        check_triangle(operator, self.mask)
        if (self.sparse_mode == BAND) != (self.pre_tokens is not None) or (self.pre_tokens or 0) < 0:
            rule = "pre_tokens belongs to sparse_mode 4 and is not negative"
            raise ContractViolation(operator, rule, f"sparse_mode {self.sparse_mode}, pre_tokens {self.pre_tokens}")

    def of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
        """The call for one layer.

        Args:
            query: [batch, query_len, num_heads * head_dim]; key, value: [pages, page_size, num_kv_heads * head_dim].
        """
        operator, shape = self.operator, self.shape
        check_dtype(operator, "query", query, HALF_DTYPES)
        check_same_dtype(operator, query=query, key=key, value=value)
        want = (self.batch, self.query_len, shape.num_heads * shape.head_dim)
        if tuple(query.shape) != want:
            raise ContractViolation(operator, f"query is {list(want)} in layout BSH", f"shape {tuple(query.shape)}")
        check_cache(operator, shape, self.page_size, key, value)
        check_contiguous(operator, query=query, key=key, value=value)
        check_one_device(operator, query=query, key=key, value=value, block_table=self.block_table)
        return Call((query, key, value), self._kwargs())

    def _kwargs(self) -> dict[str, Any]:
        common: dict[str, Any] = {
            "atten_mask": self.mask,
            "block_table": self.block_table,
            "input_layout": "BSH",
            "num_key_value_heads": self.shape.num_kv_heads,
            "sparse_mode": self.sparse_mode,
            "block_size": self.page_size,
        }
        query_lens = [self.query_len] * self.batch
        if self.operator == V2:
            return common | {
                "actual_seq_qlen": query_lens,
                "actual_seq_kvlen": self.kv_lens,
                "num_query_heads": self.shape.num_heads,
                "softmax_scale": self.shape.scale,
                "pre_tokens": self.pre_tokens,
                "next_tokens": 0,
            }
        return common | {
            "actual_seq_lengths": query_lens,
            "actual_seq_lengths_kv": self.kv_lens,
            "num_heads": self.shape.num_heads,
            "scale": self.shape.scale,
        }
