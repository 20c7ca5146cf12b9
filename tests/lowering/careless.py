"""A kernel that breaks the rules of kernels that NPUs share (docs/cuda.md), so that the judge is seen to judge."""

from __future__ import annotations

import triton
import triton.language as tl

TYPES = {"table": "*i32", "positions": "*i32", "out": "*i32", "batch": "i32"}


@triton.jit
def careless_kernel(table, positions, out, batch, page_size: tl.constexpr):
    """One gather an element, `%` and 64 bits in vectors, and a store whose mask begins in the middle."""
    lane = tl.arange(0, page_size)
    mask = (lane < batch) & (lane > 2)
    position = tl.load(positions + lane, mask=lane < batch, other=0)
    page = tl.load(table + position // page_size, mask=lane < batch, other=0)
    slot = page.to(tl.int64) * page_size + (position % page_size).to(tl.int64)
    tl.store(out + lane, slot.to(tl.int32), mask=mask)
