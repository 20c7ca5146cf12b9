"""Paged attention with the kernel: it reads page tables and pages as they are, so a plan is a handful of addresses.

A slot behind a row's last token holds whatever an earlier owner left, even NaN: the kernel never reads it.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from devices.base import AttentionMetadata, KvLayer
from devices.cpu.kernels.linear import TYPE_NAMES
from devices.cpu.kernels.operators import with_whole_tokens


class _Shape(ctypes.Structure):
    """`Shape` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "dim", "page_size", "window")),
        ("scale", ctypes.c_float),
    )


class KernelAttention:
    """Causal attention of `num_heads` query heads over `num_kv_heads` paged heads (grouped-query when fewer), over the
    last `window` tokens when one is given. What a token gets depends on its own row only, to the last bit."""

    def __init__(
        self,
        library: ctypes.CDLL,
        has_fast_bf16: bool,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> None:
        """`has_fast_bf16`: the processor multiplies pairs of bf16."""
        self.window = window
        self._shape = _Shape(num_heads, num_kv_heads, head_dim, 1, window or 0, head_dim**-0.5)
        self._batch = 0
        self._functions = {
            (q, kv): getattr(library, f"attention_{TYPE_NAMES[q]}_{TYPE_NAMES[kv]}")
            for q in TYPE_NAMES
            for kv in TYPE_NAMES
        }
        if has_fast_bf16 and head_dim % 2 == 0:
            self._functions[torch.bfloat16, torch.bfloat16] = library.attention_pairs

    def plan(self, step: AttentionMetadata) -> None:
        """Keep the step's columns, in the types and the order that the kernel reads."""
        self._shape.page_size = step.page_size
        self._batch = len(step.query_lens)
        self._tables = step.page_tables.contiguous()
        starts = np.zeros(self._batch + 1, dtype=np.int32)
        step.query_lens.cumsum(out=starts[1:])
        seq_lens = np.ascontiguousarray(step.seq_lens, dtype=np.int32)
        slots = np.ascontiguousarray(step.slots, dtype=np.int64)
        # As tensors: numpy's own way to an array's address takes longer.
        self._starts, self._seq_lens, self._slots = map(torch.from_numpy, (starts, seq_lens, slots))
        self._planned = (
            self._tables.data_ptr(),
            self._tables.stride(0),
            self._starts.data_ptr(),
            self._seq_lens.data_ptr(),
            self._slots.data_ptr(),
            self._batch,
            ctypes.addressof(self._shape),
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KvLayer) -> torch.Tensor:
        """See `devices.base.AttentionBackend.forward`."""
        q, k, v = with_whole_tokens(q), with_whole_tokens(k), with_whole_tokens(v)
        out = q.new_empty(q.shape)
        self._functions[q.dtype, layer.k.dtype](
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            layer.k.data_ptr(),
            layer.v.data_ptr(),
            *self._planned,
            torch.get_num_threads(),
        )
        return out
