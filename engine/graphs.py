"""Decode steps as captured graphs, for devices that capture: one for each of a few batch sizes.

A step in which every request has one new token is padded to the next size, its columns are staged for the tensors of
that size's graph, and the graph is launched as one piece. Rows of padding read one token of page 0, the page that is
nobody's, and write there. Every other step runs eagerly; each cause is counted (`EngineCore.stats`). A device that runs
out of something while it captures keeps the graphs that it has.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from devices.base import Capabilities, Device, KvLayer, NoRoomForGraph
from devices.page_pool import PADDING_PAGE
from engine.attention import AttentionGroups, FamilyColumns, StepColumns, resolved
from engine.models.decoder import Decoder
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import table_width

logger = logging.getLogger("rung")


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
        geometry: RowGeometry,
        sizes: Sequence[int],
    ) -> None:
        """Captures at once, the largest first, so that the others find the memory that it took. When the device has no
        room for one, that size and the smaller ones are left out, and the log says so.

        Args:
            sizes: batch sizes, ascending; `graph_sizes`.
        """
        self.counts: Counter[str] = Counter()
        self._page_size = geometry.page_size
        self._graphs: list[_Graph] = []
        for size in reversed(sizes):
            try:
                self._graphs.insert(0, _Graph(model, device, layers, geometry, size))
            except NoRoomForGraph as error:
                logger.warning(
                    "graphs: %d of %d batch sizes are captured; at %d the device had no room: %s",
                    len(self._graphs),
                    len(sizes),
                    size,
                    next(iter(str(error).splitlines()), "it did not say why"),
                )
                break
        self._sizes = list(sizes[len(sizes) - len(self._graphs) :])

    def prepare(self, step: StepColumns, sampled: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """What computes the step's hidden states, [batch, hidden_size], once the step was sent; None when it has to run
        eagerly.

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
        self, model: Decoder, device: Device, layers: Sequence[KvLayer], geometry: RowGeometry, size: int
    ) -> None:
        self._device, self._size = device, size
        self._attention = AttentionGroups(device, model.config, geometry)
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        wanted = torch.arange(size, device=device.torch_device)
        self._attention.plan(_nobodys(size, geometry))
        outputs: list[torch.Tensor] = []

        @torch.inference_mode()
        def run() -> None:
            outputs[:] = [model.forward(self._token_ids, self._positions, self._attention.by_layer, layers, wanted)]

        self._captured = device.capture(run, self._attention.backends, size)
        self._hidden = outputs[0]

    @torch.inference_mode()
    def prepare(self, step: StepColumns, sampled: torch.Tensor) -> Callable[[], torch.Tensor]:
        padded = step.padded(self._size)
        refers = padded.has_references
        token_ids = self._device.stage(padded.token_ids.astype(np.int64), None if refers else self._token_ids)
        self._device.stage(padded.positions, self._positions)
        planned = self._attention.plan(padded)

        def run() -> torch.Tensor:
            if refers:
                self._token_ids.copy_(resolved(token_ids, sampled))
            self._captured.replay(planned)
            return self._hidden[: len(step.query_lens)]

        return run


def _nobodys(size: int, geometry: RowGeometry) -> StepColumns:
    """A step to capture. Its slots are the first ones of all: at that time no page is anybody's."""
    zeros, ones = np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.int32)
    slots = np.arange(size, dtype=np.int64)
    families = {
        family.name: FamilyColumns(np.full((size, table_width(geometry, family)), PADDING_PAGE, dtype=np.int32), slots)
        for family in geometry.families
    }
    return StepColumns(zeros, zeros, ones, ones, families)
