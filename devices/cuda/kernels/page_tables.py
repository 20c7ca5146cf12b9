"""Page tables on the device: a step's changes and the slots of its new tokens, in one launch.

    tokens of a row   start .. start + n          page = table[row, position / P]
    slot              page * P + position % P     P: tokens in a page, a power of two

The host keeps the truth (`mem_cache.rows`) and a step carries what changed. One program serves a row: it writes the
row's changed entries, then reads the row to place the new tokens. So nothing that one program writes is read by
another, and prefill, chunk and decode are the same thing with different numbers of tokens.

The source serves Ascend too (`docs/cuda.md`), which shapes it: a run of entries instead of single ones, and only masks
that are true for a beginning. A block of tokens begins anywhere in a page, so each of its rows, as long as a page,
has two page ids. Programs may be fewer than rows.
"""

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import check_int32, check_power_of_two, check_shape

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
    entries,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PAGES: tl.constexpr = BLOCK // PAGE
    lane = tl.arange(0, BLOCK)
    which = tl.arange(0, PAGES)
    for entry in range(tl.program_id(0), entries, tl.num_programs(0)):
        table = tables + tl.load(rows + entry).to(tl.int64) * width
        source = tl.load(change_starts + entry)
        num_changes = tl.load(change_starts + entry + 1) - source
        at = tl.load(change_at + entry)
        for done in range(0, num_changes, BLOCK):
            is_change = lane < num_changes - done
            page = tl.load(change_page + source + done + lane, mask=is_change, other=0)
            tl.store(table + at + done + lane, page, mask=is_change)
        tl.debug_barrier()  # the row is read below by other threads than those that wrote it

        start = tl.load(starts + entry)
        token_start = tl.load(token_starts + entry)
        num_tokens = tl.load(token_starts + entry + 1) - token_start
        last_page = (start + num_tokens - 1) // PAGE
        place = start % PAGE + tl.arange(0, PAGE)[None, :]
        for done in range(0, num_tokens, BLOCK):
            first = (start + done) // PAGE
            page = tl.load(table + first + which, mask=which <= last_page - first, other=0)
            following = tl.load(table + first + 1 + which, mask=which < last_page - first, other=0)
            slot = tl.where(place < PAGE, page[:, None] * PAGE + place, following[:, None] * PAGE + (place - PAGE))
            tl.store(slots + token_start + done + lane, tl.reshape(slot, [BLOCK]), mask=lane < num_tokens - done)


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
        change_at: [entries]: index in the row of the entry's first change; the others follow it without a gap.
        change_page: [changes]: new page ids.
        starts: [entries]: position of the first new token.
        token_starts: [entries + 1]: like `change_starts`, over the step's tokens, from 0 to their number.
        slots: [tokens], result: `page * page_size + offset` of each new token.
    """
    check_int32(tables, rows, change_starts, change_at, change_page, starts, token_starts, slots)
    check_power_of_two("page_size", page_size, BLOCK)
    check_shape("change_at", change_at, len(rows))
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
            len(rows),
            tables.shape[1],
            PAGE=page_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
