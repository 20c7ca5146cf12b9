"""Paged attention in plain torch: gather a row's pages, multiply, mask, normalise, multiply.

Requests with one new token (decode) are batched: rows of similar length share one padded product. Requests with more
(prefill, chunk) are computed one by one in blocks of queries. KV is `[pages, num_kv_heads, page_size, head_dim]`.

A slot behind a row's last token holds whatever an earlier owner left, even NaN from a request that failed. It must not
reach a result, and `0 * NaN` is NaN: masked keys are *filled*, not added to, and masked values are zeroed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from devices.base import AttentionMetadata, KvLayer
from devices.pages import IntArray, page_counts, ragged_positions

QUERY_BLOCK = 512
"""Queries multiplied at once in prefill; larger blocks lose more to masked-out keys than they win in the product."""

SCORE_BUDGET = 1 << 25
"""Upper bound of the elements in one block of attention scores (128 MiB of fp32)."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one new token each and similar lengths.

    Attributes:
        tokens: their places in the step's tokens, int64 [rows]; None when the group is the whole step, in order.
        gather: rows of the KV seen as [pages * num_kv_heads, ...], int64 [rows, num_kv_heads, pages].
        masked: keys that do not exist, bool [rows, 1, pages * page_size].
        stale: indices of those whose values may be anything, in KV seen as [rows * num_kv_heads * tokens, ...], int64.
    """

    tokens: torch.Tensor | None
    gather: torch.Tensor
    masked: torch.Tensor
    stale: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request with several new tokens: places `[start, start + num_new)` of the step, at the end of `seq_len`."""

    start: int
    num_new: int
    seq_len: int
    gather: torch.Tensor  # int64 [num_kv_heads, pages]


class PagedAttention:
    """Causal attention of `num_heads` query heads over `num_kv_heads` paged heads (grouped-query when fewer), over the
    last `window` tokens when one is given."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim, self.window = num_heads, num_kv_heads, head_dim, window
        self.group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5
        self._decode: list[_DecodeGroup] = []
        self._prefill: list[_Prefill] = []
        self._write = torch.empty(0, dtype=torch.int64)
        self._device = self._write.device

    def plan(self, step: AttentionMetadata) -> None:
        """Turn page tables into gather and scatter indices, once for all layers."""
        heads, page_size = self.num_kv_heads, step.page_size
        head = np.arange(heads)
        page, offset = np.divmod(step.slots, page_size)
        # Token t, head h is row (page * heads + h) * page_size + offset of the KV seen as [slots * heads, head_dim].
        write = (page[:, None] * heads + head) * page_size + offset[:, None]
        self._device = step.page_tables.device
        self._write = self._placed(write.reshape(-1))

        tables = step.page_tables.cpu().numpy().astype(np.int64)
        num_pages = page_counts(step.seq_lens, page_size)
        # Entries behind a row's last readable page are nobody's or another's: read its own first page there, masked.
        # That page is full of the row's own tokens, since a row of one page is batched with its like only.
        is_read = np.arange(tables.shape[1]) < num_pages[:, None]
        gather = np.where(is_read, tables, tables[:, :1])[:, None, :] * heads + head[:, None]
        starts = np.cumsum(step.query_lens) - step.query_lens
        self._prefill = [
            _Prefill(
                int(starts[i]),
                int(step.query_lens[i]),
                int(step.seq_lens[i]),
                self._placed(gather[i, :, : num_pages[i]]),
            )
            for i in np.flatnonzero(step.query_lens > 1)
        ]
        decoding = np.flatnonzero(step.query_lens == 1)
        members = [rows for rows in _of_similar_size(decoding, num_pages) if len(rows)]
        self._decode = [self._group(rows, gather, starts, num_pages, step) for rows in members]

    def _group(
        self,
        rows: npt.NDArray[np.int64],
        gather: npt.NDArray[np.int64],
        starts: IntArray,
        num_pages: IntArray,
        step: AttentionMetadata,
    ) -> _DecodeGroup:
        pages = int(num_pages[rows].max())
        length = pages * step.page_size
        seq_lens = step.seq_lens[rows]
        key = np.arange(length)
        masked = key >= seq_lens[:, None]
        if self.window is None:
            # Keys between a row's last token and the end of its last page.
            num_stale = num_pages[rows] * step.page_size - seq_lens
            row = np.repeat(np.arange(len(rows), dtype=np.int32), num_stale)
            stale_key = ragged_positions(seq_lens, num_stale)
        else:
            # Also all that the window has left: its pages may be another's by now.
            masked |= key < seq_lens[:, None] - self.window
            row, stale_key = (index.astype(np.int32) for index in np.nonzero(masked))
        head = np.arange(self.num_kv_heads)
        stale = ((row[:, None] * self.num_kv_heads + head) * length + stale_key[:, None]).reshape(-1)
        whole_step = len(rows) == len(step.query_lens)
        return _DecodeGroup(
            tokens=None if whole_step else self._placed(starts[rows].astype(np.int64)),
            gather=self._placed((gather if whole_step else gather[rows])[:, :, :pages]),
            masked=self._placed(masked).unsqueeze(1),
            stale=self._placed(stale),
        )

    def _placed(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KvLayer) -> torch.Tensor:
        """See `devices.base.AttentionBackend.forward`."""
        layer.k.view(-1, self.head_dim).index_copy_(0, self._write, k.reshape(-1, self.head_dim).to(layer.k.dtype))
        layer.v.view(-1, self.head_dim).index_copy_(0, self._write, v.reshape(-1, self.head_dim).to(layer.v.dtype))
        if len(self._decode) == 1 and self._decode[0].tokens is None:
            return self._decode_group(q, self._decode[0], layer)
        out = torch.empty_like(q)
        for group in self._decode:
            out[group.tokens] = self._decode_group(q[group.tokens], group, layer)
        for request in self._prefill:
            span = slice(request.start, request.start + request.num_new)
            out[span] = self._prefill_one(q[span], request, layer)
        return out

    def _decode_group(self, q: torch.Tensor, group: _DecodeGroup, layer: KvLayer) -> torch.Tensor:
        """q, result: [rows, num_heads, head_dim]."""
        rows, heads = q.shape[0], self.num_kv_heads
        keys = _gather(layer.k, group.gather, q.dtype).view(rows * heads, -1, self.head_dim)
        values = _gather(layer.v, group.gather, q.dtype).view(rows * heads, -1, self.head_dim)
        values.view(-1, self.head_dim).index_fill_(0, group.stale, 0)
        scores = torch.bmm(q.reshape(rows * heads, self.group, self.head_dim) * self.scale, keys.transpose(1, 2))
        by_row = scores.view(rows, self.num_heads, -1).masked_fill_(group.masked, float("-inf"))
        weights = torch.softmax(by_row, dim=-1, dtype=torch.float32).to(q.dtype).view_as(scores)
        return torch.bmm(weights, values).view(rows, self.num_heads, self.head_dim)

    def _prefill_one(self, q: torch.Tensor, request: _Prefill, layer: KvLayer) -> torch.Tensor:
        """q, result: [num_new, num_heads, head_dim]."""
        heads, dim, seq_len = self.num_kv_heads, self.head_dim, request.seq_len
        keys = _gather(layer.k, request.gather, q.dtype).view(heads, -1, dim)
        values = _gather(layer.v, request.gather, q.dtype).view(heads, -1, dim)
        grouped = q.view(request.num_new, heads, self.group, dim).permute(1, 2, 0, 3)
        out = torch.empty_like(q)
        block = max(1, min(QUERY_BLOCK, SCORE_BUDGET // (self.num_heads * seq_len)))
        for first in range(0, request.num_new, block):
            last = min(first + block, request.num_new)
            n = last - first
            past = seq_len - request.num_new + first  # keys before the block's first query
            oldest = 0 if self.window is None else max(0, past + 1 - self.window)
            visible = slice(oldest, past + n)  # keys that some query of the block attends to
            queries = grouped[:, :, first:last].reshape(heads, -1, dim) * self.scale
            scores = torch.bmm(queries, keys[:, visible].transpose(1, 2))
            scores.view(heads, self.group, n, -1).masked_fill_(self._hidden(n, past - oldest), float("-inf"))
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            attended = torch.bmm(weights, values[:, visible]).view(heads, self.group, n, dim)
            out[first:last] = attended.permute(2, 0, 1, 3).reshape(n, self.num_heads, dim)
        return out

    def _hidden(self, num_queries: int, past: int) -> torch.Tensor:
        """Keys that a query must not see, bool [num_queries, past + num_queries]: later ones, and those too old."""
        hidden = torch.ones(num_queries, past + num_queries, dtype=torch.bool, device=self._device)
        later = hidden.triu(past + 1)
        return later if self.window is None else later | hidden.tril(past - self.window)


def _of_similar_size(rows: npt.NDArray[np.int64], num_pages: IntArray) -> list[npt.NDArray[np.int64]]:
    """Rows in groups within which no row has more than twice the pages of another; a row of one page has its like."""
    pages = num_pages[rows]
    if len(rows) < 2 or (pages == pages[0]).all():
        return [rows]
    size_class = np.ceil(np.log2(pages))
    return [rows[size_class == size] for size in np.unique(size_class)]


def _gather(kv: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pages of `kv` ([pages, heads, page_size, head_dim]) by `page * heads + head`: [*rows.shape, page * head_dim]."""
    return F.embedding(rows, kv.view(kv.shape[0] * kv.shape[1], -1)).to(dtype)
