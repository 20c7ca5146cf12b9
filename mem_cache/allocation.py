"""Pages and rows for records: four ways in, one way out, and the hand-over to the prefix tree.

Every way in is plan -> check -> commit. A plan is arithmetic on the records; `commit` evicts exactly what the plan
lacks, takes everything or nothing, and only then moves records and rows. What `release` frees is a pure function of
the record. Nobody else frees a row's pages.

    0        protected                     committed            scheduled      allocated
    |  the tree's counts  |  the row's own counts, one for each page of the full family  |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from devices.page_pool import OutOfPages, PageFamilies
from devices.pages import IntArray, ceil_page, floor_page, page_count
from mem_cache.kv_info import LadderError, ReqKvInfo, RowGeometry
from mem_cache.rows import OutOfRows, PageCopy, RowPool
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.prefix_tree import LockReceipt, Match, PrefixTree


@dataclass(frozen=True, slots=True)
class Growth:
    """One record climbs: `start -> target`, both whole pages.

    Attributes:
        start: tokens that have pages already: the row's, or the matched prefix's.
        num_pages: new pages of each family.
        prefix: pages that a record without a row starts from, by family.
        protected: how much of the prefix is the tree's, whole pages.
    """

    record: ReqKvInfo
    start: int
    target: int
    num_pages: int
    prefix: Mapping[str, IntArray]
    protected: int = 0

    @property
    def needs_row(self) -> bool:
        return self.record.req_pool_idx is None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step needs. `num_pages` counts for each family that has a pool."""

    growths: tuple[Growth, ...]
    num_rows: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of a row's tokens `[start, end)`, whole pages of `family`."""

    family: str
    start: int
    end: int


# The four ways in: each only says how far a record must climb. LadderError: further than its row is wide.


def extend(record: ReqKvInfo, seq_len: int, prefix: Mapping[str, IntArray] | None = None) -> Growth:
    """Room for a prefill or chunk that ends at `seq_len`; a record without a row starts from `prefix`."""
    return _growth(record, seq_len, prefix)


def decode(record: ReqKvInfo, num_tokens: int = 1) -> Growth:
    """Room for `num_tokens` behind what is launched; inside a page it needs nothing."""
    return _growth(record, record.kv_scheduled_len + num_tokens, None)


def speculate(record: ReqKvInfo, reserve: int) -> Growth:
    """Room for `reserve` tokens behind what is committed: a draft may write them all and lose them again."""
    return _growth(record, record.kv_committed_len + reserve, None)


def prealloc(record: ReqKvInfo, length: int, prefix: Mapping[str, IntArray] | None = None) -> Growth:
    """Room for `length` tokens that a remote writer will fill; nothing of it is scheduled."""
    return _growth(record, length, prefix)


def _growth(record: ReqKvInfo, length: int, prefix: Mapping[str, IntArray] | None) -> Growth:
    page_size = record.geometry.page_size
    start = record.kv_allocated_len if prefix is None else len(prefix["full"]) * page_size
    target = max(start, ceil_page(length, page_size))
    if target > record.geometry.row_width:
        raise LadderError("reserve", target, record, "target <= row width")
    return Growth(record, start, target, page_count(target - start, page_size), prefix or {}, start)


def plan(growths: Iterable[Growth]) -> Plan:
    """Sum up what the growths take. Pure."""
    items = tuple(growths)
    num_rows = sum(growth.needs_row for growth in items)
    return Plan(items, num_rows, sum(growth.num_pages for growth in items))


def _check_current(wanted: Plan) -> None:
    """A plan is good for the records as they were: each once, each where the plan found it."""
    seen: set[int] = set()
    for growth in wanted.growths:
        record = growth.record
        if id(record) in seen or not (growth.needs_row or record.kv_allocated_len == growth.start):
            raise LadderError("commit of a plan", growth.target, record, "each record once, where the plan found it")
        seen.add(id(record))


def plan_release(record: ReqKvInfo, geometry: RowGeometry) -> tuple[PageRange, ...]:
    """What the row owns, page range by page range; the tree's part and what the window let go are not in it. Pure.

    full     |  tree's  |  free [protected, allocated)                       |
    window   |  tree's  |  free  | gone [dead_lo, cursor) |  free            |
    """
    lo, hi = record.cache_protected_len, record.kv_allocated_len
    dead_lo = record.swa_dead_lo(geometry.page_size)
    ranges: list[PageRange] = []
    for family in geometry.families:
        if family.derived_from is not None:
            continue
        if family.window is None or record.swa_evicted_seqlen <= dead_lo:
            ranges.append(PageRange(family.name, lo, hi))
        else:
            ranges.append(PageRange(family.name, lo, dead_lo))
            ranges.append(PageRange(family.name, record.swa_evicted_seqlen, hi))
    return tuple(r for r in ranges if r.start < r.end)


class KvAllocator:
    """The one place where rows, pages, records and the tree move together.

    Attributes:
        caching: off, nothing is matched and nothing published; everything else is the same.
    """

    def __init__(self, families: PageFamilies, rows: RowPool, tree: PrefixTree, *, caching: bool = True) -> None:
        self.families = families
        self.rows = rows
        self.tree = tree
        self.caching = caching
        self.geometry = rows.geometry
        self._pool_names = tuple(families.pools)
        for name in self._pool_names:
            if families.families[name].tokens_per_page != self.geometry.page_size:
                raise ValueError(f"{families.families[name]}: its pages are not of the row's {self.geometry.page_size}")
        self._copies: list[PageCopy] = []

    @property
    def num_available(self) -> int:
        """Pages of the scarcest family that a plan could get now: free, or the tree's and unlocked."""
        return min(pool.num_free for pool in self.families.pools.values()) + self.tree.num_evictable

    @property
    def num_arriving(self) -> int:
        """Pages that become free without anybody's help: somebody still reads or writes them."""
        return min(pool.num_pending for pool in self.families.pools.values())

    @property
    def num_pages(self) -> int:
        """Pages of the scarcest family, in any hands."""
        return min(pool.num_pages for pool in self.families.pools.values())

    def lacking_pages(self, wanted: Plan) -> int:
        """Pages that the plan needs and that neither the free list nor eviction can give."""
        return max(0, wanted.num_pages - self.num_available)

    def commit(self, wanted: Plan) -> None:
        """Take everything the plan needs and move its records.

        Raises:
            OutOfRows, OutOfPages: something lacks; no page, row, record or tree node was touched. Behind a fence,
                pages evicted for the plan are pending: nothing lacks, OutOfPages means that they arrive later.
            LadderError: a record is not where the plan found it, or is named twice; nothing was touched.
        """
        _check_current(wanted)
        if wanted.num_rows > self.rows.num_free:
            raise OutOfRows(wanted.num_rows, self.rows.num_free)
        if self.lacking_pages(wanted):
            raise OutOfPages(wanted.num_pages, self.num_available)
        if wanted.num_pages == 0 and wanted.num_rows == 0:
            return
        free = min(pool.num_free for pool in self.families.pools.values())
        if wanted.num_pages > free + self.num_arriving:
            self.tree.evict(wanted.num_pages - free - self.num_arriving)
        taken = self.families.alloc(dict.fromkeys(self._pool_names, wanted.num_pages))
        first = 0
        for growth in wanted.growths:
            last = first + growth.num_pages
            if last > first or growth.needs_row:
                self._grow(growth, {name: pages[first:last] for name, pages in taken.items()})
            first = last

    def _grow(self, growth: Growth, pages: Mapping[str, IntArray]) -> None:
        record, start = growth.record, growth.start
        if growth.needs_row:
            record.bind(self.rows.alloc())
            for family, prefix in growth.prefix.items():
                self.rows.write(family, record.row, 0, prefix)
            record.adopt(growth.protected)
        if growth.num_pages:
            for family, new in pages.items():
                self.rows.write(family, record.row, page_count(start, self.geometry.page_size), new)
        record.reserve(growth.target)

    def match(self, tokens: IntArray, namespace: Namespace) -> Match:
        """The longest prefix of `tokens` that the tree has, whole pages, at most `len - 1`: one must be computed."""
        if not self.caching:
            return Match((), 0)
        return self.tree.match(PrefixKey(tokens[:-1], self.geometry.page_size, namespace))

    def publish(
        self, record: ReqKvInfo, tokens: IntArray, namespace: Namespace, lock: LockReceipt, priority: int = 0
    ) -> LockReceipt:
        """Give the tree the committed whole pages of a row, and keep them locked. Frees nothing but duplicates.

            0        protected           known              end                committed
            |  tree's   |  duplicates     |  becomes the tree's  |  stays the row's |
                           row repointed, then freed

        Args:
            tokens: ids of the row's tokens, int32, at least `committed` of them.
            lock: what protects `[0, protected)`; it is given back.
        Returns:
            The receipt that protects `[0, end)`.
        """
        if not self.caching:
            return lock
        page_size = self.geometry.page_size
        key = PrefixKey(tokens[: record.kv_committed_len], page_size, namespace)
        end, protected = key.num_pages * page_size, record.cache_protected_len
        if end <= protected:
            return lock
        own = {name: self.rows.pages(name, record.row, 0, end) for name in self._pool_names}
        inserted = self.tree.insert(key, own, priority)
        new_lock = self.tree.lock(inserted.end)
        first, known = page_count(protected, page_size), inserted.num_known
        for name in self._pool_names if known > first else ():
            self.rows.write(name, record.row, first, self.tree.pages(new_lock, name)[first:known])
            self.families.pools[name].release(own[name][first:known])
        record.protect(end)
        self.tree.unlock(lock)
        return new_lock

    def fork(self, parent: ReqKvInfo, lock: LockReceipt, child: ReqKvInfo, length: int) -> LockReceipt:
        """Let an empty record start from `[0, length)` of another's row; the other is not touched.

            0        protected          floor(length)       length
            |  tree's   |  shared, one count more  |  copied page  |

        The copy of the partial last page is part of the next step (`take_copies`). Nothing is computed again.

        Args:
            lock: what protects the parent's prefix.
            length: at most what the parent has committed.
        Returns:
            The child's own receipt.
        Raises:
            OutOfRows, OutOfPages: nothing changed.
            LadderError: the parent has not committed so much.
        """
        if not 0 < length <= parent.kv_committed_len:
            raise LadderError("fork", length, parent, "0 < length <= committed")
        page_size = self.geometry.page_size
        shared = floor_page(length, page_size)
        protected = min(parent.cache_protected_len, shared)
        pages = {name: self.rows.pages(name, parent.row, 0, ceil_page(length, page_size)) for name in self._pool_names}
        in_tree, whole = page_count(protected, page_size), page_count(shared, page_size)
        growth = extend(child, length, {name: ids[:whole] for name, ids in pages.items()})
        self.commit(plan([replace(growth, protected=protected)]))
        for name, ids in pages.items():
            self.families.pools[name].retain(ids[in_tree:whole])
            if length > shared:
                new = int(self.rows.pages(name, child.row, shared, shared + page_size)[0])
                self._copies.append(PageCopy(name, int(ids[whole]), new))
        child.schedule(length)
        child.commit(length)
        return self.tree.lock_again(lock, in_tree)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies that the next step must make first, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def release(self, record: ReqKvInfo, lock: LockReceipt | None) -> None:
        """The one way out: the row's own pages, its row and its lock go back, the record is empty.

        A record without a row has nothing to give back; a receipt goes back once (LockError).
        """
        if record.req_pool_idx is not None:
            for part in plan_release(record, self.geometry):
                pages = self.rows.pages(part.family, record.row, part.start, part.end)
                self.families.pools[part.family].release(pages)
            self.rows.free(record.row)
            record.mark_released()
        if lock is not None:
            self.tree.unlock(lock)
