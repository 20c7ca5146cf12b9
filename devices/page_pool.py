"""Physical pages of one device: who may hand one out, how many owners it has, and when it is free again.

Page ids are host facts: a numpy free list with a reference count beside it, so nothing here waits for a device.
Page 0 is the padding page: it is never handed out and its content never reaches a result. A page whose last owner let
go while a launched step (or a remote writer) may still touch it is *pending*: it is not free, but it is arriving.
`PageFamilies` takes pages of several kinds in one transaction. Who owns a page and why is `mem_cache`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from devices.pages import IntArray

PADDING_PAGE = 0

FEW = 40
"""So many numbers are looked at faster one by one than as an array."""


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken.

    Attributes:
        family, need, free: which kind of page, how many were asked for, how many there were.
    """

    def __init__(self, need: int, free: int, family: str = "full") -> None:
        self.need, self.free, self.family = need, free, family
        super().__init__(f"{need} pages of family {family!r} were asked for, {free} are free")


class PageError(Exception):
    """A page was used against its reference count: a bug in the caller, never a shortage."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A promise that somebody may touch pages until it is lifted (a launched step, a remote writer)."""

    serial: int
    why: str


@dataclass(slots=True)
class _PendingPages:
    """Pages without an owner that wait for the fences which were up when they were released."""

    pages: IntArray
    waits_for: set[int]


class PagePool:
    """Free list and reference counts of `num_pages` pages, ids `1 .. num_pages`.

    Attributes:
        on_free: told of pages the moment they become free, behind the last fence; a simulation spoils them then.
    """

    def __init__(self, num_pages: int, family: str = "full") -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: a pool needs at least one page")
        self.family = family
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages + 1, dtype=np.int32)
        # For each page its place in the last release of many: where a place is lost, a page was named twice.
        self._marks = np.zeros(num_pages + 1, dtype=np.int32)
        # A stack whose top is the lowest id: pages just released are used again while they are warm.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages
        self._fences: dict[int, Fence] = {}
        self._next_fence = 0
        self._pending: list[_PendingPages] = []
        self.on_free: Callable[[IntArray], None] | None = None

    @property
    def num_pending(self) -> int:
        """Pages that become free when the fences they wait for are lifted."""
        return sum([len(batch.pages) for batch in self._pending])

    def alloc(self, n: int) -> IntArray:
        """Take `n` pages with one owner each, int32 [n].

        Raises:
            OutOfPages: fewer than `n` are free; nothing is taken.
            PageError: `n` is negative; it would give a page that has an owner back.
        """
        if n < 0:
            raise PageError(f"alloc of {n} pages of family {self.family!r}")
        if n > self.num_free:
            raise OutOfPages(n, self.num_free, self.family)
        pages = self._stack[self.num_free - n : self.num_free][::-1].copy()
        self.num_free -= n
        self._refs[pages] = 1
        return pages

    def retain(self, pages: IntArray) -> None:
        """Add one owner to each page. Raises PageError, changing nothing, if one of them has no owner."""
        if len(pages) == 0:
            return
        places = pages.astype(np.intp)
        self._owners_of(places, "retain")
        np.add.at(self._refs, places, 1)

    def release(self, pages: IntArray) -> None:
        """Drop one owner of each page; a page without owners is free, or pending while a fence is up.

        Raises:
            PageError: a page has no owner, is named twice in one call, or is the padding page; nothing changes.
        """
        if len(pages) == 0:
            return
        places = pages.astype(np.intp)
        owners, most = self._owners_of(places, "release")
        if self._names_twice(places):
            raise PageError(f"release names a page twice: {pages.tolist()[:16]}")
        ownerless = pages
        if most > 1:
            ownerless = pages[owners == 1]
        self._refs[places] = owners - 1
        if len(ownerless) == 0:
            return
        if self._fences:
            self._pending.append(_PendingPages(ownerless.copy(), set(self._fences)))
        else:
            self._push_free(ownerless)

    def fence(self, why: str) -> Fence:
        """Put up a fence: until it is lifted, released pages are pending instead of free."""
        fence = Fence(self._next_fence, why)
        self._next_fence += 1
        self._fences[fence.serial] = fence
        return fence

    def lift(self, fence: Fence) -> None:
        """Take a fence down; pages that waited for it alone become free. Raises PageError when it is not up."""
        if self._fences.get(fence.serial) is not fence:
            raise PageError(f"fence {fence.serial} ({fence.why}) is not up here")
        del self._fences[fence.serial]
        waiting = []
        for batch in self._pending:
            batch.waits_for.discard(fence.serial)
            if batch.waits_for:
                waiting.append(batch)
            else:
                self._push_free(batch.pages)
        self._pending = waiting

    def owners(self, pages: IntArray) -> IntArray:
        """How many each page has, int32 [n]."""
        owners: IntArray = self._refs[pages]
        return owners

    # Views for the audit: copies, so that looking never changes anything.

    def refcounts(self) -> IntArray:
        """Owners of each page, int32 [num_pages + 1]; index is the page id."""
        return self._refs.copy()

    def free_pages(self) -> IntArray:
        return self._stack[: self.num_free].copy()

    def pending_pages(self) -> IntArray:
        parts = [batch.pages for batch in self._pending]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def _push_free(self, pages: IntArray) -> None:
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)
        if self.on_free is not None:
            self.on_free(pages)

    def _owners_of(self, pages: npt.NDArray[np.intp], verb: str) -> tuple[IntArray, int]:
        """Owners of each page, a copy, and the most that one has. Raises PageError when one has none."""
        least, largest = _bounds(pages)
        if not 0 < least <= largest <= self.num_pages:
            raise PageError(f"{verb} of page {pages.tolist()[:16]}: ids are 1..{self.num_pages}")
        owners: IntArray = self._refs[pages]
        fewest, most = _bounds(owners)
        if fewest < 1:
            ownerless = pages[owners < 1].tolist()
            raise PageError(f"{verb} of pages {ownerless[:16]} of family {self.family!r}: they have no owner")
        return owners, most

    def _names_twice(self, pages: npt.NDArray[np.intp]) -> bool:
        if len(pages) <= FEW:
            return len(set(pages.tolist())) < len(pages)
        order = np.arange(len(pages), dtype=np.int32)
        self._marks[pages] = order
        return bool((self._marks[pages] != order).any())


def _bounds(numbers: npt.NDArray[Any]) -> tuple[int, int]:
    """The least and the largest."""
    if len(numbers) <= FEW:
        few = numbers.tolist()
        return min(few), max(few)
    return int(np.minimum.reduce(numbers)), int(np.maximum.reduce(numbers))


@dataclass(frozen=True, slots=True)
class PageFamily:
    """Geometry of one kind of page of a row.

    Attributes:
        name: "full" is the kind that every token has.
        tokens_per_page: how many of the row's tokens one page stands for.
        window: tokens behind the newest one that are still read; None reads everything.
        derived_from: name of the family whose page ids it shares (it has no pool of its own), or None.
        ratio: tokens that one entry of a page stands for; 1 unless the cache is compressed.
    """

    name: str
    tokens_per_page: int
    window: int | None = None
    derived_from: str | None = None
    ratio: int = 1

    @property
    def entries_per_page(self) -> int:
        return self.tokens_per_page // self.ratio


class PageFamilies:
    """The pools of all families of a device; one `alloc` takes pages of every kind, or none of any."""

    def __init__(self, families: Iterable[tuple[PageFamily, int]]) -> None:
        self.families: dict[str, PageFamily] = {}
        self.pools: dict[str, PagePool] = {}
        for family, num_pages in families:
            self.families[family.name] = family
            if family.derived_from is None:
                self.pools[family.name] = PagePool(num_pages, family.name)

    def alloc(self, demand: Mapping[str, int]) -> dict[str, IntArray]:
        """Take `demand[family]` pages of each family.

        Raises:
            OutOfPages: one family is short; nothing is taken from any.
        """
        for name, need in demand.items():
            if need > self.pools[name].num_free:
                raise OutOfPages(need, self.pools[name].num_free, name)
        taken: dict[str, IntArray] = {}
        try:
            for name, need in demand.items():
                taken[name] = self.pools[name].alloc(need)
        except BaseException:
            self.release(taken)
            raise
        return taken

    def retain(self, pages: Mapping[str, IntArray]) -> None:
        """Add one owner to each page of each family, or to none: PageError when one of them has no owner."""
        done: dict[str, IntArray] = {}
        try:
            for name, ids in pages.items():
                self.pools[name].retain(ids)
                done[name] = ids
        except BaseException:
            self.release(done)
            raise

    def release(self, taken: Mapping[str, IntArray]) -> None:
        """Drop one owner of each page of each family."""
        for name, pages in taken.items():
            self.pools[name].release(pages)

    def fence(self, why: str) -> dict[str, Fence]:
        return {name: pool.fence(why) for name, pool in self.pools.items()}

    def lift(self, fences: Mapping[str, Fence]) -> None:
        for name, fence in fences.items():
            self.pools[name].lift(fence)
