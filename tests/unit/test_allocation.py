"""Plans, commits, publishing and the one release, each against what a person would do page by page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from strategies import PAGE_SIZES, Books, blocks, geometry, make_books, snapshot, snapshot_record, tokens_of

from devices.page_pool import OutOfPages
from devices.pages import IntArray
from mem_cache.audit import Holding, audit
from mem_cache.growth import PageRange, decode, extend, plan, plan_release, prealloc, speculate
from mem_cache.kv_info import LadderError, ReqKvInfo, RowGeometry
from mem_cache.rows import OutOfRows
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import LockError, LockReceipt

BASE = Namespace()
EVERY_PAGE_SIZE = pytest.mark.parametrize("page_size", PAGE_SIZES)


def start(books: Books, tokens: IntArray, name: str = "r") -> tuple[ReqKvInfo, LockReceipt]:
    """A record whose whole prompt was computed: matched, locked, extended, launched and committed."""
    record = books.record(name)
    lock = books.tree.lock(books.allocator.match(tokens, BASE))
    books.allocator.commit(plan([extend(record, len(tokens), {"full": books.tree.pages(lock)})]))
    record.schedule(len(tokens))
    record.commit(len(tokens))
    return record, lock


def cached(books: Books, tokens: IntArray, name: str = "past") -> None:
    """Leave a prompt in the tree, unlocked, as a finished request does."""
    record, lock = start(books, tokens, name)
    books.allocator.release(record, books.allocator.publish(record, tokens, BASE, lock))


def named(books: Books, record: ReqKvInfo, family: str = "full") -> list[int]:
    return books.rows.pages(family, record.row, 0, record.kv_allocated_len).tolist()


# What a release frees.


def lives(shape: RowGeometry) -> Iterator[tuple[ReqKvInfo, set[int]]]:
    """Records at every small `(protected, committed, allocated, cursor, floor)`, with the pages their window let go.

    The three that bound the window move in different orders, so the cursor stands on every side of the others.
    """
    page, width = shape.page_size, shape.row_width
    orders = (("protect", "shield", "slide"), ("shield", "slide", "protect"), ("slide", "protect", "shield"))
    for allocated in range(0, width + 1, page):
        for committed, order in product(range(allocated + 1), orders):
            borders = range(0, committed + 1, page)
            for protected, cursor, floor in product(borders, borders, range(committed + 1)):
                record, gone = ReqKvInfo(shape), set()
                record.bind(1)
                record.reserve(allocated)
                record.schedule(committed)
                record.commit(committed)
                try:
                    for move in order:
                        if move == "protect":
                            record.protect(protected)
                        elif move == "shield":
                            record.shield_window(floor)
                        elif cursor:
                            keep = max(record.cache_protected_len, record.swa_evict_floor)
                            record.slide_window(cursor)
                            gone = {i for i in range(allocated // page) if keep <= i * page < cursor}
                except LadderError:
                    continue
                yield record, gone


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("kinds", [{}, {"window": True}, {"window": True, "derived": True}], ids=str)
def test_a_release_frees_each_page_that_is_the_rows_own_and_still_there(page_size: int, kinds: dict[str, bool]) -> None:
    shape = geometry(page_size, 3, **kinds)
    count = 0
    for record, gone in lives(shape):
        freed: dict[str, list[int]] = {family.name: [] for family in shape.families}
        for part in plan_release(record, shape):
            assert part.start < part.end
            assert part.start % page_size == part.end % page_size == 0
            freed[part.family] += range(part.start // page_size, part.end // page_size)
        own = [i for i in range(record.kv_allocated_len // page_size) if i * page_size >= record.cache_protected_len]
        want = {"full": own, "window": [i for i in own if i not in gone], "derived": []}
        assert freed == {family.name: want[family.name] for family in shape.families}, str(record)
        count += 1
    assert count > 60


def test_what_a_release_frees_by_hand() -> None:
    shape = geometry(4, 8, window=True, derived=True)
    record = ReqKvInfo(shape)
    record.bind(1)
    record.reserve(32)
    record.schedule(24)
    record.commit(24)
    record.protect(4)
    record.shield_window(6)
    record.slide_window(16)
    assert plan_release(record, shape) == (
        PageRange("full", 4, 32),
        PageRange("window", 4, 8),
        PageRange("window", 16, 32),
    )


def test_an_empty_record_frees_nothing() -> None:
    shape = geometry(4, 8, window=True)
    assert plan_release(ReqKvInfo(shape), shape) == ()


# The four ways in.


def at(committed: int, scheduled: int, allocated: int, page_size: int, row_pages: int = 512) -> ReqKvInfo:
    record = ReqKvInfo(geometry(page_size, row_pages))
    record.bind(1)
    record.reserve(allocated)
    record.schedule(scheduled)
    record.commit(committed)
    return record


@pytest.mark.parametrize(
    ("committed", "allocated", "reserve", "page_size", "target"),
    [
        (100, 100, 8, 1, 108),
        (100, 112, 8, 16, 112),
        (112, 112, 8, 16, 128),
        (125, 128, 8, 16, 144),
        (7, 128, 256, 128, 384),
        (7, 512, 256, 128, 512),
        (0, 0, 0, 16, 0),
    ],
)
def test_a_speculative_step_reserves_whole_pages_behind_what_is_committed(
    committed: int, allocated: int, reserve: int, page_size: int, target: int
) -> None:
    growth = speculate(at(committed, committed, allocated, page_size), reserve)
    assert growth.target == target
    assert growth.num_pages == (target - allocated) // page_size


@EVERY_PAGE_SIZE
def test_every_way_in_climbs_to_the_page_that_holds_its_last_token_and_never_down(page_size: int) -> None:
    for num_pages, extra in product(range(4), range(0, 2 * page_size + 2)):
        allocated = num_pages * page_size
        for committed in {0, allocated // 2, max(0, allocated - 1), allocated}:
            for scheduled in {committed, allocated}:
                record = at(committed, scheduled, allocated, page_size)
                ways = {
                    scheduled + extra: (decode(record, extra), extend(record, scheduled + extra)),
                    committed + extra: (speculate(record, extra), prealloc(record, committed + extra)),
                }
                for last, growths in ways.items():
                    holds = allocated
                    while holds < last:
                        holds += page_size
                    for growth in growths:
                        assert growth.target == holds
                        assert growth.start == allocated
                        assert growth.num_pages * page_size == holds - allocated
                        assert not growth.needs_row


@EVERY_PAGE_SIZE
def test_a_record_without_a_row_starts_behind_the_matched_prefix(page_size: int) -> None:
    record = ReqKvInfo(geometry(page_size, 8))
    prefix = {"full": tokens_of([4, 9])}
    for way in (extend, prealloc):
        growth = way(record, 3 * page_size, prefix)
        assert (growth.needs_row, growth.start, growth.target, growth.num_pages) == (
            True,
            2 * page_size,
            3 * page_size,
            1,
        )


@EVERY_PAGE_SIZE
def test_a_chunk_that_ends_inside_the_matched_prefix_takes_no_pages(page_size: int) -> None:
    books = make_books(page_size)
    prompt = blocks([0, 1, 2], page_size)
    cached(books, prompt)
    longer = np.concatenate([prompt, tokens_of([1])])
    lock = books.tree.lock(books.allocator.match(longer, BASE))
    record = books.record()
    growth = extend(record, page_size, {"full": books.tree.pages(lock)})
    assert (growth.num_pages, growth.target) == (0, 3 * page_size)
    books.allocator.commit(plan([growth]))
    assert record.kv_allocated_len == 3 * page_size
    assert audit(books.allocator, [Holding(record, lock)]) == []


@EVERY_PAGE_SIZE
def test_decoding_inside_a_page_touches_no_allocator(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    books = make_books(page_size)
    record, lock = start(books, tokens_of([7]))

    def touched(*args: object) -> None:
        raise AssertionError("the allocator was asked for pages")

    for length in range(2, 3 * page_size + 1):
        step = plan([decode(record)])
        opens_page = (length - 1) % page_size == 0
        assert step.num_pages == opens_page
        with monkeypatch.context() as patch:
            if not opens_page:
                patch.setattr(books.families, "alloc", touched)
                patch.setattr(books.tree, "evict", touched)
                patch.setattr(books.rows, "write", touched)
            books.allocator.commit(step)
        record.schedule(length)
        record.commit(length)
    assert len(named(books, record)) == 3
    assert audit(books.allocator, [Holding(record, lock)]) == []


@pytest.mark.parametrize("way", [extend, prealloc, decode, speculate], ids=lambda way: way.__name__)
def test_a_plan_wider_than_the_row_is_refused_before_anything_is_taken(way: object) -> None:
    books = make_books(4, row_pages=3)
    (record, lock), (other, other_lock) = start(books, blocks([0, 1], 4), "wide"), start(books, blocks([2], 4), "other")
    before = snapshot(books, [record, other])
    length = 5 if way in (decode, speculate) else 13
    with pytest.raises(LadderError, match=r"16.*width 12"):
        books.allocator.commit(plan([decode(other), way(record, length)]))  # type: ignore[operator]
    assert snapshot(books, [record, other]) == before
    assert audit(books.allocator, [Holding(record, lock), Holding(other, other_lock)]) == []


# commit: everything or nothing.


def test_one_plan_gives_several_records_rows_and_pages_of_their_own() -> None:
    books = make_books(4)
    records = [books.record(name) for name in "abc"]
    lengths = [1, 9, 4]
    books.allocator.commit(plan([extend(r, n) for r, n in zip(records, lengths, strict=True)]))
    pages = [named(books, record) for record in records]
    assert [len(row) for row in pages] == [1, 3, 1]
    flat = [page for row in pages for page in row]
    assert len(set(flat)) == len(flat)
    assert 0 not in flat
    assert audit(books.allocator, [Holding(record, None) for record in records]) == []


def test_without_a_free_row_nothing_is_taken() -> None:
    books = make_books(4, num_rows=2)
    holder, lock = start(books, blocks([0], 4))
    new = [books.record("a"), books.record("b")]
    before = snapshot(books, [holder, *new])
    with pytest.raises(OutOfRows, match="2 rows were asked for, 1 are free"):
        books.allocator.commit(plan([decode(holder, 9), *(extend(record, 4) for record in new)]))
    assert snapshot(books, [holder, *new]) == before
    assert audit(books.allocator, [Holding(holder, lock)]) == []


@EVERY_PAGE_SIZE
def test_without_enough_pages_nothing_is_taken_and_nothing_is_evicted(page_size: int) -> None:
    books = make_books(page_size, num_pages=6)
    cached(books, blocks([0, 1], page_size))
    holder, lock = start(books, blocks([2, 3], page_size))
    new = books.record("new")
    before = snapshot(books, [holder, new])
    wanted = plan([decode(holder, 1), extend(new, 4 * page_size)])
    assert books.allocator.lacking_pages(wanted) == 1
    with pytest.raises(OutOfPages, match=r"5 pages .* 4 are free"):
        books.allocator.commit(wanted)
    assert snapshot(books, [holder, new]) == before
    assert audit(books.allocator, [Holding(holder, lock)]) == []


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_failing_page_pool_leaves_everything_as_it_was(failing_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    books = make_books(4, num_pages=16, window=True)
    real, calls = books.families.alloc, 0

    def alloc(demand: dict[str, int]) -> dict[str, IntArray]:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OutOfPages(1, 0)
        return real(demand)

    monkeypatch.setattr(books.families, "alloc", alloc)
    records = [books.record(name) for name in "abc"]
    for number, record in enumerate(records, start=1):
        before = snapshot(books, records)
        wanted = plan([extend(record, 5), *(decode(earlier, 3) for earlier in records[: number - 1])])
        if number == failing_call:
            with pytest.raises(OutOfPages):
                books.allocator.commit(wanted)
            assert snapshot(books, records) == before
            break
        books.allocator.commit(wanted)
    assert audit(books.allocator, [Holding(record, None) for record in records]) == []


@EVERY_PAGE_SIZE
def test_eviction_takes_exactly_the_pages_that_the_plan_lacks(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    books = make_books(page_size, num_pages=8)
    cached(books, blocks([0, 1, 2, 3, 4], page_size))
    asked: list[int] = []
    real = books.tree.evict

    def evict(num_pages: int) -> int:
        asked.append(num_pages)
        return real(num_pages)

    monkeypatch.setattr(books.tree, "evict", evict)
    records = [books.record(name) for name in "abc"]
    books.allocator.commit(plan([extend(records[0], 2 * page_size)]))
    assert (asked, books.families.pools["full"].num_free) == ([], 1)
    books.allocator.commit(plan([extend(records[1], 2 * page_size), decode(records[0], page_size)]))
    assert asked == [1]
    assert books.tree.num_evictable == 4
    books.allocator.commit(plan([extend(records[2], 4 * page_size)]))
    assert asked == [1, 4]
    assert books.tree.num_evictable == books.families.pools["full"].num_free == 0
    assert audit(books.allocator, [Holding(record, None) for record in records]) == []


def test_a_locked_prefix_is_not_counted_as_available() -> None:
    books = make_books(4, num_pages=6)
    prompt = blocks([0, 1, 2], 4)
    cached(books, prompt)
    assert books.allocator.num_available == 6
    lock = books.tree.lock(books.allocator.match(prompt, BASE))
    assert books.allocator.num_available == 4
    record = books.record()
    with pytest.raises(OutOfPages):
        books.allocator.commit(plan([extend(record, 20)]))
    books.tree.unlock(lock)
    books.allocator.commit(plan([extend(record, 20)]))


def test_pages_behind_a_fence_are_not_available_until_it_is_lifted() -> None:
    books = make_books(4, num_pages=2)
    record, lock = start(books, blocks([0, 1], 4))
    fences = books.families.fence("step 1")
    books.allocator.release(record, lock)
    new = books.record("new")
    with pytest.raises(OutOfPages):
        books.allocator.commit(plan([extend(new, 4)]))
    assert audit(books.allocator, []) == []
    books.families.lift(fences)
    books.allocator.commit(plan([extend(new, 8)]))
    assert audit(books.allocator, [Holding(new, None)]) == []


def test_a_plan_whose_evicted_pages_are_still_read_waits_for_them_and_evicts_no_more() -> None:
    books = make_books(4, num_pages=3)
    cached(books, blocks([0, 1, 2], 4))
    fences = books.families.fence("step 1")
    record = books.record()
    wanted = plan([extend(record, 8)])
    assert books.allocator.lacking_pages(wanted) == 0
    for _ in range(3):
        with pytest.raises(OutOfPages, match="2 pages"):
            books.allocator.commit(wanted)
        assert books.allocator.lacking_pages(wanted) <= books.allocator.num_arriving
        assert (books.tree.num_evictable, books.allocator.num_arriving) == (1, 2)
        assert snapshot_record(record) == snapshot_record(books.record())
        assert audit(books.allocator, []) == []
    books.families.lift(fences)
    books.allocator.commit(wanted)
    assert books.tree.num_evictable == 1
    assert audit(books.allocator, [Holding(record, None)]) == []


def test_pages_that_arrive_anyway_are_not_evicted_again() -> None:
    books = make_books(4, num_pages=4)
    cached(books, blocks([0, 1, 2], 4))
    aborted = books.record("aborted")
    books.allocator.commit(plan([extend(aborted, 4)]))
    fences = books.families.fence("step 1")
    books.allocator.release(aborted, None)
    record = books.record()
    wanted = plan([extend(record, 8)])
    with pytest.raises(OutOfPages):
        books.allocator.commit(wanted)
    assert (books.tree.num_evictable, books.allocator.num_arriving) == (2, 2)
    books.families.lift(fences)
    books.allocator.commit(wanted)
    assert (books.tree.num_evictable, books.families.pools["full"].num_free) == (2, 0)


@pytest.mark.parametrize("how", ["committed twice", "one record in it twice"])
def test_a_plan_that_its_records_have_outrun_loses_no_page(how: str) -> None:
    books = make_books(4)
    record = books.record()
    wanted = plan([extend(record, 4)] * (2 if how.startswith("one") else 1))
    if how == "committed twice":
        books.allocator.commit(wanted)
    with pytest.raises(LadderError, match="where the plan found it"):
        books.allocator.commit(wanted)
    assert audit(books.allocator, [Holding(record, None)]) == []


def test_a_window_family_gets_its_own_pages_and_gives_back_what_it_still_has() -> None:
    books = make_books(4, window=True)
    record = books.record()
    books.allocator.commit(plan([extend(record, 16)]))
    record.schedule(16)
    record.commit(16)
    books.families.pools["window"].release(books.rows.pages("window", record.row, 0, 8))
    record.slide_window(8)
    assert audit(books.allocator, [Holding(record, None)]) == []
    books.allocator.release(record, None)
    assert [pool.num_free for pool in books.families.pools.values()] == [16, 16]
    assert audit(books.allocator, []) == []


# Matching.


@pytest.mark.parametrize(
    ("length", "reused"),
    [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (63, 48), (64, 48), (65, 64), (128, 112), (129, 128)],
)
def test_a_fully_cached_prompt_leaves_at_least_one_token_to_compute(length: int, reused: int) -> None:
    books = make_books(16, row_pages=9)
    prompt = blocks(list(range(9)), 16)[:129]
    cached(books, prompt)
    for _ in range(3):
        assert books.allocator.match(prompt[:length], BASE).num_pages * 16 == reused


def test_with_caching_off_nothing_is_matched_and_nothing_is_published() -> None:
    books = make_books(4, caching=False)
    prompt = blocks([0, 1], 4)
    record, lock = start(books, prompt)
    assert books.allocator.publish(record, prompt, BASE, lock) is lock
    assert record.cache_protected_len == 0
    books.allocator.release(record, lock)
    assert list(books.tree.nodes()) == []
    assert books.allocator.match(prompt, BASE).num_pages == 0
    assert audit(books.allocator, []) == []


# Publishing.


@EVERY_PAGE_SIZE
def test_publishing_hands_the_committed_whole_pages_to_the_tree_and_frees_nothing(page_size: int) -> None:
    books = make_books(page_size)
    prompt = np.concatenate([blocks([0, 1], page_size), tokens_of([5])])
    record, lock = start(books, prompt)
    record.rewind(len(prompt) - 1)
    record.schedule(len(prompt))
    mine, free = named(books, record), books.families.pools["full"].num_free
    lock = books.allocator.publish(record, prompt, BASE, lock)
    assert record.cache_protected_len == 2 * page_size
    assert named(books, record) == mine
    assert books.tree.pages(lock).tolist() == mine[:2]
    assert books.families.pools["full"].num_free == free
    assert (books.tree.num_protected, books.tree.num_evictable) == (2, 0)
    assert audit(books.allocator, [Holding(record, lock)]) == []


@EVERY_PAGE_SIZE
def test_publishing_less_than_one_page_more_changes_nothing(page_size: int) -> None:
    books = make_books(page_size)
    prompt = blocks([0], page_size)
    record, lock = start(books, prompt)
    lock = books.allocator.publish(record, prompt, BASE, lock)
    before = snapshot(books, [record])
    assert books.allocator.publish(record, prompt, BASE, lock) is lock
    assert snapshot(books, [record]) == before


@EVERY_PAGE_SIZE
def test_two_equal_prompts_computed_at_once_end_on_the_same_pages(page_size: int) -> None:
    books = make_books(page_size)
    prompt = blocks([0, 1, 2], page_size)
    (first, first_lock), (second, second_lock) = start(books, prompt, "first"), start(books, prompt, "second")
    pool = books.families.pools["full"]
    assert not set(named(books, first)) & set(named(books, second))
    duplicates = named(books, second)
    first_lock = books.allocator.publish(first, prompt, BASE, first_lock)
    second_lock = books.allocator.publish(second, prompt, BASE, second_lock)
    assert named(books, first) == named(books, second) == books.tree.pages(first_lock).tolist()
    free = pool.free_pages().tolist()
    assert all(free.count(page) == 1 for page in duplicates)
    assert pool.num_free == 16 - 3
    assert audit(books.allocator, [Holding(first, first_lock), Holding(second, second_lock)]) == []
    books.allocator.release(first, first_lock)
    books.allocator.release(second, second_lock)
    assert (pool.num_free, books.tree.num_evictable) == (13, 3)
    assert audit(books.allocator, []) == []


def test_a_row_names_the_trees_page_before_its_own_copy_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    books = make_books(4)
    prompt = blocks([0, 1, 2], 4)
    (first, first_lock), (second, second_lock) = start(books, prompt, "first"), start(books, prompt, "second")
    books.allocator.publish(first, prompt, BASE, first_lock)
    pool = books.families.pools["full"]
    real, released = pool.release, []

    def release(pages: IntArray) -> None:
        assert not set(pages.tolist()) & set(books.rows.tables["full"].ravel().tolist())
        released.extend(pages.tolist())
        real(pages)

    monkeypatch.setattr(pool, "release", release)
    mine = named(books, second)
    books.allocator.publish(second, prompt, BASE, second_lock)
    assert released == mine


def test_only_the_pages_between_the_protected_and_the_known_are_duplicates() -> None:
    books = make_books(4)
    cached(books, blocks([0], 4))
    prompt = blocks([0, 1, 2], 4)
    record, lock = start(books, prompt)
    assert record.cache_protected_len == 4
    cached(books, blocks([0, 1, 9], 4)[:-3])
    mine = named(books, record)
    lock = books.allocator.publish(record, prompt, BASE, lock)
    now = named(books, record)
    assert now[0] == mine[0]
    assert now[1] != mine[1]
    assert now[2] == mine[2]
    assert mine[1] in books.families.pools["full"].free_pages()
    assert audit(books.allocator, [Holding(record, lock)]) == []


def test_what_is_published_stays_while_its_record_lives_and_goes_when_it_is_released() -> None:
    books = make_books(4)
    prompt = blocks([0, 1], 4)
    record, lock = start(books, prompt)
    lock = books.allocator.publish(record, prompt, BASE, lock)
    assert books.tree.evict(99) == 0
    books.allocator.release(record, lock)
    assert books.tree.evict(99) == 2
    assert books.families.pools["full"].num_free == 16


def test_a_published_prefix_is_found_in_its_own_namespace_only() -> None:
    books = make_books(4)
    prompt = blocks([0, 1], 4)
    record, lock = start(books, prompt)
    adapter = Namespace(extra_key="adapter")
    books.allocator.publish(record, prompt, adapter, lock)
    assert books.allocator.match(np.append(prompt, 1), BASE).num_pages == 0
    assert books.allocator.match(np.append(prompt, 1), adapter).num_pages == 2


# The one way out.


@EVERY_PAGE_SIZE
@pytest.mark.parametrize("stop", ["before launch", "in flight", "readable", "published", "rewound", "speculating"])
def test_a_release_gives_everything_back_wherever_the_record_stands(page_size: int, stop: str) -> None:
    books = make_books(page_size)
    prompt = np.concatenate([blocks([0, 1], page_size), tokens_of([5, 6])])
    cached(books, prompt[:page_size])
    free = books.families.pools["full"].num_free
    record = books.record()
    lock = books.tree.lock(books.allocator.match(prompt, BASE))
    books.allocator.commit(plan([extend(record, len(prompt), {"full": books.tree.pages(lock)})]))
    if stop != "before launch":
        record.schedule(len(prompt))
    if stop in ("readable", "published", "rewound", "speculating"):
        record.commit(len(prompt))
    if stop in ("published", "rewound"):
        lock = books.allocator.publish(record, prompt, BASE, lock)
    if stop == "rewound":
        record.rewind(record.cache_protected_len)
    if stop == "speculating":
        books.allocator.commit(plan([speculate(record, 2 * page_size)]))
    assert audit(books.allocator, [Holding(record, lock)]) == []
    books.allocator.release(record, lock)
    assert snapshot_record(record)[:7] == (None, 0, 0, 0, 0, 0, 0)
    assert audit(books.allocator, []) == []
    published = stop in ("published", "rewound")
    known = len(prompt) // page_size if published else 1
    assert books.tree.num_evictable == known
    assert books.families.pools["full"].num_free == free + 1 - known
    assert books.rows.used == frozenset()


def test_releasing_again_changes_nothing() -> None:
    books = make_books(4)
    record, lock = start(books, blocks([0, 1], 4))
    books.allocator.release(record, lock)
    before = snapshot(books, [record])
    books.allocator.release(record, None)
    assert snapshot(books, [record]) == before


def test_a_receipt_cannot_leave_with_two_releases() -> None:
    books = make_books(4)
    cached(books, blocks([0, 1], 4))
    record, lock = start(books, blocks([0, 1, 2], 4))
    books.allocator.release(record, lock)
    before = snapshot(books, [record])
    with pytest.raises(LockError):
        books.allocator.release(record, lock)
    assert snapshot(books, [record]) == before


def test_a_request_that_only_waited_gives_its_lock_back() -> None:
    books = make_books(4)
    prompt = blocks([0, 1], 4)
    cached(books, prompt)
    lock = books.tree.lock(books.allocator.match(np.append(prompt, 1), BASE))
    assert books.tree.num_protected == 2
    books.allocator.release(books.record(), lock)
    assert (books.tree.num_protected, books.tree.num_evictable) == (0, 2)


def test_a_released_record_can_climb_again() -> None:
    books = make_books(4)
    record, lock = start(books, blocks([0, 1], 4))
    books.allocator.release(record, lock)
    books.allocator.commit(plan([extend(record, 12)]))
    assert record.kv_allocated_len == 12
    assert audit(books.allocator, [Holding(record, None)]) == []
