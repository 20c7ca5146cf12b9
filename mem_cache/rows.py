"""Rows: which pages a record names, in order, kept on the host and mirrored to the device once a step.

A row is a line in one page table for each family: entry `i` is the page that holds the row's tokens
`[i * tokens_per_page, (i + 1) * tokens_per_page)`. Row 0 is the padding row and entry 0 the padding page, so whatever
is not written reads as "no page". Every write is remembered until `take_changes`, which is what a step carries to the
executors; nobody else keeps a copy that could differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from devices.page_pool import PADDING_PAGE, PageFamily
from devices.pages import IntArray, page_count
from mem_cache.kv_info import RowGeometry


class OutOfRows(Exception):
    """Fewer rows are free than were asked for; nothing was taken."""

    def __init__(self, need: int, free: int) -> None:
        self.need, self.free = need, free
        super().__init__(f"{need} rows were asked for, {free} are free; raise --max-running-requests")


class TableChange(NamedTuple):
    """`pages` were written into `row` of a family's table, from entry `start` on."""

    family: str
    row: int
    start: int
    pages: IntArray


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The content of page `source` of a family goes into page `target`, in every layer."""

    family: str
    source: int
    target: int


class RowPool:
    """`num_rows` rows, numbers `1 .. num_rows`, with one page table for each family."""

    def __init__(self, num_rows: int, geometry: RowGeometry) -> None:
        self.num_rows = num_rows
        self.geometry = geometry
        self._families = {family.name: family for family in geometry.families}
        self.tables: dict[str, IntArray] = {
            name: np.full((num_rows + 1, table_width(geometry, family)), PADDING_PAGE, dtype=np.int32)
            for name, family in self._families.items()
        }
        # How far each row was ever written since it was handed out: behind there all is padding.
        self._written = {name: [0] * (num_rows + 1) for name in self.tables}
        self._padding = np.full(max(table.shape[1] for table in self.tables.values()), PADDING_PAGE, dtype=np.int32)
        self._free = list(range(num_rows, 0, -1))
        self._used: set[int] = set()
        self._changes: list[TableChange] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        """Rows that are handed out, for the audit."""
        return frozenset(self._used)

    def alloc(self) -> int:
        """Take a row. Raises OutOfRows when none is free."""
        if not self._free:
            raise OutOfRows(1, 0)
        row = self._free.pop()
        self._used.add(row)
        return row

    def free(self, row: int) -> None:
        """Give a row back; its entries become the padding page. Raises ValueError when it is not handed out."""
        if row not in self._used:
            raise ValueError(f"row {row} is not handed out")
        self._used.remove(row)
        self._free.append(row)
        for family, written in self._written.items():
            if written[row]:
                self._put(family, row, 0, self._padding[: written[row]])
                written[row] = 0

    def write(self, family: str, row: int, start: int, pages: IntArray) -> None:
        """Name `pages` from entry `start` of the row on.

        Raises ValueError when they do not fit: a silent clamp would lose pages.
        """
        table = self.tables[family]
        if row not in self._used or not 0 <= start <= start + len(pages) <= table.shape[1]:
            raise ValueError(
                f"entries [{start}, {start + len(pages)}) of row {row} do not exist: rows have {table.shape[1]}"
            )
        self._put(family, row, start, pages)

    def pages(self, family: str, row: int, start: int, end: int) -> IntArray:
        """Pages of the row's tokens `[start, end)`; both borders are whole pages. A copy, int32 [pages]."""
        per_page = self._families[family].tokens_per_page
        return self.tables[family][row, page_count(start, per_page) : page_count(end, per_page)].copy()

    def take_changes(self) -> tuple[TableChange, ...]:
        """What was written since the last call, in order."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def _put(self, family: str, row: int, start: int, pages: IntArray) -> None:
        end = start + len(pages)
        self.tables[family][row, start:end] = pages
        written = self._written[family]
        written[row] = max(written[row], end)
        self._changes.append(TableChange(family, row, start, pages))


def table_width(geometry: RowGeometry, family: PageFamily) -> int:
    """Entries of a row in the family's page table."""
    return page_count(geometry.row_width, family.tokens_per_page)
