"""All page arithmetic of the engine; no other module divides by a page size.

A *page* holds `page_size` consecutive tokens of one row. Token `i` of a row lives in the row's page `i // page_size`,
at the slot `page_id * page_size + i % page_size`. Lengths are tokens unless a name says pages. The one device rule in
here is `align_resume`: how much of KV that already exists a new computation may continue from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from devices.base import Capabilities

IntArray = npt.NDArray[np.int32]
"""Page ids, slots, rows and lengths on the host: int32, one dimension unless said otherwise."""


def floor_page(length: int, page_size: int) -> int:
    """Largest whole-page length that is `<= length`, in tokens."""
    return length - length % page_size


def ceil_page(length: int, page_size: int) -> int:
    """Smallest whole-page length that is `>= length`, in tokens."""
    return length + -length % page_size


def page_count(length: int, page_size: int) -> int:
    """Number of pages that hold `length` tokens."""
    return -(-length // page_size)


def page_counts(lengths: IntArray, page_size: int) -> IntArray:
    """`page_count` of each length, int32 [n]."""
    return -(-lengths // page_size)


def page_split(length: int, page_size: int) -> tuple[int, int]:
    """Whole pages of `length` tokens, and how many tokens lie behind them."""
    return divmod(length, page_size)


def page_spans(start: int, end: int, page_size: int) -> Iterator[tuple[int, int, int]]:
    """Tokens `[start, end)` of a row page by page: which of the row's pages, and its slots `[lo, hi)`."""
    while start < end:
        page, lo = divmod(start, page_size)
        hi = min(page_size, lo + end - start)
        yield page, lo, hi
        start += hi - lo


def is_whole_pages(length: int, page_size: int) -> bool:
    return length % page_size == 0


def align_resume(length: int, page_size: int, capabilities: Capabilities) -> int:
    """How many of `length` readable tokens a new computation may continue from.

    A device whose resume unit is the token continues anywhere; one whose resume unit is the page must start on a page
    border, so up to `page_size - 1` tokens are computed again.
    """
    return length if capabilities.resume_unit == "token" else floor_page(length, page_size)


# Compressed caches (DeepSeek-V4): one entry stands for `ratio` consecutive tokens. A page of ratio 4 is derived: a
# token's slot and its position agree modulo the page size, so the entry of the group that a slot closes is `slot // 4`
# and its page has the full page's id. Entries of ratio 128 live in *sidecar* pages of their own, `entries_per_page` to
# a page, so such a page stands for `ratio * entries_per_page` tokens.


def is_slot_aligned(slot: int, position: int, page_size: int) -> bool:
    """The invariant that derived caches rest on: a token's place in its page is its position's."""
    return slot % page_size == position % page_size


def derived_slots(slots: npt.NDArray[np.int64], ratio: int) -> npt.NDArray[np.int64]:
    """Entries that full slots close, int64: of the last token of each group of `ratio`; padding (< 0) closes none."""
    closing: npt.NDArray[np.int64] = slots[(slots >= 0) & (slots % ratio == ratio - 1)] // ratio
    return closing


def new_entries(start: int, end: int, ratio: int) -> range:
    """Numbers of the compressed entries that a row's tokens `[start, end)` complete."""
    return range(start // ratio, max(start // ratio, end // ratio))


def num_sidecar_pages(start: int, end: int, ratio: int, entries_per_page: int) -> int:
    """Sidecar pages that a row needs beside those of `[0, start)` when it has `end` tokens."""
    return max(0, page_count(end // ratio, entries_per_page) - page_count(start // ratio, entries_per_page))


def sidecar_slots(pages: IntArray, entries: range, entries_per_page: int) -> npt.NDArray[np.int64]:
    """Slots of a row's compressed entries; `pages` are its sidecar pages from its first on."""
    return slots_of(pages, entries.start, entries.stop, entries_per_page)


def last_sidecar_slot(pages: IntArray, start: int, ratio: int, entries_per_page: int) -> int:
    """Slot of the last entry that `start` tokens have, -1 when they have none."""
    count = start // ratio
    return -1 if count == 0 else int(sidecar_slots(pages, range(count - 1, count), entries_per_page)[0])


def sidecar_range(start: int, end: int, ratio: int, entries_per_page: int) -> range:
    """Which of a row's sidecar pages a transfer of tokens `[start, end)` touches; a started one goes along."""
    first = start // (ratio * entries_per_page)
    return range(first, max(first, page_count(end // ratio, entries_per_page)))


def window_start(length: int, window: int, page_size: int) -> int:
    """Tokens before here are not read again by a window over `window` tokens, once `length` are committed; whole pages.

    The row may still be cut to the page border at or before `length` and continue from there, so a prefix of
    `floor_page(length)` tokens has its window whole.
    """
    return max(0, floor_page(length, page_size) - ceil_page(window, page_size))


def slots_of(pages: IntArray, start: int, end: int, page_size: int) -> npt.NDArray[np.int64]:
    """Slots of tokens `[start, end)` of a row whose page ids are `pages`, int64 [end - start]."""
    position = np.arange(start, end, dtype=np.int64)
    return pages[position // page_size].astype(np.int64) * page_size + position % page_size


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenated positions `starts[i] .. starts[i] + lengths[i]` of a ragged batch, int32 [sum(lengths)].

    starts [5, 0], lengths [1, 3]  ->  [5, 0, 1, 2]
    """
    if _is_one_each(lengths):
        return starts
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    positions: IntArray = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - lengths), lengths)
    return positions


def ragged_slots(tables: IntArray, starts: IntArray, lengths: IntArray, page_size: int) -> npt.NDArray[np.int64]:
    """Slots of a ragged batch: for row `i` of `tables` (int32 [batch, pages]), tokens `[starts[i], +lengths[i])`.

    Returns int64 [sum(lengths)], in the order of `ragged_positions`.
    """
    owner = np.arange(len(lengths))
    if _is_one_each(lengths):
        position = starts
    else:
        position, owner = ragged_positions(starts, lengths), np.repeat(owner, lengths)
    return slots_at(tables, owner, page_places(position, page_size), page_size)


def page_places(positions: IntArray, page_size: int) -> tuple[IntArray, IntArray]:
    """Which page of its row holds each position, and where in it; both int32 [n]."""
    return np.divmod(positions, page_size)


def slots_at(
    tables: IntArray, owners: npt.NDArray[np.integer], places: tuple[IntArray, IntArray], page_size: int
) -> npt.NDArray[np.int64]:
    """Slots of tokens at their `page_places` in their owners' rows of `tables`, int32 [rows, pages]; int64 [n]."""
    page, offset = places
    slots: npt.NDArray[np.int64] = np.multiply(tables[owners, page], page_size, dtype=np.int64)
    slots += offset
    return slots


def _is_one_each(lengths: IntArray) -> bool:
    """Whether a ragged batch is not ragged: the common case of decode."""
    return bool((lengths == 1).all())
