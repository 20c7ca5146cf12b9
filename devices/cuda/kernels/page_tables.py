"""Page tables on the device: a step's changes and the slots of its new tokens, in one launch.

The host keeps the truth (`mem_cache.rows`) and a step carries what changed. One program serves one row: it writes the
row's changed entries, then reads the row to place the new tokens. So nothing that one program writes is read by
another, and prefill, chunk and decode are the same thing with different numbers of tokens.
"""

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import check_int32, check_power_of_two

BLOCK = 1024
"""Entries of a table, or tokens, that a program handles at once."""


@triton.jit
def update_tables_kernel(
    tables,
    rows,
    change_starts,
    change_at,
    change_page,
    starts,
    token_starts,
    slots,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    table = tables + tl.load(rows + entry).to(tl.int64) * width
    lane = tl.arange(0, BLOCK)
    change_end = tl.load(change_starts + entry + 1)
    for first in range(tl.load(change_starts + entry), change_end, BLOCK):
        is_change = first + lane < change_end
        at = tl.load(change_at + first + lane, mask=is_change, other=0)
        page = tl.load(change_page + first + lane, mask=is_change, other=0)
        tl.store(table + at, page, mask=is_change)
    tl.debug_barrier()  # the row is read below by other threads than those that wrote it

    start = tl.load(starts + entry)
    token_start = tl.load(token_starts + entry)
    end = start + tl.load(token_starts + entry + 1) - token_start
    PAGES: tl.constexpr = BLOCK // PAGE
    which = tl.arange(0, PAGES)
    offset = tl.arange(0, PAGE)
    for first in range(start // PAGE, (end + PAGE - 1) // PAGE, PAGES):
        page = tl.load(table + first + which, mask=(first + which) * PAGE < end, other=0)
        position = ((first + which) * PAGE)[:, None] + offset[None, :]
        is_new = (position >= start) & (position < end)
        tl.store(slots + token_start + (position - start), (page * PAGE)[:, None] + offset[None, :], mask=is_new)


def update_tables(
    tables: torch.Tensor,
    rows: torch.Tensor,
    change_starts: torch.Tensor,
    change_at: torch.Tensor,
    change_page: torch.Tensor,
    starts: torch.Tensor,
    token_starts: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
) -> None:
    """Apply a step's changes to the page tables and compute the slots of its new tokens. All tensors are int32.

    Args:
        tables: [rows, width], contiguous, changed in place.
        rows: [entries], each row once: the step's requests in order, then rows that only changed.
        change_starts: [entries + 1]; entry `i` has the changes `[change_starts[i], change_starts[i + 1])`.
        change_at, change_page: [changes]: index in the row, new page id; an index stands at most once in an entry.
        starts: [entries]: position of the first new token.
        token_starts: [entries + 1]: like `change_starts`, over the step's tokens; no tokens is allowed.
        slots: [tokens], result: `page * page_size + offset` of each new token.
    """
    check_int32(tables, rows, change_starts, change_at, change_page, starts, token_starts, slots)
    check_power_of_two("page_size", page_size, BLOCK)
    if len(rows):
        update_tables_kernel[(len(rows),)](
            tables,
            rows,
            change_starts,
            change_at,
            change_page,
            starts,
            token_starts,
            slots,
            tables.shape[1],
            PAGE=page_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
