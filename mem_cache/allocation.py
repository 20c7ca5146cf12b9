"""Pages and rows for records: four ways in, one way out, and the hand-over to the prefix tree.

Every way in is plan -> check -> commit. A plan is arithmetic on the records; `commit` evicts exactly what the plan
lacks, takes everything or nothing, and only then moves records and rows. What `release` frees is a pure function of
the record. Nobody else frees a row's pages.

    0        protected                     committed            scheduled      allocated
    |  the tree's counts  |  the row's own counts, one for each page of the full family  |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from devices.page_pool import OutOfPages, PageFamilies
from devices.pages import IntArray, ceil_page, floor_page, is_whole_pages, page_count
from mem_cache.kv_info import LadderError, ReqKvInfo, RowGeometry
from mem_cache.rows import OutOfRows, PageCopy, RowPool
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.misses import MissReason
from mem_cache.tree.prefix_tree import LockReceipt, Match, PrefixTree


@dataclass(slots=True, eq=False)
class Holding:
    """What a request or a session holds of the KV: a record, and the receipt that protects the record's prefix.

    A session lends the very same object to its running turn.
    """

    record: ReqKvInfo
    lock: LockReceipt | None = None


class IdleRows(Protocol):
    """Rows that nobody computes on; they give way when pages or rows are short."""

    def __iter__(self) -> Iterator[Holding]:
        """Those that hold a row, least worth keeping first."""
        ...

    def demote(self, holding: Holding) -> None:
        """Leave the row's whole pages to the tree and give the row back."""
        ...


class NoIdleRows:
    """An engine without sessions."""

    def __iter__(self) -> Iterator[Holding]:
        return iter(())

    def demote(self, holding: Holding) -> None:
        raise AssertionError(f"{holding.record} is not idle")


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


class PageRange(NamedTuple):
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
    ranges: list[PageRange] = []
    for family in geometry.families:
        if family.derived_from is not None:
            continue
        if family.window is None or record.swa_evicted_seqlen <= (dead_lo := record.swa_dead_lo(geometry.page_size)):
            ranges.append(PageRange(family.name, lo, hi))
        else:
            ranges.append(PageRange(family.name, lo, dead_lo))
            ranges.append(PageRange(family.name, record.swa_evicted_seqlen, hi))
    return tuple([part for part in ranges if part.start < part.end])


class KvAllocator:
    """The one place where rows, pages, records and the tree move together.

    Attributes:
        caching: off, nothing is matched and nothing published; everything else is the same.
        idle: rows that give way when neither free pages nor the tree's are enough.
    """

    def __init__(self, families: PageFamilies, rows: RowPool, tree: PrefixTree, *, caching: bool = True) -> None:
        self.families = families
        self.rows = rows
        self.tree = tree
        self.caching = caching
        self.geometry = rows.geometry
        self.idle: IdleRows = NoIdleRows()
        self._pool_names = tuple(families.pools)
        self._pools = tuple(families.pools.values())
        for name in self._pool_names:
            if families.families[name].tokens_per_page != self.geometry.page_size:
                raise ValueError(f"{families.families[name]}: its pages are not of the row's {self.geometry.page_size}")
        self._copies: list[PageCopy] = []

    @property
    def num_available(self) -> int:
        """Pages of the scarcest family that a plan could get now: free, or the tree's and unlocked."""
        return min([pool.num_free for pool in self._pools]) + self.tree.num_evictable

    @property
    def num_arriving(self) -> int:
        """Pages that become free without anybody's help: somebody still reads or writes them."""
        return min([pool.num_pending for pool in self._pools])

    @property
    def num_pages(self) -> int:
        """Pages of the scarcest family, in any hands."""
        return min([pool.num_pages for pool in self._pools])

    @property
    def num_reclaimable(self) -> int:
        """Pages that `num_available` would gain if every idle row gave way: what only idle rows hold or lock."""
        idle = list(self.idle)
        if not idle:
            return 0
        unlocked = self.tree.num_pages_behind([holding.lock for holding in idle if holding.lock is not None])
        return unlocked + min(self.num_held_only_by(idle, name) for name in self._pool_names)

    def num_held_only_by(self, holdings: Iterable[Holding], family: str = "full") -> int:
        """Pages of a family whose every count is one of these rows'."""
        own = [
            self.rows.pages(family, holding.record.row, part.start, part.end)
            for holding in holdings
            for part in plan_release(holding.record, self.geometry)
            if part.family == family
        ]
        if not own:
            return 0
        pages, counts = np.unique(np.concatenate(own), return_counts=True)
        return int((self.families.pools[family].refcounts()[pages] == counts).sum())

    def lacking(self, num_pages: int) -> int:
        """How many of `num_pages` neither the free list nor eviction nor idle rows can give."""
        lacking = num_pages - self.num_available
        return max(0, lacking - self.num_reclaimable) if lacking > 0 else 0

    def lacking_pages(self, wanted: Plan) -> int:
        """Pages that the plan needs and that cannot be had."""
        return self.lacking(wanted.num_pages)

    def has_row(self) -> bool:
        """Whether a record without a row could get one."""
        return self.rows.num_free > 0 or next(iter(self.idle), None) is not None

    def commit(self, wanted: Plan) -> None:
        """Take everything the plan needs and move its records.

        Raises:
            OutOfRows, OutOfPages: something lacks; no page, row, record or tree node was touched. Behind a fence,
                pages evicted for the plan are pending: nothing lacks, OutOfPages means that they arrive later.
            LadderError: a record is not where the plan found it, or is named twice; nothing was touched.
        """
        _check_current(wanted)
        if wanted.num_rows > self.rows.num_free and wanted.num_rows > self.rows.num_free + len(list(self.idle)):
            raise OutOfRows(wanted.num_rows, self.rows.num_free)
        if self.lacking_pages(wanted):
            raise OutOfPages(wanted.num_pages, self.num_available)
        if wanted.num_pages == 0 and wanted.num_rows == 0:
            return
        self._make_room(wanted.num_rows, wanted.num_pages)
        taken = self.families.alloc(dict.fromkeys(self._pool_names, wanted.num_pages))
        first = 0
        for growth in wanted.growths:
            last = first + growth.num_pages
            if last > first or growth.needs_row:
                self._grow(growth, {name: pages[first:last] for name, pages in taken.items()})
            first = last

    def _make_room(self, num_rows: int, num_pages: int) -> None:
        """Let idle rows go until the tree and the free list can give what is wanted; then evict exactly the rest."""
        if num_rows > self.rows.num_free or num_pages > self.num_available + self.num_arriving:
            for holding in list(self.idle):
                self.idle.demote(holding)
                if num_rows <= self.rows.num_free and num_pages <= self.num_available + self.num_arriving:
                    break
        free = min([pool.num_free for pool in self._pools])
        if num_pages > free + self.num_arriving:
            self.tree.evict(num_pages - free - self.num_arriving)

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

    def miss_reason(self, tokens: IntArray, namespace: Namespace, match: Match) -> MissReason | None:
        """Why a `match` of these tokens is shorter than it could be; None when it is not."""
        if not self.caching:
            return "disabled"
        key = PrefixKey(tokens[:-1], self.geometry.page_size, namespace)
        return self.tree.why_shorter(key, match) if key.num_pages else "below_page"

    def publish(
        self, record: ReqKvInfo, tokens: IntArray, namespace: Namespace, lock: LockReceipt, priority: int = 0
    ) -> LockReceipt:
        """Give the tree the committed whole pages of a row, and keep them locked. Frees nothing but duplicates.

            0        protected           known              end                committed
            |  tree's   |  duplicates     |  becomes the tree's  |  stays the row's |
                           row repointed, then freed

        Args:
            tokens: ids of the row's tokens, int32; those behind `committed` are left alone.
            lock: what protects `[0, protected)`; it is given back.
        Returns:
            The receipt that protects `[0, end)`.
        """
        if not self.caching:
            return lock
        page_size = self.geometry.page_size
        key = PrefixKey(tokens[: self._publishable_len(record, tokens, namespace)], page_size, namespace)
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

    def _publishable_len(self, record: ReqKvInfo, tokens: IntArray, namespace: Namespace) -> int:
        """How much of the committed part the tree may take: it stops at a page that another row holds as well.

        So a page of the tree has no other count, and evicting it always frees it. The other row publishes it later.
        """
        page_size, lo = self.geometry.page_size, record.cache_protected_len
        length = min(record.kv_committed_len, len(tokens))
        end = floor_page(length, page_size)
        for name in self._pool_names if end > lo else ():
            shared = self.families.pools[name].refcounts()[self.rows.pages(name, record.row, lo, end)] > 1
            if shared.any():
                known = self.tree.match(PrefixKey(tokens[:end], page_size, namespace)).num_pages
                first = page_count(lo, page_size)
                ours = np.flatnonzero(shared[max(0, known - first) :])
                if len(ours):
                    end = (max(known, first) + int(ours[0])) * page_size
        return end

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

    def trim(self, record: ReqKvInfo) -> None:
        """Give back the pages behind what is scheduled.

        0        protected     scheduled   ceil(scheduled)     allocated
        |  tree's   |   readable   |  kept     |      given back     |
        """
        end, allocated = ceil_page(record.kv_scheduled_len, self.geometry.page_size), record.kv_allocated_len
        if end == allocated:
            return
        for name in self._pool_names:
            self.families.pools[name].release(self.rows.pages(name, record.row, end, allocated))
        record.reserve(end)

    def shares_tail(self, record: ReqKvInfo) -> bool:
        """Whether the page that the row writes next holds readable tokens and is another row's, or the tree's, too."""
        end, page_size = record.kv_scheduled_len, self.geometry.page_size
        if record.req_pool_idx is None or is_whole_pages(end, page_size):
            return False
        lo, hi = floor_page(end, page_size), ceil_page(end, page_size)
        return any(
            (self.families.pools[name].refcounts()[self.rows.pages(name, record.row, lo, hi)] > 1).any()
            for name in self._pool_names
        )

    def unshare_tail(self, record: ReqKvInfo) -> None:
        """Let idle rows go until none shares the page that the row writes next: then it needs no copy of its own."""
        for holding in list(self.idle):
            if not self.shares_tail(record):
                return
            self.idle.demote(holding)

    def own_tail(self, record: ReqKvInfo) -> None:
        """Replace a shared page that the row is about to write by a copy, which the next step makes first.

        A rewind may end inside a page that a fork shares: written in place, it would change the other row.

        Raises OutOfPages: nothing changed.
        """
        if not self.shares_tail(record):
            return
        if self.lacking(1):
            raise OutOfPages(1, self.num_available)
        self._make_room(0, 1)
        taken = self.families.alloc(dict.fromkeys(self._pool_names, 1))
        page_size = self.geometry.page_size
        lo = floor_page(record.kv_scheduled_len, page_size)
        for name, new in taken.items():
            old = self.rows.pages(name, record.row, lo, lo + page_size)
            self._copies.append(PageCopy(name, int(old[0]), int(new[0])))
            self.rows.write(name, record.row, page_count(lo, page_size), new)
            self.families.pools[name].release(old)

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
