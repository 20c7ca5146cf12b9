"""Paged attention on an NPU: slots are written by `npu_scatter_pa_kv_cache`, rows read by fused inference attention.

Requests with one new token (decode) are one call; every other request is a call of its own, because with more query
tokens the operator wants all rows to have as many. KV is `[pages, page_size, num_kv_heads, head_dim]`, seen by
attention as `[pages, page_size, num_kv_heads * head_dim]`.

A window reads no page that lies behind it. With several query tokens the operator's band does the rest; with one it
ignores the band, so the tokens of the first page that are too old are masked:

    row       | ... pages behind the window ... |  page  |  page  |  page
    table                                       |  0     |  1     |  2
    read                                           ####################      <- the window, up to the last token
    mask                                        1111000000000000000000

Once a graph was captured, `plan` writes into the tensors of then (`devices.base.AttentionBackend.plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from devices.base import AttentionMetadata, KvLayer
from devices.npu.arguments.attention import BAND, CAUSAL, AttentionShape, PagedAttention
from devices.npu.arguments.kv_write import KvWrite, host_slots
from devices.npu.slots import SlotForm
from devices.pages import page_count, page_split

MOST_MASKED_ALONE = 512
"""Keys up to which a mask of a single row is known to be obeyed (vllm-ascend #15503): a longer one goes as two rows."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of one call.

    Attributes:
        tokens: their places among the step's tokens: a slice, or int64 on the device; None when they are all of them.
    """

    tokens: slice | torch.Tensor | None
    call: PagedAttention


class NpuAttention:
    """Causal attention of one group of layers, over the last `window` tokens when one is given."""

    def __init__(
        self,
        npu: Any,
        device: torch.device,
        shape: AttentionShape,
        triangle: Callable[[], torch.Tensor],
        window: int | None,
        slots: SlotForm,
    ) -> None:
        """`triangle`: gives the mask of several query tokens, which all backends of a device share."""
        self.shape, self.window = shape, window
        self._npu, self._device, self._triangle, self._slots = npu, device, triangle, slots
        self._groups: list[_Group] = []
        self._write: KvWrite
        self._fixed: _FixedBuffers | None = None
        self._workspace: torch.Tensor | None = None
        self._record: Callable[[str], None] | None = None

    # A step.

    def plan(self, step: AttentionMetadata) -> None:
        slots = host_slots(step.slots)
        if self._fixed is not None:
            self._write = KvWrite(self._fixed.write_slots(slots), int(slots.max()))
            self._groups = [_Group(None, self._fixed.write_rows(self, step))]
            return
        ends = np.cumsum(step.query_lens)
        decoding = np.flatnonzero(step.query_lens == 1)
        is_decode = len(decoding) == len(step.query_lens)
        self._write = KvWrite(self._to_device(slots) if is_decode else self._slots.of(step), int(slots.max()))
        self._groups = []
        if is_decode:
            self._groups.append(_Group(None, self._decode(step, None)))
        elif len(decoding):
            tokens = self._to_device((ends[decoding] - 1).astype(np.int64))
            self._groups.append(_Group(tokens, self._decode(step, decoding)))
        for row in np.flatnonzero(step.query_lens > 1).tolist():
            span = slice(int(ends[row] - step.query_lens[row]), int(ends[row]))
            self._groups.append(_Group(span, self._prefill(step, row)))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KvLayer) -> torch.Tensor:
        """See `devices.base.AttentionBackend.forward`."""
        k, v = (new.to(layer.k.dtype).contiguous() for new in (k, v))
        write = self._write.of(k, v, layer.k, layer.v)
        self._npu.npu_scatter_pa_kv_cache(*write.args, **write.kwargs)
        key, value = layer.k.flatten(2), layer.v.flatten(2)
        q = q.contiguous()
        if len(self._groups) == 1:
            return self._attend(q, self._groups[0].call, key, value)
        out = torch.empty_like(q)
        for group in self._groups:
            if isinstance(group.tokens, torch.Tensor):
                out.index_copy_(0, group.tokens, self._attend(q.index_select(0, group.tokens), group.call, key, value))
            else:
                out[group.tokens] = self._attend(q[group.tokens], group.call, key, value)
        return out

    def _attend(self, q: torch.Tensor, call: PagedAttention, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """q, result: [rows * query_len, num_heads, head_dim]; a call for twice a single row computes it twice."""
        query = q.view(-1, call.query_len, q.shape[1] * q.shape[2])
        checked = call.of(query if len(query) == call.batch else query.repeat(call.batch, 1, 1), key, value)
        operator = getattr(self._npu, call.operator)
        if self._fixed is None:
            out: torch.Tensor = operator(*checked.args, **checked.kwargs)[0]
            return out[: len(query)].view(q.shape)
        if self._workspace is None:
            self._workspace = self._npu._npu_fused_infer_attention_score_get_max_workspace(
                *checked.args, **checked.kwargs
            )
        if self._record is not None:
            self._record(call.operator)
        out = torch.empty_like(checked.args[0])
        unused_lse = torch.empty(1, dtype=q.dtype, device=q.device)
        operator.out(*checked.args, **checked.kwargs, workspace=self._workspace, out=[out, unused_lse])
        return out[: len(query)].view(q.shape)

    # What a plan is made of.

    def _decode(self, step: AttentionMetadata, rows: npt.NDArray[np.int64] | None) -> PagedAttention:
        """`rows`: those of the step that have one new token; None is all."""
        seq_lens = step.seq_lens if rows is None else step.seq_lens[rows]
        tables = step.page_tables if rows is None else step.page_tables.index_select(0, self._to_device(rows))
        if self.window is None:
            return PagedAttention(self.shape, step.page_size, 1, seq_lens.tolist(), tables)
        first, num_old = self._window_start(seq_lens, step.page_size)
        width = self._window_pages(step.page_size, tables.shape[1])
        places = np.minimum(first[:, None] + np.arange(width), tables.shape[1] - 1)
        tables = tables.gather(1, self._to_device(places.astype(np.int64)))
        mask = self._old_tokens(num_old, width * step.page_size)
        kv_lens = (seq_lens - first * step.page_size).tolist()
        if len(kv_lens) == 1 and mask.shape[-1] > MOST_MASKED_ALONE:
            kv_lens, tables, mask = 2 * kv_lens, tables.repeat(2, 1), mask.repeat(2, 1, 1, 1)
        return PagedAttention(self.shape, step.page_size, 1, kv_lens, tables, mask)

    def _prefill(self, step: AttentionMetadata, row: int) -> PagedAttention:
        num_new, seq_len = int(step.query_lens[row]), int(step.seq_lens[row])
        last = page_count(seq_len, step.page_size)
        if self.window is None:
            table = step.page_tables[row : row + 1, :last]
            return PagedAttention(self.shape, step.page_size, num_new, [seq_len], table, self._triangle(), CAUSAL)
        first, _ = page_split(max(0, seq_len - num_new + 1 - self.window), step.page_size)  # of the oldest query
        table = step.page_tables[row : row + 1, first:last]
        kv_len = seq_len - first * step.page_size
        return PagedAttention(
            self.shape, step.page_size, num_new, [kv_len], table, self._triangle(), BAND, self.window - 1
        )

    def _window_start(
        self, seq_lens: npt.NDArray[np.int32], page_size: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The page where each row's window begins, and how many tokens of that page are too old; int32 [rows] both."""
        assert self.window is not None
        oldest = np.maximum(seq_lens - self.window, 0)
        first = oldest // page_size
        return first, oldest - first * page_size

    def _window_pages(self, page_size: int, table_width: int) -> int:
        """Pages that a window touches at most."""
        assert self.window is not None
        return min(table_width, page_count(self.window - 1, page_size) + 1)

    def _old_tokens(self, num_old: npt.NDArray[np.int32], length: int) -> torch.Tensor:
        """bool [rows, 1, 1, length], true for the first `num_old` of each row."""
        column = torch.arange(length, dtype=torch.int32, device=self._device)
        return column < self._to_device(num_old.astype(np.int32))[:, None, None, None]

    def _to_device(self, column: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device)

    # A graph.

    def fix(self) -> None:
        """Make the tensors of the last plan, which was a decode step's, those of every plan to come."""
        (group,) = self._groups
        if group.tokens is not None or group.call.query_len != 1:
            raise ValueError("a graph is a step of one new token for each row")
        self._fixed = _FixedBuffers(self._write.slots, group.call.block_table, group.call.mask)

    def record(self, note: Callable[[str], None] | None) -> None:
        """From now on `note` the operator of each call, whose lengths the graph will have to be told anew."""
        self._record = note

    @property
    def num_rows(self) -> int:
        """Rows of the last plan's call: a single one may go as two."""
        return self._groups[0].call.batch

    def new_lengths(self) -> dict[str, list[int]]:
        """The lengths of the last plan, as `NPUGraph.update` takes them."""
        return {"actual_seq_lengths_kv": self._groups[0].call.kv_lens}


@dataclass(frozen=True, slots=True)
class _FixedBuffers:
    """Tensors that a graph reads: slots [rows], tables [rows, pages] and the mask of a window."""

    slots: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor | None

    def write_slots(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        return self.slots.copy_(torch.from_numpy(slots))

    def write_rows(self, attention: NpuAttention, step: AttentionMetadata) -> PagedAttention:
        """Columns behind a new table that is narrower keep what they had: no length reaches them."""
        new = attention._decode(step, None)
        width = new.block_table.shape[1]
        if new.batch != len(self.tables) or width > self.tables.shape[1]:
            raise ValueError(
                f"a graph of {tuple(self.tables.shape)} page table entries was given {tuple(new.block_table.shape)}"
            )
        self.tables[:, :width].copy_(new.block_table)
        mask = self.mask
        if mask is not None and new.mask is not None:
            mask[..., : new.mask.shape[-1]].copy_(new.mask)
        return PagedAttention(new.shape, new.page_size, 1, new.kv_lens, self.tables, mask)
