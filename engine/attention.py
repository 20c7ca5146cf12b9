"""A step's columns on the host, and a model's attention backends, grouped by the family of pages that they read.

Layers of one window share a backend; layers that read everything read pages of the full family, the others those of the
window family where the model's rows have one. Nothing above knows how many groups there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.base import AttentionBackend, AttentionMetadata, Device
from devices.page_pool import PADDING_PAGE
from devices.pages import IntArray
from engine.models.config import ModelConfig
from mem_cache.kv_info import RowGeometry


@dataclass(frozen=True, slots=True)
class FamilyColumns:
    """Where a step's tokens are in one family: page ids, int32 [batch, pages]; slots of new tokens, int64 [tokens]."""

    tables: IntArray
    slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step on the host, before anything of it is on the device.

    Attributes:
        token_ids: int32 [tokens]; below 0 a reference to a token of the step before (`engine.step.refer`).
        positions: int32 [tokens].
        query_lens, seq_lens: int32 [batch], see `AttentionMetadata`.
        families: by name, those whose pages some layer reads.
    """

    token_ids: IntArray
    positions: IntArray
    query_lens: IntArray
    seq_lens: IntArray
    families: Mapping[str, FamilyColumns]

    @property
    def has_references(self) -> bool:
        return bool(min(self.token_ids.tolist()) < 0)

    def padded(self, size: int) -> StepColumns:
        """With rows of padding up to `size`; each writes a slot of its own in the padding page."""
        num = size - len(self.query_lens)
        zeros, ones = np.zeros(num, dtype=np.int32), np.ones(num, dtype=np.int32)
        families = {
            name: FamilyColumns(
                np.pad(own.tables, ((0, num), (0, 0)), constant_values=PADDING_PAGE),
                np.concatenate([own.slots, np.arange(num, dtype=np.int64)]),
            )
            for name, own in self.families.items()
        }
        return StepColumns(
            np.concatenate([self.token_ids, zeros]),
            np.concatenate([self.positions, zeros]),
            np.concatenate([self.query_lens, ones]),
            np.concatenate([self.seq_lens, ones]),
            families,
        )


def resolved(token_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """`token_ids` with each reference replaced by the token of the step before, on the device; int64 [tokens].

    Args:
        sampled: what that step sampled, int64 [at least 1]; -1 where nothing could be, which becomes token 0.
    """
    tokens = sampled[(-1 - token_ids).clamp(0, len(sampled) - 1)].clamp(min=0)
    return torch.where(token_ids < 0, tokens, token_ids)


class AttentionGroups:
    """Attributes:
    by_layer: the backend of each layer.
    by_family: the backends that read each family's pages.
    layers: numbers of the layers whose KV is in each family; one that holds no KV is not there.
    """

    def __init__(self, device: Device, config: ModelConfig, geometry: RowGeometry) -> None:
        windowed = next((family.name for family in geometry.families if family.window is not None), "full")
        by_window = {
            window: device.attention(config.num_heads, config.num_kv_heads, config.head_dim, window)
            for window in dict.fromkeys(config.windows)
        }
        self.by_layer = tuple(by_window[window] for window in config.windows)
        self.by_family: dict[str, list[AttentionBackend]] = {}
        self.layers: dict[str, list[int]] = {}
        for window, backend in by_window.items():
            family = "full" if window is None else windowed
            self.by_family.setdefault(family, []).append(backend)
            own = [layer for layer, other in enumerate(config.windows) if other == window]
            self.layers[family] = sorted([*self.layers.get(family, []), *own])
        self._page_size, self._device = geometry.page_size, device

    @property
    def backends(self) -> Sequence[AttentionBackend]:
        """All of them, each once."""
        return [backend for backends in self.by_family.values() for backend in backends]

    def plan(self, step: StepColumns) -> AttentionMetadata:
        """Let every backend plan the step, whose columns are staged; returns it as the layers that read everything
        see it."""
        planned = {}
        for family, backends in self.by_family.items():
            own = step.families[family]
            tables = self._device.stage(own.tables)
            planned[family] = AttentionMetadata(step.query_lens, step.seq_lens, tables, own.slots, self._page_size)
            for backend in backends:
                backend.plan(planned[family])
        return next(iter(planned.values()))
