"""Paged attention with the Triton kernels. A plan is made on the host, once for all layers of a step.

    requests with up to 8 new tokens   decode, verify   split along the keys, so that few rows fill the GPU
    requests with more                 prefill, chunk   a compact list of tiles of queries, those with most keys first

What a captured graph reads stays where it is: after `freeze` a plan writes into the tensors of the plan before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from devices.base import AttentionMetadata, KvLayer
from devices.cuda.arguments import MAX_QUERIES, AttentionShape, BadKernelArgument
from devices.cuda.configurations import architecture, balanced_splits, decode_tiles, extend_tiles
from devices.cuda.upload import Uploader
from devices.pages import IntArray

Heads = tuple[int, int, int]
"""Query heads, KV heads, and their size."""

ALIGNMENT = 4
"""A plan's columns start at multiples of 16 bytes, which kernels read at once."""

DECODE_DTYPE = torch.bfloat16
"""Whose tiles decide how many programs fit on a multiprocessor; an estimate for other dtypes."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step's requests by the kernel that serves them; indices into the batch, int32."""

    short: IntArray
    long: IntArray
    max_queries: int

    @classmethod
    def of(cls, query_lens: IntArray) -> Work:
        is_short = query_lens <= MAX_QUERIES
        short = np.flatnonzero(is_short & (query_lens > 0)).astype(np.int32)
        long = np.flatnonzero(~is_short).astype(np.int32)
        return cls(short, long, int(query_lens[short].max(initial=1)))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step on the device. `step` keeps the host's columns, from which tiles of queries are made.

    Attributes:
        tables: int32 [batch, pages].
        whole: query starts, lengths, slots and `work.short`, one after another; `columns` are views of it.
    """

    step: AttentionMetadata
    work: Work
    num_splits: int
    tables: torch.Tensor
    whole: torch.Tensor

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.whole[start:end] for start, end in _spans(self._lengths))

    @property
    def _lengths(self) -> tuple[int, ...]:
        batch = len(self.step.query_lens)
        return batch + 1, batch, len(self.step.slots), len(self.work.short)


class TritonAttention:
    """Causal attention of `num_heads` query heads over `num_kv_heads` paged heads (grouped-query when fewer), over the
    last `window` tokens when one is given."""

    def __init__(
        self,
        uploader: Uploader,
        num_sms: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> None:
        """Raises BadKernelArgument, a ValueError, where the kernels do not serve this shape."""
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise BadKernelArgument(
                f"its attention kernels take head sizes that are multiples of 16 up to 256, not {head_dim}; "
                "use --kernels torch"
            )
        self._uploader, self._num_sms = uploader, num_sms
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._window = window
        self._plan: _Plan | None = None
        self._is_frozen = False
        self._itemsize = DECODE_DTYPE.itemsize  # of the queries, as far as it was seen
        self._tiles: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self, step: AttentionMetadata) -> None:
        """Stage the step's columns (`devices.base.Device.stage`)."""
        work = Work.of(step.query_lens)
        query_starts = np.zeros(len(step.query_lens) + 1, dtype=np.int32)
        np.cumsum(step.query_lens, out=query_starts[1:])
        whole = _joined((query_starts, step.seq_lens, step.slots, work.short))
        frozen = self._plan if self._is_frozen else None
        if frozen is None:
            num_splits = self._num_splits(step, work, step.seq_lens)
            self._plan = _Plan(step, work, num_splits, step.page_tables, self._uploader.stage(whole))
            self._tiles = self._stage_tiles(self._plan) if len(work.long) else None
            return
        if work.max_queries > frozen.work.max_queries or len(work.long):
            raise ValueError("a graph was captured for fewer new tokens of a request than this step has")
        if len(whole) != len(frozen.whole):
            raise ValueError(f"columns of {len(whole)} numbers do not fit the {len(frozen.whole)} that were captured")
        self._uploader.stage(whole, into=frozen.whole)
        tables = frozen.tables[:, : step.page_tables.shape[1]]
        self._uploader.afterwards(lambda: tables.copy_(step.page_tables))

    def freeze(self) -> None:
        """Keep tensors with the last plan for a graph; rows may become as long as its page tables are wide."""
        assert self._plan is not None, "a step is planned before it is captured"
        self._uploader.send()
        plan, self._is_frozen = self._plan, True
        longest = np.full_like(plan.step.seq_lens, plan.tables.shape[1] * plan.step.page_size)
        num_splits = self._num_splits(plan.step, plan.work, longest)
        self._plan = replace(plan, num_splits=num_splits, tables=plan.tables.clone(), whole=plan.whole.clone())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KvLayer) -> torch.Tensor:
        """See `devices.base.AttentionBackend.forward`."""
        from devices.cuda.kernels.decode import decode_attention
        from devices.cuda.kernels.kv_cache import write_kv

        plan = self._plan
        assert plan is not None, "a step is planned before its layers run"
        self._uploader.send()  # nothing to do when the step was sent as a whole
        query_starts, seq_lens, slots, short = plan.columns
        write_kv(k, v, layer.k, layer.v, slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(plan.work.short):
            decode_attention(
                q, layer.k, layer.v, out, plan.tables, short, query_starts, seq_lens,
                max_queries=plan.work.max_queries, scale=self._head_dim**-0.5, num_splits=plan.num_splits,
                window=self._window,
            )  # fmt: skip
        if len(plan.work.long):
            self._extend(plan, q, layer, out)
        return out

    def _extend(self, plan: _Plan, q: torch.Tensor, layer: KvLayer, out: torch.Tensor) -> None:
        from devices.cuda.kernels.extend import extend_attention

        if self._tiles is None or q.element_size() != self._itemsize:
            self._itemsize = q.element_size()
            self._tiles = self._stage_tiles(plan)
            self._uploader.send()
        query_starts, seq_lens, *_ = plan.columns
        extend_attention(
            q, layer.k, layer.v, out, plan.tables, *self._tiles, query_starts, seq_lens,
            scale=self._head_dim**-0.5, window=self._window,
        )  # fmt: skip

    def _stage_tiles(self, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Requests and first queries of the tiles of long requests, int32 [tiles] each."""
        from devices.cuda.kernels.extend import plan_tiles

        step, heads = plan.step, (self._num_heads, self._num_kv_heads, self._head_dim)
        tile_queries = self.tile_queries(heads, step.page_size, architecture(plan.tables), self._itemsize)
        tiles = plan_tiles(step.query_lens, step.seq_lens, plan.work.long, tile_queries)
        return self._uploader.stage(tiles[0]), self._uploader.stage(tiles[1])

    def _num_splits(self, step: AttentionMetadata, work: Work, seq_lens: IntArray) -> int:
        if not len(work.short):
            return 1
        lengths = seq_lens[work.short] if self._window is None else np.minimum(seq_lens[work.short], self._window)
        heads = (self._num_heads, self._num_kv_heads, self._head_dim)
        return self.splits(heads, step.page_size, lengths, work.max_queries, self._num_sms)

    @staticmethod
    def splits(heads: Heads, page_size: int, lengths: IntArray, max_queries: int, num_sms: int) -> int:
        """Programs along the keys of rows of these lengths, with up to `max_queries` new tokens."""
        shape = _shape(heads, page_size)
        tiles = decode_tiles(90, shape, max_queries)
        row_tiles = -(-max_queries * shape.group // tiles.block_m)
        return balanced_splits(lengths, shape.num_kv_heads * row_tiles, num_sms, tiles.ctas_per_sm)

    @staticmethod
    def tile_queries(heads: Heads, page_size: int, arch: int, itemsize: int) -> int:
        """New tokens in a tile of the extend kernel; `itemsize`: bytes of an element of the queries."""
        shape = _shape(heads, page_size)
        return extend_tiles(arch, shape, itemsize).block_m // shape.group


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where columns of these lengths stand when they are joined; each starts at a multiple of `ALIGNMENT`."""
    starts = np.cumsum([0, *(length + -length % ALIGNMENT for length in lengths)]).tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _joined(columns: Sequence[npt.NDArray[Any]]) -> IntArray:
    spans = _spans([len(column) for column in columns])
    whole = np.zeros(spans[-1][1], dtype=np.int32)
    for column, (start, end) in zip(columns, spans, strict=True):
        whole[start:end] = column
    return whole


def _shape(heads: Heads, page_size: int) -> AttentionShape:
    num_heads, num_kv_heads, head_dim = heads
    block_dim = 1 << (head_dim - 1).bit_length()
    return AttentionShape(num_kv_heads, num_heads // num_kv_heads, head_dim, block_dim, page_size, DECODE_DTYPE)
