"""Parts of an engine that count, while they work, what a checker cannot see from outside afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from devices.page_pool import OutOfPages, PageFamilies
from devices.pages import IntArray
from mem_cache.allocation import KvAllocator
from mem_cache.growth import Plan
from mem_cache.holding import Holding, IdleRows
from mem_cache.kv_info import ReqKvInfo
from mem_cache.tree.prefix_tree import PrefixTree


class WatchedTree(PrefixTree):
    """Counts what it lets go.

    Attributes:
        num_evicted: pages since the start, of any family; `num_evicted_for_one`: of each since the last allocation.
    """

    num_evicted: int = 0
    num_evicted_for_one: Counter[str]

    def evict(self, num_pages: int) -> int:
        before = self.num_evictable
        gone = super().evict(num_pages)
        self._count("full", before - self.num_evictable)
        return gone

    def evict_family(self, family: str, num_pages: int) -> int:
        gone = super().evict_family(family, num_pages)
        self._count(family, gone)
        return gone

    def _count(self, family: str, num_pages: int) -> None:
        self.num_evicted += num_pages
        self.num_evicted_for_one[family] += num_pages


class RationedFamilies(PageFamilies):
    """Pools whose n-th allocation from now fails although there are pages.

    Attributes:
        fails_in: successful allocations until then; None: none fails.
        has_failed: one failed in this step.
        tree: who makes room before an allocation.
        num_excess: pages that it let go and no allocation needed.
        num_evicted: pages of families beside "full" that went alone; their prefixes stayed.
    """

    fails_in: int | None = None
    has_failed: bool = False
    tree: WatchedTree
    num_excess: int = 0
    num_evicted: int = 0

    def alloc(self, demand: Mapping[str, int]) -> dict[str, IntArray]:
        evicted, self.tree.num_evicted_for_one = self.tree.num_evicted_for_one, Counter()
        self.num_evicted += sum(evicted.values()) - evicted["full"]
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in, self.has_failed = None, True
                raise OutOfPages(demand["full"], self.pools["full"].num_free)
        for name in [name for name, num_pages in evicted.items() if num_pages]:
            pool = self.pools[name]
            self.num_excess += max(0, pool.num_free + pool.num_pending - demand[name])
        return super().alloc(demand)


class WatchedAllocator(KvAllocator):
    """Counts rows that gave way although nothing lacked any more.

    Attributes:
        is_short: whether what it makes room for still lacks something; None while it makes none.
        num_wasted: rows that gave way all the same; `demoted`: all that gave way, until somebody clears it.
        num_scarcer: plans that lacked more pages of another family than of the full one.
    """

    is_short: Callable[[], bool] | None = None
    num_wasted: int = 0
    demoted: list[Holding]
    num_scarcer: int = 0

    def lacking_pages(self, wanted: Plan) -> int:
        lacking = super().lacking_pages(wanted)
        self.num_scarcer += lacking > self.lacking(wanted.num_pages)
        return lacking

    def _make_room(self, num_rows: int, demand: Mapping[str, int]) -> None:
        self.is_short = lambda: num_rows > self.rows.num_free or self._is_short(demand)
        super()._make_room(num_rows, demand)
        self.is_short = None

    def unshare_tail(self, record: ReqKvInfo) -> None:
        self.is_short = lambda: self.shares_tail(record)
        super().unshare_tail(record)
        self.is_short = None


class WatchedIdle:
    """Idle rows, in the hands of their owner."""

    def __init__(self, owner: IdleRows, allocator: WatchedAllocator) -> None:
        self._owner = owner
        self._allocator = allocator
        allocator.demoted = []

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._owner)

    def demote(self, holding: Holding) -> None:
        allocator = self._allocator
        allocator.num_wasted += allocator.is_short is None or not allocator.is_short()
        allocator.demoted.append(holding)
        self._owner.demote(holding)
