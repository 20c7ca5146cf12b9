"""Physical pages: all or nothing, never twice, never the padding page, never while a fence is up."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import tokens_of as ids

from devices.page_pool import FEW, PADDING_PAGE, Fence, OutOfPages, PageError, PageFamilies, PageFamily, PagePool
from devices.pages import IntArray


def books_of(pool: PagePool) -> tuple[list[int], list[int], list[int]]:
    return pool.refcounts().tolist(), pool.free_pages().tolist(), pool.pending_pages().tolist()


def test_every_page_but_the_padding_page_is_handed_out_once() -> None:
    pool = PagePool(5)
    assert sorted(pool.alloc(5).tolist()) == [1, 2, 3, 4, 5]
    assert PADDING_PAGE == 0
    assert pool.num_free == 0


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0)


def test_a_shortage_says_both_numbers_and_takes_nothing() -> None:
    pool = PagePool(3, "window")
    pool.alloc(1)
    before = books_of(pool)
    with pytest.raises(OutOfPages, match=r"3 pages of family 'window' were asked for, 2 are free") as caught:
        pool.alloc(3)
    assert (caught.value.need, caught.value.free, caught.value.family) == (3, 2, "window")
    assert books_of(pool) == before


def test_taking_no_pages_takes_no_pages() -> None:
    pool = PagePool(2)
    assert pool.alloc(0).tolist() == []
    pool.release(ids([]))
    pool.retain(ids([]))
    assert pool.num_free == 2


def test_a_negative_number_of_pages_is_a_bug_and_takes_nothing() -> None:
    pool = PagePool(4)
    held = pool.alloc(2)
    before = books_of(pool)
    with pytest.raises(PageError, match="-1"):
        pool.alloc(-1)
    assert books_of(pool) == before
    pool.release(held)
    assert sorted(pool.free_pages().tolist()) == [1, 2, 3, 4]


def test_pages_just_released_are_used_again_first() -> None:
    pool = PagePool(8)
    first = pool.alloc(3)
    pool.alloc(2)
    pool.release(first)
    assert pool.alloc(3).tolist() == first.tolist()


def test_a_shared_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = PagePool(2)
    page = pool.alloc(1)
    pool.retain(page)
    pool.release(page)
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2


@pytest.mark.parametrize(
    "wrong",
    [ids([4]), ids([1, 4]), ids([PADDING_PAGE]), ids([1, PADDING_PAGE]), ids([-1]), ids([6]), ids([1, 1])],
    ids=["free", "one-free", "padding", "with-padding", "negative", "too-high", "twice"],
)
def test_a_wrong_release_raises_and_changes_nothing(wrong: IntArray) -> None:
    pool = PagePool(5)
    pool.alloc(3)
    before = books_of(pool)
    with pytest.raises(PageError):
        pool.release(wrong)
    assert books_of(pool) == before


def test_a_page_with_two_owners_cannot_be_released_twice_in_one_call() -> None:
    pool = PagePool(5)
    page = pool.alloc(1)
    pool.retain(page)
    before = books_of(pool)
    with pytest.raises(PageError, match="twice"):
        pool.release(np.concatenate([page, page]))
    assert books_of(pool) == before


@pytest.mark.parametrize("num_pages", [2, FEW, FEW + 1, 3 * FEW])
def test_a_wrong_page_among_few_or_many_raises_and_changes_nothing(num_pages: int) -> None:
    pool = PagePool(5 * FEW)
    order = np.random.default_rng(num_pages).permutation(num_pages)
    held = pool.alloc(num_pages)[order]
    pool.retain(held[1:])
    free = int(pool.free_pages()[0])
    before = books_of(pool)
    for place in (0, num_pages // 2, num_pages - 1):
        for wrong in (held[place - 1], free, PADDING_PAGE, -1, -num_pages, pool.num_pages + 1):
            pages = held.copy()
            pages[place] = wrong
            with pytest.raises(PageError):
                pool.release(pages)
            assert books_of(pool) == before
    pool.release(held)
    assert sorted(set(range(1, num_pages + 1)) & set(pool.free_pages().tolist())) == [int(held[0])]


def test_a_page_is_not_free_twice() -> None:
    pool = PagePool(5)
    page = pool.alloc(1)
    pool.release(page)
    with pytest.raises(PageError, match="they have no owner"):
        pool.release(page)


def test_a_page_without_owner_cannot_be_shared() -> None:
    pool = PagePool(5)
    mine = pool.alloc(1)
    before = books_of(pool)
    with pytest.raises(PageError, match="retain"):
        pool.retain(np.concatenate([mine, ids([5])]))
    assert books_of(pool) == before


def test_a_released_page_waits_for_every_fence_that_was_up() -> None:
    pool = PagePool(2)
    page = pool.alloc(1)
    first, second = pool.fence("step 7"), pool.fence("remote writer")
    pool.release(page)
    late = pool.fence("step 8")
    assert (pool.num_free, pool.num_pending) == (1, 1)
    pool.lift(first)
    assert pool.num_pending == 1
    pool.lift(second)
    assert (pool.num_free, pool.num_pending) == (2, 0)
    pool.lift(late)


def test_a_pending_page_is_neither_handed_out_nor_released_again() -> None:
    pool = PagePool(1)
    page = pool.alloc(1)
    fence = pool.fence("step 1")
    pool.release(page)
    with pytest.raises(OutOfPages):
        pool.alloc(1)
    with pytest.raises(PageError):
        pool.release(page)
    pool.lift(fence)
    assert pool.alloc(1).tolist() == page.tolist()


def test_a_fence_is_lifted_once() -> None:
    pool = PagePool(1)
    fence = pool.fence("step 1")
    pool.lift(fence)
    with pytest.raises(PageError, match=r"step 1.*not up"):
        pool.lift(fence)


def test_a_fence_of_another_kind_lifts_nothing() -> None:
    pool = PagePool(1)
    page = pool.alloc(1)
    mine = pool.fence("step 1")
    pool.release(page)
    with pytest.raises(PageError):
        pool.lift(Fence(mine.serial + 1, "somebody else's"))
    assert pool.num_pending == 1


def test_looking_at_the_books_gives_copies() -> None:
    pool = PagePool(2)
    pool.release(pool.alloc(1))
    before = books_of(pool)
    for look in (pool.refcounts, pool.free_pages, pool.pending_pages):
        look()[:] = 7
    assert books_of(pool) == before


def three_families() -> PageFamilies:
    return PageFamilies(
        [
            (PageFamily("full", 4), 4),
            (PageFamily("window", 4, window=8), 2),
            (PageFamily("quarter", 16, derived_from="full"), 99),
        ]
    )


def test_families_give_pages_of_every_kind() -> None:
    families = three_families()
    taken = families.alloc({"full": 2, "window": 1})
    assert {name: len(pages) for name, pages in taken.items()} == {"full": 2, "window": 1}


def test_one_short_family_leaves_all_families_whole() -> None:
    families = three_families()
    for demand in ({"full": 3, "window": 3}, {"window": 3, "full": 3}):
        before = {name: books_of(pool) for name, pool in families.pools.items()}
        with pytest.raises(OutOfPages, match="'window'") as caught:
            families.alloc(demand)
        assert caught.value.family == "window"
        assert {name: books_of(pool) for name, pool in families.pools.items()} == before


def test_a_derived_family_has_no_pool_and_takes_nothing() -> None:
    families = three_families()
    assert set(families.pools) == {"full", "window"}
    with pytest.raises(KeyError):
        families.alloc({"full": 1, "quarter": 1})
    assert families.pools["full"].num_free == 4


def test_a_fence_of_the_families_holds_pages_of_every_kind() -> None:
    families = three_families()
    taken = families.alloc({"full": 1, "window": 1})
    fences = families.fence("step 3")
    for name, pages in taken.items():
        families.pools[name].release(pages)
    assert [pool.num_pending for pool in families.pools.values()] == [1, 1]
    families.lift(fences)
    assert [pool.num_pending for pool in families.pools.values()] == [0, 0]
