"""Decode steps as captured graphs, for devices that capture: one for each of a few batch sizes.

A step in which every request has one new token is padded to the next size, its columns are copied into the tensors of
that size's graph, and the graph is launched as one piece. Rows of padding read one token of page 0, the page that is
nobody's, and write there. Every other step runs eagerly; each cause is counted (`EngineCore.stats`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.base import AttentionBackend, AttentionMetadata, Capabilities, Device, KvLayer
from devices.page_pool import PADDING_PAGE
from devices.pages import IntArray
from engine.models.decoder import Decoder

logger = logging.getLogger("rung")


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step on the host, before anything of it is on the device.

    Attributes:
        token_ids: int32 [tokens]; below 0 a reference to a token of the step before (`engine.step.refer`).
        positions: int32 [tokens].
        query_lens, seq_lens: int32 [batch], see `AttentionMetadata`.
        tables: page ids, int32 [batch, pages].
        slots: int64 [tokens].
    """

    token_ids: IntArray
    positions: IntArray
    query_lens: IntArray
    seq_lens: IntArray
    tables: IntArray
    slots: npt.NDArray[np.int64]

    def attention(self, page_size: int, device: torch.device) -> AttentionMetadata:
        tables = torch.from_numpy(self.tables).to(device)
        return AttentionMetadata(self.query_lens, self.seq_lens, tables, self.slots, page_size)

    def tokens_on(self, device: torch.device, sampled: torch.Tensor) -> torch.Tensor:
        """The token ids on the device, int64 [tokens]; `sampled`: what the step before sampled, int64."""
        token_ids = torch.from_numpy(self.token_ids.astype(np.int64)).to(device)
        return resolved(token_ids, sampled) if self.token_ids.min() < 0 else token_ids

    def padded(self, size: int) -> StepColumns:
        """With rows of padding up to `size`; each writes a slot of its own in the padding page."""
        num = size - len(self.query_lens)
        zeros, ones = np.zeros(num, dtype=np.int32), np.ones(num, dtype=np.int32)
        return StepColumns(
            np.concatenate([self.token_ids, zeros]),
            np.concatenate([self.positions, zeros]),
            np.concatenate([self.query_lens, ones]),
            np.concatenate([self.seq_lens, ones]),
            np.pad(self.tables, ((0, num), (0, 0)), constant_values=PADDING_PAGE),
            np.concatenate([self.slots, np.arange(num, dtype=np.int64)]),
        )


def resolved(token_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """`token_ids` with each reference replaced by the token of the step before, on the device; int64 [tokens].

    Args:
        sampled: what that step sampled, int64 [at least 1].
    """
    return torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(0, len(sampled) - 1)], token_ids)


def graph_sizes(capabilities: Capabilities, num_rows: int, num_layers: int) -> tuple[int, ...]:
    """Batch sizes to capture for at most `num_rows` rows, ascending; empty when the device captures nothing.

    A device that has only so many streams for graphs gets a shorter list, evenly thinned out, and the log says so.
    """
    if not capabilities.graph_capture:
        return ()
    sizes = capabilities.graph_buckets
    sizes = sizes[: bisect_left(sizes, num_rows) + 1]
    if not capabilities.graph_streams:
        return sizes
    limit = capabilities.graph_streams // (num_layers + 1)
    if len(sizes) <= limit:
        return sizes
    kept = sorted({sizes[int(i)] for i in np.linspace(len(sizes) - 1, 0, limit)})
    logger.warning(
        "graphs: %d of %d batch sizes are captured (%s): a graph of %d layers takes %d of the device's %d streams",
        len(kept),
        len(sizes),
        ", ".join(map(str, kept)) or "none",
        num_layers,
        num_layers + 1,
        capabilities.graph_streams,
    )
    return tuple(kept)


class DecodeGraphs:
    """The graphs of one model on one device.

    Attributes:
        counts: steps that were replayed, and steps that ran eagerly by cause.
    """

    def __init__(
        self,
        model: Decoder,
        device: Device,
        layers: Sequence[KvLayer],
        page_size: int,
        table_width: int,
        sizes: Sequence[int],
    ) -> None:
        """Captures at once, the largest first, so that the others find the memory that it took.

        Args:
            table_width: pages of the longest row.
            sizes: batch sizes, ascending; `graph_sizes`.
        """
        self.counts: Counter[str] = Counter()
        self._page_size = page_size
        captured = [_Graph(model, device, layers, page_size, table_width, size) for size in reversed(sizes)]
        self._graphs = captured[::-1]
        self._sizes = list(sizes)

    def prepare(self, step: StepColumns, sampled: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """What computes the step's hidden states, [batch, hidden_size]; None when it has to run eagerly.

        `sampled`: what the step before sampled, int64, on the device.

        The result is the graph's own tensor: it holds until the next replay.
        """
        num_rows = len(step.query_lens)
        place = bisect_left(self._sizes, num_rows)
        if len(step.token_ids) != num_rows:
            self.counts["eager_prefill"] += 1
        elif place == len(self._sizes):
            self.counts["eager_batch_too_large"] += 1
        elif self._sizes[place] - num_rows > self._page_size:
            self.counts["eager_too_much_padding"] += 1
        else:
            self.counts["replayed"] += 1
            return self._graphs[place].prepare(step, sampled)
        return None


class _Graph:
    """One batch size: the tensors that the graph reads and writes, and its attention backends."""

    def __init__(
        self,
        model: Decoder,
        device: Device,
        layers: Sequence[KvLayer],
        page_size: int,
        table_width: int,
        size: int,
    ) -> None:
        self._device, self._page_size, self._size = device.torch_device, page_size, size
        config = model.config
        by_window: dict[int | None, AttentionBackend] = {
            window: device.attention(config.num_heads, config.num_kv_heads, config.head_dim, window)
            for window in dict.fromkeys(config.windows)
        }
        self._backends = tuple(by_window.values())
        attention = [by_window[window] for window in config.windows]
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=self._device)
        wanted = torch.arange(size, device=self._device)
        self._plan(_nobodys(size, table_width))
        outputs: list[torch.Tensor] = []

        @torch.inference_mode()
        def run() -> None:
            outputs[:] = [model.forward(self._token_ids, self._positions, attention, layers, wanted)]

        self._captured = device.capture(run, self._backends, size)
        self._hidden = outputs[0]

    @torch.inference_mode()
    def prepare(self, step: StepColumns, sampled: torch.Tensor) -> Callable[[], torch.Tensor]:
        padded = step.padded(self._size)
        self._token_ids.copy_(padded.tokens_on(self._device, sampled))
        self._positions.copy_(torch.from_numpy(padded.positions))
        planned = self._plan(padded)

        def run() -> torch.Tensor:
            self._captured.replay(planned)
            return self._hidden[: len(step.query_lens)]

        return run

    def _plan(self, step: StepColumns) -> AttentionMetadata:
        planned = step.attention(self._page_size, self._device)
        for backend in self._backends:
            backend.plan(planned)
        return planned


def _nobodys(size: int, table_width: int) -> StepColumns:
    """A step to capture. Its slots are the first ones of all: at that time no page is anybody's."""
    zeros, ones = np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.int32)
    tables = np.full((size, table_width), PADDING_PAGE, dtype=np.int32)
    return StepColumns(zeros, zeros, ones, ones, tables, np.arange(size, dtype=np.int64))
