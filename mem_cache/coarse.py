"""Row tables of families whose page stands for several pages of the row (a compressed cache's sidecar pages).

A row's own part may start inside such a page. The tree then has a page with the entries before that point, and the row
a copy of it that it writes behind; or the row's page is the tree's as well, when the row itself published it: nobody
reads behind what the tree knows, so the row goes on writing. Hence one rule: *only who took a page writes into it, and
whoever continues another's copies it first.*

    tokens   0                G                2G
    tree     |   x   (whole)  | y  (a part) |              y: entries below `protected`
    row      |   x            | z                |         z: a copy of y, then the row's own entries
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from devices.page_pool import PADDING_PAGE, PageFamily
from devices.pages import IntArray, floor_page, page_count
from mem_cache.growth import Growth
from mem_cache.kv_info import ReqKvInfo
from mem_cache.rows import PageCopy, RowPool


def grow(rows: RowPool, family: PageFamily, growth: Growth, new: IntArray) -> list[PageCopy]:
    """Name what the growth starts from and its new pages; returns the copy that the next step must make, if any."""
    row, per_page = growth.record.row, family.tokens_per_page
    known = growth.prefix.get(family.name)
    if known is None:
        known = rows.pages(family.name, row, 0, growth.start)
    else:
        rows.write(family.name, row, 0, known)
    if not len(new):
        return []
    first = page_count(growth.target, per_page) - len(new)
    rows.write(family.name, row, first, new)
    return [PageCopy(family.name, int(known[first]), int(new[0]))] if first < len(known) else []


def entries(rows: RowPool, families: Iterable[PageFamily], growth: Growth) -> dict[str, IntArray]:
    """What a row's tables name before it grows."""
    return {family.name: rows.pages(family.name, growth.record.row, 0, growth.start) for family in families}


def restore(rows: RowPool, families: Iterable[PageFamily], growth: Growth, before: Mapping[str, IntArray]) -> None:
    """Undo `grow`: the row names what it named before, and nothing behind."""
    for family in families:
        named = np.full(page_count(growth.target, family.tokens_per_page), PADDING_PAGE, dtype=np.int32)
        named[: len(before[family.name])] = before[family.name]
        rows.write(family.name, growth.record.row, 0, named)


def held(rows: RowPool, family: PageFamily, row: int, end: int) -> IntArray:
    """The row's page that serves each page of its tokens `[0, end)`, int32 [pages of the row]."""
    page_size = rows.geometry.page_size
    per_page = page_count(family.tokens_per_page, page_size)
    served: IntArray = np.repeat(rows.pages(family.name, row, 0, end), per_page)[: page_count(end, page_size)]
    return served


def give_up(rows: RowPool, family: PageFamily, record: ReqKvInfo, end: int, trees: IntArray) -> IntArray:
    """The tree knows `[0, end)` now, with counts of its own: returns the pages whose counts the row gives up.

    It names the tree's instead, `trees`. A page that it goes on writing behind `end` stays its own.
    """
    per_page = family.tokens_per_page
    lo = floor_page(record.cache_protected_len, per_page)
    hi = end if end == record.kv_allocated_len else floor_page(end, per_page)
    own = rows.pages(family.name, record.row, lo, max(lo, hi))
    first = page_count(lo, per_page)
    rows.write(family.name, record.row, first, trees[first : first + len(own)])
    return own
