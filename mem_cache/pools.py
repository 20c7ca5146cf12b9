"""KV tensors by kind of layer. The device chooses their layout, this module their number and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from devices.base import Device, KvLayer


@dataclass(frozen=True, slots=True)
class AttentionKv:
    """Keys and values of all attention layers; those of one page family share page tables.

    Attributes:
        layers: one `KvLayer` each, in the model's order; page 0 is the padding page.
    """

    layers: tuple[KvLayer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)


def attention_kv(
    device: Device,
    *,
    num_pages: Sequence[int],
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> AttentionKv:
    """Zeroed KV; `num_pages`: of each layer, without the padding page."""
    layers = (
        device.kv_layer(index, pages + 1, page_size, num_kv_heads, head_dim, dtype)
        for index, pages in enumerate(num_pages)
    )
    return AttentionKv(tuple(layers))
