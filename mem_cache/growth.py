"""What a row takes and what it gives back, as arithmetic on its record: nothing here touches a page.

    0        protected                     committed            scheduled      allocated
    |  the tree's counts  |  the row's own counts, one for each page of the full family  |

A row has pages of several families. Those of the full and the window family hold the same tokens; a *coarse* page
stands for several of them, and a row's own part may start inside one: then it has a copy of that page, whose first
entries are the tree's. `extend`, `decode`, `speculate` and `prealloc` say how far a record must climb, `plan` sums that
up, `plan_release` is what the row owns, `plan_transfer` what a remote reader or writer of a part of it touches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from devices.page_pool import PageFamily
from devices.pages import IntArray, ceil_page, floor_page, page_count, window_start
from mem_cache.kv_info import LadderError, ReqKvInfo, RowGeometry


class Growth(NamedTuple):
    """One record climbs: `start -> target`, both whole pages.

    Attributes:
        needs_row: whether the record has none yet.
        start: tokens that have pages already: the row's, or the matched prefix's.
        num_pages: new pages of each family whose page is the row's.
        prefix: pages that a record without a row starts from, by family.
        protected: how much of the prefix is the tree's, whole pages.
        num_coarse: new pages of each family with larger pages; a shared one that the row continues is copied.
        swa_evicted: before here the prefix has lost its window's pages, but nobody reads them.
    """

    record: ReqKvInfo
    needs_row: bool
    start: int
    target: int
    num_pages: int
    prefix: Mapping[str, IntArray]
    protected: int
    num_coarse: Mapping[str, int]
    swa_evicted: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step needs. `num_pages` counts for each family that has a pool, and for larger pages `num_coarse`."""

    growths: tuple[Growth, ...]
    num_rows: int
    num_pages: int
    num_coarse: Mapping[str, int] = field(default_factory=dict)


NO_PREFIX: Mapping[str, IntArray] = MappingProxyType({})
NO_COARSE: Mapping[str, int] = MappingProxyType({})
NOTHING = Plan((), 0, 0)


class PageRange(NamedTuple):
    """Pages of a row's tokens `[start, end)`, whole pages of `family`."""

    family: str
    start: int
    end: int


# The four ways in: each only says how far a record must climb. LadderError: further than its row is wide.


def extend(record: ReqKvInfo, seq_len: int, prefix: Mapping[str, IntArray] | None = None) -> Growth:
    """Room for a prefill or chunk that ends at `seq_len`; a record without a row starts from `prefix`."""
    return grow(record, seq_len, prefix)


def decode(record: ReqKvInfo, num_tokens: int = 1) -> Growth:
    """Room for `num_tokens` behind what is launched; inside a page it needs nothing."""
    return grow(record, record.kv_scheduled_len + num_tokens, None)


def speculate(record: ReqKvInfo, reserve: int) -> Growth:
    """Room for `reserve` tokens behind what is committed: a draft may write them all and lose them again."""
    return grow(record, record.kv_committed_len + reserve, None)


def prealloc(record: ReqKvInfo, length: int, prefix: Mapping[str, IntArray] | None = None) -> Growth:
    """Room for `length` tokens that a remote writer will fill; nothing of it is scheduled."""
    return grow(record, length, prefix)


def grow(record: ReqKvInfo, length: int, prefix: Mapping[str, IntArray] | None, protected: int | None = None) -> Growth:
    """Room for `length` tokens, of which `prefix` has pages; `protected`: how much of that is the tree's."""
    geometry, needs_row = record.geometry, record.req_pool_idx is None
    start = record.kv_allocated_len if prefix is None else len(prefix["full"]) * geometry.page_size
    target = max(start, ceil_page(length, geometry.page_size))
    if target > geometry.row_width:
        raise LadderError("reserve", target, record, "target <= row width")
    if protected is None:
        protected = start if prefix is not None or needs_row else record.cache_protected_len
    num_pages = page_count(target - start, geometry.page_size)
    coarse = _coarse_pages(record, start, target, protected) if geometry.coarse else NO_COARSE
    return Growth(record, needs_row, start, target, num_pages, prefix or NO_PREFIX, protected, coarse)


def _coarse_pages(record: ReqKvInfo, start: int, target: int, protected: int) -> dict[str, int]:
    """New pages of each family with larger pages."""
    return {
        family.name: page_count(target - first, family.tokens_per_page)
        for family in record.geometry.coarse
        if (first := _first_new(family, record, start, protected)) < target and target > protected
    }


def _first_new(family: PageFamily, record: ReqKvInfo, start: int, protected: int) -> int:
    """Where a growth's first new page of a family with larger pages begins.

    Behind the page that holds `start`, when the row owns that page; else at its border: the row gets a copy of it.
    """
    owns = record.req_pool_idx is not None and start > protected
    return (ceil_page if owns else floor_page)(start, family.tokens_per_page)


def plan(growths: Iterable[Growth]) -> Plan:
    """Sum up what the growths take. Pure."""
    items = tuple(growths)
    if not items:
        return NOTHING
    num_rows = num_pages = 0
    coarse: Counter[str] = Counter()
    for growth in items:
        num_rows += growth.needs_row
        num_pages += growth.num_pages
        if growth.num_coarse:
            coarse.update(growth.num_coarse)
    return Plan(items, num_rows, num_pages, coarse)


def check_current(wanted: Plan) -> None:
    """A plan is good for the records as they were, each once; LadderError when one is not where the plan found it."""
    is_current = len({id(growth.record) for growth in wanted.growths}) == len(wanted.growths)
    for record, needs_row, start, target, *_ in wanted.growths:
        is_there = record.req_pool_idx is None if needs_row else record.kv_allocated_len == start
        if not is_current or not is_there:
            raise LadderError("commit of a plan", target, record, "each record once, where the plan found it")


def plan_release(record: ReqKvInfo, geometry: RowGeometry) -> tuple[PageRange, ...]:
    """What the row owns, page range by page range; the tree's part and what the window let go are not in it. Pure.

    full     |  tree's  |  free [protected, allocated)                       |
    window   |  tree's  |  free  | gone [dead_lo, cursor) |  free            |
    coarse   |  tree's      |  free, from the border of the page that holds `protected`  |
    """
    lo, hi = record.cache_protected_len, record.kv_allocated_len
    ranges: list[PageRange] = []
    for family in geometry.families:
        if family.derived_from is not None:
            continue
        if geometry.is_coarse(family):
            if lo < hi:
                ranges.append(PageRange(family.name, floor_page(lo, family.tokens_per_page), hi))
        elif family.window is None or record.swa_evicted_seqlen <= (dead_lo := record.swa_dead_lo(geometry.page_size)):
            ranges.append(PageRange(family.name, lo, hi))
        else:
            ranges.append(PageRange(family.name, lo, dead_lo))
            ranges.append(PageRange(family.name, record.swa_evicted_seqlen, hi))
    return tuple([part for part in ranges if part.start < part.end])


def plan_transfer(start: int, end: int, geometry: RowGeometry) -> tuple[PageRange, ...]:
    """Pages of a row's tokens `[start, end)` that another machine reads or writes, so that a step may follow. Pure.

    A window's are those that it still reads; a coarse page goes along whole. A derived family's pages have the ids of
    the family that it derives from.
    """
    ranges = []
    for family in geometry.families:
        lo = floor_page(start, family.tokens_per_page)
        if family.window is not None:
            lo = max(lo, window_start(end, family.window, geometry.page_size))
        hi = ceil_page(floor_page(end, family.ratio), family.tokens_per_page)
        ranges.append(PageRange(family.derived_from or family.name, lo, hi))
    return tuple([part for part in ranges if part.start < part.end])
