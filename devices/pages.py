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
    page, offset = np.divmod(position, page_size)
    return tables[owner, page].astype(np.int64) * page_size + offset


def _is_one_each(lengths: IntArray) -> bool:
    """Whether a ragged batch is not ragged: the common case of decode."""
    return bool((lengths == 1).all())
