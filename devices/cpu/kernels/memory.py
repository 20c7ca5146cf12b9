"""Memory for large results of products, above all the logits of a large batch.

The C library gives so large a block back to the system when it is freed, and fresh pages for it later cost more than
to compute what goes into them. So one block is kept, and handed out again once no tensor is left that lies in it.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

KEPT_BYTES = 32 << 20
"""Smaller blocks the C library keeps by itself (glibc: largest threshold of `mmap`)."""

_ALIGNMENT = 64


class ResultMemory:
    """One block, as large as the largest result that needed one; a second result at the same time gets its own."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)

    def empty(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, [rows, size]."""
        num_bytes = rows * size * dtype.itemsize
        if num_bytes < KEPT_BYTES:
            return torch.empty(rows, size, dtype=dtype)
        # A tensor's storage holds the array that it was made from. Two references: ours, and that of this very call.
        if sys.getrefcount(self._block) > 2 or len(self._block) < num_bytes + _ALIGNMENT:
            self._block = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -self._block.ctypes.data % _ALIGNMENT
        return torch.from_numpy(self._block[start : start + num_bytes]).view(dtype).view(rows, size)
