"""Page arithmetic against loops that count on their fingers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PAGE_SIZES, page_sizes, ragged_batches

from devices.base import Capabilities
from devices.pages import (
    align_resume,
    ceil_page,
    floor_page,
    is_whole_pages,
    page_count,
    page_counts,
    ragged_positions,
    ragged_slots,
    slots_of,
)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 128])
def test_floor_ceil_and_count_agree_with_filling_pages_token_by_token(page_size: int) -> None:
    pages_opened = 0
    full = 0
    for length in range(3 * page_size + 2):
        assert floor_page(length, page_size) == full
        assert ceil_page(length, page_size) == pages_opened * page_size
        assert page_count(length, page_size) == pages_opened
        assert is_whole_pages(length, page_size) == (full == length)
        # one more token
        if length == pages_opened * page_size:
            pages_opened += 1
        if length + 1 == pages_opened * page_size:
            full = length + 1


@pytest.mark.parametrize(
    ("length", "page_size", "floor", "ceil"), [(0, 16, 0, 0), (1, 16, 0, 16), (128, 128, 128, 128)]
)
def test_page_borders_by_hand(length: int, page_size: int, floor: int, ceil: int) -> None:
    assert (floor_page(length, page_size), ceil_page(length, page_size)) == (floor, ceil)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_device_that_resumes_at_the_token_resumes_anywhere(page_size: int) -> None:
    anywhere = Capabilities(resume_unit="token")
    assert [align_resume(n, page_size, anywhere) for n in range(300)] == list(range(300))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_device_that_resumes_at_the_page_gives_up_less_than_a_page_and_less_than_one_page_is_nothing(
    page_size: int,
) -> None:
    page_only = Capabilities(resume_unit="page")
    for length in range(300):
        resumed = align_resume(length, page_size, page_only)
        borders = [border for border in range(0, length + 1) if border % page_size == 0]
        assert resumed == borders[-1]
    assert align_resume(page_size - 1, page_size, page_only) == 0


def test_a_device_that_declares_nothing_resumes_at_the_page() -> None:
    assert align_resume(17, 16, Capabilities()) == 16


@given(page_sizes.flatmap(lambda size: st.tuples(st.just(size), ragged_batches(size))))
def test_slots_of_a_ragged_batch_are_those_of_each_token_in_order(
    case: tuple[int, tuple[list[list[int]], list[int], list[int]]],
) -> None:
    page_size, (tables, starts, lengths) = case
    positions, slots = [], []
    for table, start, length in zip(tables, starts, lengths, strict=True):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(table[position // page_size] * page_size + position % page_size)
        one_row = slots_of(np.array(table, dtype=np.int32), start, start + length, page_size)
        assert one_row.tolist() == slots[len(slots) - length :]
        assert one_row.dtype == np.int64

    first, count = np.array(starts, dtype=np.int32), np.array(lengths, dtype=np.int32)
    got = ragged_positions(first, count)
    assert got.tolist() == positions
    assert got.dtype == np.int32
    if tables:
        ragged = ragged_slots(np.array(tables, dtype=np.int32), first, count, page_size)
        assert ragged.tolist() == slots
        assert ragged.dtype == np.int64


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_step_of_one_token_each_names_the_slot_of_each_rows_next_token(page_size: int) -> None:
    tables = np.array([[7, 3], [5, 9], [2, 4]], dtype=np.int32)
    starts, ones = np.array([page_size, 0, 2 * page_size - 1], dtype=np.int32), np.ones(3, dtype=np.int32)
    assert ragged_positions(starts, ones).tolist() == starts.tolist()
    slots = ragged_slots(tables, starts, ones, page_size)
    assert slots.tolist() == [3 * page_size, 5 * page_size, 4 * page_size + page_size - 1]


@given(page_sizes, st.lists(st.integers(0, 1000)))
def test_the_page_counts_of_a_batch_are_those_of_each_row(page_size: int, lengths: list[int]) -> None:
    counts = page_counts(np.array(lengths, dtype=np.int32), page_size)
    assert counts.tolist() == [page_count(length, page_size) for length in lengths]
    assert counts.dtype == np.int32


def test_an_empty_step_has_no_positions_and_no_slots() -> None:
    nothing = np.empty(0, dtype=np.int32)
    assert ragged_positions(nothing, nothing).tolist() == []
    assert ragged_slots(np.empty((0, 4), dtype=np.int32), nothing, nothing, 16).tolist() == []


def test_slots_of_high_pages_do_not_wrap_at_int32() -> None:
    high = np.array([2**31 - 1], dtype=np.int32)
    assert slots_of(high, 127, 128, 128).tolist() == [(2**31 - 1) * 128 + 127]
    assert ragged_slots(high[None], *np.array([[127], [1]], dtype=np.int32), 128).tolist() == [(2**31 - 1) * 128 + 127]
