"""Slots of a step's tokens, and the page tables they are read from, computed on the device.

    tokens of a row   start .. start + n          page  = table[row, position / P]
    slot              page * P + position % P     P: tokens in a page, a power of two

Written for vector cores that have 32-bit integers only: a 64-bit vector, `%`, and a gather of single elements become
loops over scalars there. So page sizes are shifts and masks, a tile of P tokens crosses one page border and needs two
scalar page ids, and every mask is a prefix. The grid is one-dimensional and each program takes every n-th item, so it
can be as small as the number of vector cores. Compiled down to planned on-chip memory by
`tests/lowering/test_slots.py`; it has not run on an NPU. `devices/npu/slots.py` calls the first kernel; the two others
are for tables that stay on the device, where today each step brings its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

tl: Any = None
"""Triton's language, bound by `kernels()`: importing this module needs no Triton."""

COPY_BLOCK = 256
"""Page ids that a program of the table update moves at once."""


def slots_reference(
    table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Slots of tokens `[starts[i], starts[i] + lens[i])` of each row, int32 [num_tokens], row after row.

    Args:
        table: page ids, int32 [rows, pages]; rows, starts, lens: int32 [batch]; all on one device.
        num_tokens: the sum of `lens`, so that nothing waits for the device to know it.
    """
    import torch

    end = torch.cumsum(lens, 0)
    token = torch.arange(num_tokens, device=rows.device)
    owner = torch.searchsorted(end, token, right=True)
    position = token - (end - lens)[owner] + starts[owner]
    number = position // page_size
    page = table[rows[owner].long(), number]
    return (page * page_size + position - number * page_size).to(torch.int32)


def update_reference(
    table: torch.Tensor, rows: torch.Tensor, firsts: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor
) -> None:
    """Write `lens[i]` ids of `pages` into row `rows[i]` of `table` from entry `firsts[i]` on; all int32."""
    done = 0
    for row, first, n in zip(rows.tolist(), firsts.tolist(), lens.tolist(), strict=True):
        table[row, first : first + n] = pages[done : done + n]
        done += n


def slots_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    lens: tl.tensor,
    firsts: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    width: tl.tensor,
    shift: tl.constexpr,
    page_size: tl.constexpr,
) -> None:
    """`slots_reference`; `firsts[i]`: where row i's slots begin in `out`, `width`: entries of a row of the table."""
    lane = tl.arange(0, page_size)
    for item in range(tl.program_id(0), batch, tl.num_programs(0)):
        start = tl.load(starts + item)
        n = tl.load(lens + item)
        entry = table + tl.load(rows + item) * width
        to = out + tl.load(firsts + item)
        offset = start & (page_size - 1)
        for done in range(0, n, page_size):
            number = (start + done) >> shift
            last = (start + n - 1) >> shift
            page = tl.load(entry + number)
            following = tl.load(entry + tl.minimum(number + 1, last))
            place = lane + offset
            slot = tl.where(place < page_size, (page << shift) + place, (following << shift) + place - page_size)
            tl.store(to + done + lane, slot, mask=lane < n - done)


def decode_slots_kernel(
    pages: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    shift: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One token a row: `pages[i]` is the page that holds position `positions[i]`, which the host knows anyway."""
    lane = tl.arange(0, block)
    for first in range(tl.program_id(0) * block, batch, tl.num_programs(0) * block):
        mask = lane < batch - first
        page = tl.load(pages + first + lane, mask=mask, other=0)
        position = tl.load(positions + first + lane, mask=mask, other=0)
        tl.store(out + first + lane, (page << shift) + (position & (page_size - 1)), mask=mask)


def update_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    firsts: tl.tensor,
    lens: tl.tensor,
    offsets: tl.tensor,
    pages: tl.tensor,
    num_changes: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    """`update_reference`; `offsets[i]`: where the page ids of change i begin in `pages`."""
    lane = tl.arange(0, block)
    for item in range(tl.program_id(0), num_changes, tl.num_programs(0)):
        n = tl.load(lens + item)
        to = table + tl.load(rows + item) * width + tl.load(firsts + item)
        source = pages + tl.load(offsets + item)
        for done in range(0, n, block):
            mask = lane < n - done
            ids = tl.load(source + done + lane, mask=mask, other=0)
            tl.store(to + done + lane, ids, mask=mask)


def kernels() -> dict[str, Any]:
    """The kernels above as Triton's, by name. Raises ImportError without Triton."""
    global tl  # noqa: PLW0603 - Triton looks its language up among the globals of a kernel
    import triton
    import triton.language

    tl = triton.language
    return {f.__name__: triton.jit(f) for f in (slots_kernel, decode_slots_kernel, update_kernel)}
