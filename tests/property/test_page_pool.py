"""The page pool against a dictionary of owners, move by move."""

from __future__ import annotations

import pytest
import strategies as domain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from oracles.naive_pool import NaivePool

from devices.page_pool import PADDING_PAGE, Fence, OutOfPages, PageError, PageFamilies, PageFamily, PagePool

NUM_PAGES = 7
any_pages = st.lists(st.integers(-1, NUM_PAGES + 1), max_size=4)


class PagesHaveOwners(RuleBasedStateMachine):
    """alloc, retain, release, fence and lift in any order; wrong ones must raise and change nothing."""

    fences = Bundle("fences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.naive = NaivePool(NUM_PAGES)

    def refuses(self, error: type[Exception], act: object, *args: object) -> None:
        before = (self.pool.refcounts().tolist(), self.pool.free_pages().tolist(), self.pool.pending_pages().tolist())
        try:
            act(*args)  # type: ignore[operator]
        except error:
            after = (
                self.pool.refcounts().tolist(),
                self.pool.free_pages().tolist(),
                self.pool.pending_pages().tolist(),
            )
            assert before == after
        else:
            raise AssertionError(f"{act} of {args} was not refused")

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def alloc(self, n: int) -> None:
        if not self.naive.can_alloc(n):
            self.refuses(OutOfPages, self.pool.alloc, n)
            return
        pages = self.pool.alloc(n).tolist()
        assert len(pages) == n
        assert PADDING_PAGE not in pages
        self.naive.take(pages)

    @rule(pages=any_pages)
    def retain(self, pages: list[int]) -> None:
        if self.naive.can_retain(pages):
            self.pool.retain(domain.tokens_of(pages))
            self.naive.retain(pages)
        else:
            self.refuses(PageError, self.pool.retain, domain.tokens_of(pages))

    @rule(pages=any_pages)
    def release(self, pages: list[int]) -> None:
        if self.naive.can_release(pages):
            self.pool.release(domain.tokens_of(pages))
            self.naive.release(pages)
        else:
            self.refuses(PageError, self.pool.release, domain.tokens_of(pages))

    @rule(data=st.data())
    def release_some_that_are_owned(self, data: st.DataObject) -> None:
        owned = sorted(page for page in self.naive.ids if self.naive.owners[page])
        if owned:
            self.release(data.draw(st.lists(st.sampled_from(owned), unique=True, max_size=4)))

    @rule(target=fences)
    def fence(self) -> Fence:
        fence = self.pool.fence("a step")
        self.naive.fences.add(fence.serial)
        return fence

    @rule(target=fences, fence=consumes(fences), again=st.booleans())
    def lift(self, fence: Fence, again: bool) -> object:
        self.pool.lift(fence)
        self.naive.lift(fence.serial)
        if again:
            self.refuses(PageError, self.pool.lift, fence)
        return multiple()

    @invariant()
    def free_pending_and_owners_are_the_same(self) -> None:
        free = self.pool.free_pages().tolist()
        assert sorted(free) == sorted(self.naive.free)
        assert self.pool.num_free == len(free)
        assert sorted(self.pool.pending_pages().tolist()) == sorted(self.naive.pending)
        assert self.pool.num_pending == len(self.naive.pending)
        assert self.pool.refcounts().tolist() == [self.naive.owners[page] for page in range(NUM_PAGES + 1)]


TestPagesHaveOwners = PagesHaveOwners.TestCase
TestPagesHaveOwners.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@given(
    demands=st.lists(st.dictionaries(st.sampled_from(["full", "window"]), st.integers(0, 5)), max_size=6),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_families_give_all_that_a_step_asks_for_or_nothing(
    demands: list[dict[str, int]], sizes: tuple[int, int]
) -> None:
    families = PageFamilies([(PageFamily("full", 4), sizes[0]), (PageFamily("window", 4, window=8), sizes[1])])
    free = dict(zip(("full", "window"), sizes, strict=True))
    for demand in demands:
        fits = all(need <= free[name] for name, need in demand.items())
        if fits:
            assert {name: len(pages) for name, pages in families.alloc(demand).items()} == demand
            for name, need in demand.items():
                free[name] -= need
        else:
            with pytest.raises(OutOfPages) as refused:
                families.alloc(demand)
            assert refused.value.need > refused.value.free == free[refused.value.family]
        assert {name: pool.num_free for name, pool in families.pools.items()} == free
