"""A kernel that breaks the rules of `devices/npu/kernels/slots.py`, so that the judge is seen to judge."""

from __future__ import annotations

from typing import Any

tl: Any = None


def careless_kernel(table: tl.tensor, positions: tl.tensor, out: tl.tensor, batch: tl.tensor, page_size: tl.constexpr):
    """One gather an element, `%`, and 64-bit slots."""
    lane = tl.arange(0, page_size)
    mask = lane < batch
    position = tl.load(positions + lane, mask=mask, other=0)
    page = tl.load(table + position // page_size, mask=mask, other=0)
    slot = page.to(tl.int64) * page_size + (position % page_size).to(tl.int64)
    tl.store(out + lane, slot.to(tl.int32), mask=mask)


def kernel() -> Any:
    global tl  # noqa: PLW0603
    import triton
    import triton.language

    tl = triton.language
    return triton.jit(careless_kernel)
