"""Rows: page tables on the host, and the changes that let a mirror follow them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import geometry, tokens_of

from devices.page_pool import PADDING_PAGE, PageFamily
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import OutOfRows, RowPool, TableChange, table_width

ids = tokens_of


def two_rows(row_pages: int = 4) -> RowPool:
    return RowPool(2, geometry(4, row_pages, window=True))


def tables_of(rows: RowPool) -> dict[str, list[list[int]]]:
    return {name: table.tolist() for name, table in rows.tables.items()}


def test_rows_are_handed_out_once_and_never_the_padding_row() -> None:
    rows = two_rows()
    assert sorted([rows.alloc(), rows.alloc()]) == [1, 2]
    assert rows.used == {1, 2}
    with pytest.raises(OutOfRows, match="1 rows were asked for, 0 are free; raise --max-running-requests"):
        rows.alloc()
    assert (rows.used, rows.num_free) == ({1, 2}, 0)


def test_a_row_that_is_not_handed_out_cannot_be_given_back() -> None:
    rows = two_rows()
    row = rows.alloc()
    rows.free(row)
    for wrong in (row, 0, 3, -1):
        with pytest.raises(ValueError, match=f"row {wrong} is not handed out"):
            rows.free(wrong)
    assert rows.num_free == 2


def test_a_row_given_back_names_no_page() -> None:
    rows = two_rows()
    row = rows.alloc()
    rows.write("full", row, 0, ids([3, 4]))
    rows.write("window", row, 1, ids([5]))
    rows.free(row)
    assert all((table == PADDING_PAGE).all() for table in rows.tables.values())


def test_pages_of_tokens_are_read_back_as_a_copy() -> None:
    rows = two_rows()
    row = rows.alloc()
    rows.write("full", row, 0, ids([7, 8, 9]))
    assert rows.pages("full", row, 0, 12).tolist() == [7, 8, 9]
    assert rows.pages("full", row, 4, 12).tolist() == [8, 9]
    assert rows.pages("full", row, 8, 8).tolist() == []
    rows.pages("full", row, 0, 4)[:] = 1
    assert rows.pages("full", row, 0, 4).tolist() == [7]


@pytest.mark.parametrize(("start", "count"), [(0, 5), (3, 2), (4, 1), (-1, 2), (9, 0)])
def test_a_write_wider_than_the_row_raises_and_writes_nothing(start: int, count: int) -> None:
    rows = two_rows(row_pages=4)
    row, other = rows.alloc(), rows.alloc()
    rows.write("full", other, 0, ids([1, 2, 3, 4]))
    rows.take_changes()
    before = tables_of(rows)
    with pytest.raises(ValueError, match=rf"entries \[{start}, {start + count}\) of row {row} .* rows have 4"):
        rows.write("full", row, start, np.arange(10, 10 + count, dtype=np.int32))
    assert tables_of(rows) == before
    assert rows.take_changes() == ()


def test_nobody_writes_into_a_row_that_is_not_handed_out() -> None:
    rows = two_rows()
    for row in (0, 1, 2):
        with pytest.raises(ValueError, match=f"row {row}"):
            rows.write("full", row, 0, ids([1]))
    assert all((table == PADDING_PAGE).all() for table in rows.tables.values())


def test_a_table_is_as_wide_as_its_family_needs() -> None:
    wide, sparse = PageFamily("full", 4), PageFamily("compressed", 32)
    shape = RowGeometry(4, 36, (wide, sparse))
    assert (table_width(shape, wide), table_width(shape, sparse)) == (9, 2)
    rows = RowPool(1, shape)
    row = rows.alloc()
    rows.write("compressed", row, 0, ids([5, 6]))
    assert rows.pages("compressed", row, 0, 36).tolist() == [5, 6]
    assert rows.pages("compressed", row, 32, 36).tolist() == [6]


def test_changes_are_taken_once_in_the_order_they_were_made() -> None:
    rows = two_rows()
    row = rows.alloc()
    rows.write("full", row, 0, ids([3, 4]))
    rows.write("window", row, 1, ids([5]))
    first, second = rows.take_changes()
    assert (first.family, first.row, first.start, first.pages.tolist()) == ("full", row, 0, [3, 4])
    assert (second.family, second.row, second.start, second.pages.tolist()) == ("window", row, 1, [5])
    assert rows.take_changes() == ()


def apply(changes: tuple[TableChange, ...], mirror: dict[str, np.ndarray]) -> None:
    for change in changes:
        mirror[change.family][change.row, change.start : change.start + len(change.pages)] = change.pages


row_actions = st.one_of(
    st.just(("alloc",)),
    st.just(("step",)),
    st.tuples(st.just("free"), st.integers(0, 2)),
    st.tuples(
        st.just("write"),
        st.sampled_from(["full", "window"]),
        st.integers(0, 2),
        st.integers(0, 4),
        st.lists(st.integers(1, 99), max_size=4),
    ),
)


@given(st.lists(row_actions, max_size=30))
def test_a_mirror_that_applies_the_changes_shows_every_live_row_as_the_host_does(actions: list[tuple]) -> None:
    rows = RowPool(3, geometry(4, 5, window=True))
    mirror = {name: table.copy() for name, table in rows.tables.items()}
    for action, *args in actions:
        live = sorted(rows.used)
        if action == "alloc" and rows.num_free:
            rows.alloc()
        elif action == "free" and live:
            rows.free(live[args[0] % len(live)])
        elif action == "write" and live:
            family, index, start, pages = args
            if start + len(pages) <= 5:
                rows.write(family, live[index % len(live)], start, ids(pages))
        elif action == "step":
            apply(rows.take_changes(), mirror)
            for row in rows.used:
                for name, table in rows.tables.items():
                    assert mirror[name][row].tolist() == table[row].tolist()


def test_a_row_used_again_shows_a_mirror_nothing_of_its_last_owner() -> None:
    rows = two_rows()
    mirror = {name: table.copy() for name, table in rows.tables.items()}
    row = rows.alloc()
    rows.write("full", row, 0, ids([3, 4, 5]))
    apply(rows.take_changes(), mirror)
    rows.free(row)
    assert rows.alloc() == row
    rows.write("full", row, 0, ids([9]))
    apply(rows.take_changes(), mirror)
    assert mirror["full"][row].tolist() == [9, 0, 0, 0]
