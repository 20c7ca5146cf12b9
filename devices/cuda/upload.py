"""Brings a step's columns to the GPU in one copy that the host does not wait for.

    host, page-locked   | query starts | lengths | slots | ...      written by numpy
    GPU                 | query starts | lengths | slots | ...      one copy; each column is a view of it

A host buffer may be written again once its copy is done, so there are a few of them, used in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from devices.cuda.runtime import Runtime
from devices.pages import IntArray

NUM_BUFFERS = 4
ALIGNMENT = 4
"""Columns start at multiples of 16 bytes, which kernels read at once."""


@dataclass(slots=True)
class _HostBuffer:
    elements: torch.Tensor
    wait: Callable[[], None]


class Uploaded(NamedTuple):
    """Columns on the GPU, and the tensor that they are views of."""

    columns: tuple[torch.Tensor, ...]
    whole: torch.Tensor


class Uploader:
    """One for a device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._buffers = [_HostBuffer(runtime.host_buffer(0), _no_wait) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def upload(self, columns: Sequence[IntArray], into: torch.Tensor | None = None) -> Uploaded:
        """int32 columns on the GPU, of the lengths they have here.

        Args:
            into: what an earlier upload of columns of the same lengths made, `whole`; None makes a new tensor.
        """
        lengths = [len(column) for column in columns]
        starts = np.cumsum([0, *(length + -length % ALIGNMENT for length in lengths)])
        size = int(starts[-1])
        if into is not None and len(into) != size:
            raise ValueError(f"columns of {size} numbers do not fit the {len(into)} that were captured")
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer.wait()
        if len(buffer.elements) < size:
            buffer.elements = self._runtime.host_buffer(2 * size)
        host = buffer.elements[:size]
        written = host.numpy()
        for column, start, length in zip(columns, starts, lengths, strict=False):
            written[start : start + length] = column
        on_device = torch.empty(size, dtype=torch.int32, device=self._runtime.torch_device) if into is None else into
        on_device.copy_(host, non_blocking=True)
        buffer.wait = self._runtime.mark()
        parts = (on_device[start : start + length] for start, length in zip(starts, lengths, strict=False))
        return Uploaded(tuple(parts), on_device)


def _no_wait() -> None: ...
