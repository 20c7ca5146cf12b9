"""How many pages and rows a memory budget buys, against buying them one at a time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import page_sizes

from mem_cache.sizing import (
    DEFAULT_MAX_RUNNING,
    DoesNotFit,
    WindowLayers,
    attention_token_bytes,
    kv_budget,
    row_width,
    size_pools,
)


def test_bytes_of_a_token_are_a_key_and_a_value_of_every_head_of_every_layer() -> None:
    per_head_and_layer = sum(64 * 2 for _ in ("key", "value"))
    assert attention_token_bytes(30, 3, 64, 2) == sum(per_head_and_layer for _ in range(30) for _ in range(3))


@given(page_sizes, st.integers(1, 5000), st.integers(0, 300))
def test_a_row_holds_the_context_and_the_reserve_in_whole_pages_and_no_page_more(
    page_size: int, context_len: int, reserve: int
) -> None:
    width = row_width(context_len, reserve, page_size)
    assert width % page_size == 0
    assert width - page_size < context_len + reserve <= width


@given(
    page_sizes,
    st.integers(1, 64),
    st.integers(0, 100_000),
    st.none() | st.integers(0, 2000),
    st.none() | st.integers(1, 300),
)
def test_the_pools_and_the_padding_page_fit_the_budget_and_one_page_more_does_not(
    page_size: int, token_bytes: int, budget: int, max_tokens: int | None, max_running: int | None
) -> None:
    affordable = 0
    page_bytes = page_size * token_bytes
    while (affordable + 2) * page_bytes <= budget:  # a page, and the padding page
        affordable += 1
    allowed = affordable if max_tokens is None else min(affordable, max_tokens // page_size)
    sizes = {
        "budget_bytes": budget,
        "token_bytes": token_bytes,
        "page_size": page_size,
        "context_len": 100,
        "max_total_tokens": max_tokens,
        "max_running_requests": max_running,
    }
    if allowed == 0:
        with pytest.raises(DoesNotFit, match="use a smaller --page-size"):
            size_pools(**sizes)
        return
    size = size_pools(**sizes)
    assert size.num_pages == allowed
    assert size.page_bytes == page_bytes
    assert (size.num_pages + 1) * size.page_bytes <= budget
    assert size.num_rows == min(max_running or DEFAULT_MAX_RUNNING, allowed)
    assert size.row_width == row_width(100, 0, page_size)


def test_no_more_requests_run_than_there_are_pages() -> None:
    size = size_pools(budget_bytes=6 * 16, token_bytes=1, page_size=16, context_len=10, max_running_requests=64)
    assert (size.num_pages, size.num_rows) == (5, 5)


def test_a_budget_that_buys_nothing_says_what_to_change() -> None:
    with pytest.raises(DoesNotFit) as refused:
        size_pools(budget_bytes=1000, token_bytes=100, page_size=128, context_len=10)
    for words in ("1000 bytes", "page of 128", "--mem-fraction-static", "--max-total-tokens", "--page-size"):
        assert words in str(refused.value)


GB = 10**9


@pytest.mark.parametrize(
    ("taken_by_others", "fraction", "weights", "budget"),
    [
        (0, 0.3, 2, 17.2),
        (20, 0.3, 2, 17.2),  # two engines of 0.3 each: what the first holds is not the second's to count
        (44, 0.3, 2, 14.8),
        (0, 0.95, 2, 58.8),
        (0, 0.99, 2, 58.8),  # some is always left
        (20, 0.9, 10, 30.8),
        (63, 0.3, 2, -4.2),
    ],
)
def test_memory_that_another_process_holds_is_not_counted(
    taken_by_others: int, fraction: float, weights: int, budget: float
) -> None:
    """B072, on a device of 64 GB."""
    found = kv_budget(64 * GB, (64 - taken_by_others) * GB, fraction, weights * GB)
    assert found / GB == pytest.approx(budget)
    if budget < 0:
        with pytest.raises(DoesNotFit, match=r"^-42\d* bytes .* buy 0 tokens"):
            size_pools(budget_bytes=found, token_bytes=1, page_size=16, context_len=10)


def test_the_reserve_of_a_step_widens_the_row() -> None:
    size = size_pools(budget_bytes=10_000, token_bytes=1, page_size=16, context_len=100, max_reserve=24)
    assert size.row_width == 128


@given(
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 30_000),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 5),
)
@example(1, 11, 1012, 1, 5, 2)  # as many full pages as window pages, and memory for one more
def test_a_window_pool_is_as_large_as_its_rows_can_need_and_the_rest_buys_full_pages(
    full_bytes: int, window_bytes: int, budget: int, window: int, chunk: int, rows: int
) -> None:
    layers, page_size = WindowLayers(window_bytes, window, chunk), 4
    per_row = layers.pages_per_row(100, page_size)
    assert per_row <= 25

    def cost(num_pages: int) -> int:
        return page_size * (full_bytes * (num_pages + 1) + window_bytes * (min(num_pages, rows * per_row) + 1))

    affordable = 0
    while cost(affordable + 1) <= budget:
        affordable += 1
    sizes = {"page_size": page_size, "context_len": 100, "max_running_requests": rows, "windowed": layers}
    if affordable == 0:
        with pytest.raises(DoesNotFit):
            size_pools(budget_bytes=budget, token_bytes=full_bytes, **sizes)  # type: ignore[arg-type]
        return
    size = size_pools(budget_bytes=budget, token_bytes=full_bytes, **sizes)  # type: ignore[arg-type]
    assert size.num_pages == affordable
    assert size.num_window_pages == min(affordable, size.num_rows * per_row)
    assert size.num_bytes <= budget


@pytest.mark.parametrize(
    ("max_total_tokens", "num_full", "num_windows"),
    [(None, 249, 249), (200, 75, 50), (4 * 36, 75, 36), (4 * 35, 35, 35)],
    ids=["plenty", "some", "just-enough", "one-too-few"],
)
def test_where_every_layer_has_a_window_full_pages_cost_nothing_and_never_outnumber_what_windows_can_serve(
    max_total_tokens: int | None, num_full: int, num_windows: int
) -> None:
    """Three rows of 25 pages, each with at most twelve window pages."""
    layers = WindowLayers(2, 8, 8)
    assert layers.pages_per_row(100, 4) == 12
    size = size_pools(
        budget_bytes=2000,
        token_bytes=0,
        page_size=4,
        context_len=100,
        max_running_requests=3,
        max_total_tokens=max_total_tokens,
        windowed=layers,
    )
    assert (size.num_pages, size.num_window_pages, size.num_rows) == (num_full, num_windows, 3)
    assert size.num_bytes == num_windows * 8 <= 2000


def test_whole_prompts_need_windows_as_wide_as_rows() -> None:
    assert WindowLayers(1, 8, None).pages_per_row(100, 4) == 25
    assert WindowLayers(1, 8, 16).pages_per_row(1000, 4) == 2 * 2 + 2 * 4 + 4
