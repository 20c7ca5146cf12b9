"""Pages and rows for records: one way in, one way out, and the hand-over to the prefix tree.

The way in is plan -> check -> commit. A plan (`growth.py`) is arithmetic on the records; `commit` evicts exactly what
the plan lacks, takes pages of every family and rows, and then moves the records; wherever that fails, everything goes
back. What `release` frees is a pure function of the record. Nobody else frees a row's pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from devices.page_pool import PADDING_PAGE, OutOfPages, PageFamilies, PageFamily
from devices.pages import IntArray, ceil_page, floor_page, is_whole_pages, page_count, window_start
from mem_cache import coarse
from mem_cache.growth import NO_PREFIX, Growth, Plan, check_current, grow, plan, plan_release
from mem_cache.holding import Holding, IdleRows, NoIdleRows
from mem_cache.kv_info import LadderError, ReqKvInfo
from mem_cache.rows import OutOfRows, PageCopy, RowPool
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.misses import MissReason
from mem_cache.tree.prefix_tree import NO_PAGES, LockReceipt, Match, PrefixTree


class KvAllocator:
    """The one place where rows, pages, records and the tree move together.

    Attributes:
        caching: off, nothing is matched and nothing published; everything else is the same.
        has_window: whether rows have a family whose pages `slide_window` gives back.
        idle: rows that give way when neither free pages nor the tree's are enough.
    """

    def __init__(self, families: PageFamilies, rows: RowPool, tree: PrefixTree, *, caching: bool = True) -> None:
        self.families = families
        self.rows = rows
        self.tree = tree
        self.caching = caching
        self.geometry = rows.geometry
        self.idle: IdleRows = NoIdleRows()
        owned = [family for family in self.geometry.families if family.derived_from is None]
        if set(families.pools) != {family.name for family in owned} or owned[0].name != "full":
            raise ValueError(f"the pools are {list(families.pools)}, a row's families {[f.name for f in owned]}")
        self._own = tuple(owned)
        self._full = families.pools["full"]
        self._paged = tuple(family.name for family in owned if not self.geometry.is_coarse(family))
        self._coarse = tuple(family for family in owned if self.geometry.is_coarse(family))
        self._windowed = tuple(family for family in owned if family.window is not None)
        self.has_window = len(self._windowed) > 0
        self._copies: list[PageCopy] = []

    @property
    def num_available(self) -> int:
        """Full pages that a plan could get now: free, or the tree's and unlocked.

        Pools of the other families are made large enough to be never the scarcer ones (`sizing.py`); `lacking_pages`
        looks at all of them.
        """
        return self._full.num_free + self.tree.num_evictable

    @property
    def num_arriving(self) -> int:
        """Full pages that become free without anybody's help: somebody still reads or writes them."""
        return self._full.num_pending

    @property
    def num_pages(self) -> int:
        """Full pages, in any hands."""
        return self._full.num_pages

    @property
    def num_reclaimable(self) -> int:
        """Pages that `num_available` would gain if every idle row gave way: what only idle rows hold or lock."""
        idle = list(self.idle)
        if not idle:
            return 0
        unlocked = self.tree.num_pages_behind([holding.lock for holding in idle if holding.lock is not None])
        return unlocked + self.num_held_only_by(idle)

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
        return int((self.families.pools[family].owners(pages) == counts).sum())

    def lacking(self, num_pages: int) -> int:
        """How many of `num_pages` neither the free list nor eviction nor idle rows can give."""
        lacking = num_pages - self.num_available
        return max(0, lacking - self.num_reclaimable) if lacking > 0 else 0

    def lacking_pages(self, wanted: Plan) -> int:
        """Pages that the plan needs and that cannot be had: of the full family, or of another if that is worse."""
        if not wanted.growths:
            return 0
        others = [self._lacking_of(name, need) for name, need in self._demand(wanted).items() if name != "full"]
        return max([self.lacking(wanted.num_pages), *others])

    def _lacking_of(self, family: str, num_pages: int) -> int:
        """How many pages of a family neither the pool, nor a fence, nor the tree, nor idle rows can give."""
        pool = self.families.pools[family]
        lacking = num_pages - pool.num_free - pool.num_pending
        if lacking <= 0:
            return 0
        idle = list(self.idle)
        locks = [holding.lock for holding in idle if holding.lock is not None]
        given_up = self.tree.num_evictable_of(family, locks) + self.num_held_only_by(idle, family)
        return max(0, lacking - given_up)

    def _demand(self, wanted: Plan) -> dict[str, int]:
        demand = dict.fromkeys(self._paged, wanted.num_pages)
        for family in self._coarse:
            demand[family.name] = wanted.num_coarse.get(family.name, 0)
        return demand

    def has_row(self) -> bool:
        """Whether a record without a row could get one."""
        return self.rows.num_free > 0 or next(iter(self.idle), None) is not None

    def commit(self, wanted: Plan) -> None:
        """Take everything the plan needs and move its records.

        Raises:
            OutOfRows, OutOfPages: something lacks; no page, row, record or tree node was touched. Behind a fence,
                pages evicted for the plan are pending: nothing lacks, OutOfPages means that they arrive later.
            LadderError: a record is not where the plan found it, or is named twice; nothing was touched.
            Anything else that goes wrong on the way: pages and rows went back, records are where they were.
        """
        if not wanted.growths:
            return
        check_current(wanted)
        if wanted.num_rows > self.rows.num_free and wanted.num_rows > self.rows.num_free + len(list(self.idle)):
            raise OutOfRows(wanted.num_rows, self.rows.num_free)
        if self.lacking_pages(wanted):
            raise OutOfPages(wanted.num_pages, self.num_available)
        if wanted.num_pages == 0 and wanted.num_rows == 0:
            return
        demand = self._demand(wanted)
        self._make_room(wanted.num_rows, demand)
        taken = self.families.alloc(demand)
        undo: list[tuple[Growth, Mapping[str, IntArray]]] = []
        num_copies = len(self._copies)
        try:
            first = 0
            first_coarse = dict.fromkeys(wanted.num_coarse, 0)
            for growth in wanted.growths:
                if not growth.num_pages and not growth.needs_row:
                    continue
                end = first + growth.num_pages
                new = {name: taken[name][first:end] for name in self._paged}
                first = end
                for family in self._coarse:
                    name, at = family.name, first_coarse.get(family.name, 0)
                    first_coarse[name] = at + growth.num_coarse.get(name, 0)
                    new[name] = taken[name][at : first_coarse[name]]
                has_entries = self._coarse and not growth.needs_row
                undo.append((growth, coarse.entries(self.rows, self._coarse, growth) if has_entries else NO_PREFIX))
                self._grow(growth, new)
        except BaseException:
            for growth, before in undo:
                self._shrink(growth, before)
            del self._copies[num_copies:]
            self.families.release(taken)
            raise

    def _make_room(self, num_rows: int, demand: Mapping[str, int]) -> None:
        """Let idle rows go until the tree and the free list can give what is wanted; then evict exactly the rest."""
        num_pages = demand["full"]
        if num_rows > self.rows.num_free or self._is_short(demand):
            for holding in list(self.idle):
                self.idle.demote(holding)
                if num_rows <= self.rows.num_free and not self._is_short(demand):
                    break
        free = self._full.num_free
        if num_pages > free + self.num_arriving:
            self.tree.evict(num_pages - free - self.num_arriving)
        for name in [name for name in demand if name != "full"]:
            pool = self.families.pools[name]
            if demand[name] > pool.num_free + pool.num_pending:
                self.tree.evict_family(name, demand[name] - pool.num_free - pool.num_pending)

    def _is_short(self, demand: Mapping[str, int]) -> bool:
        """Whether a family has fewer pages than wanted: free, arriving, or the tree's and not needed by a lock."""
        if demand["full"] > self.num_available + self.num_arriving:
            return True
        for name in [name for name in demand if name != "full"]:
            pool = self.families.pools[name]
            lacking = demand[name] - pool.num_free - pool.num_pending
            if lacking > 0 and lacking > self.tree.num_evictable_of(name):
                return True
        return False

    def _grow(self, growth: Growth, pages: Mapping[str, IntArray]) -> None:
        record, start = growth.record, growth.start
        if growth.needs_row:
            self._bind(record)
            for name in self._paged if growth.prefix else ():
                self.rows.write(name, record.row, 0, growth.prefix[name])
            record.adopt(growth.protected, growth.swa_evicted)
        if growth.num_pages:
            for name in self._paged:
                self.rows.write(name, record.row, page_count(start, self.geometry.page_size), pages[name])
        for family in self._coarse:
            self._copies += coarse.grow(self.rows, family, growth, pages[family.name])
        record.reserve(growth.target)

    def _bind(self, record: ReqKvInfo) -> None:
        row = self.rows.alloc()
        try:
            record.bind(row)
        except BaseException:
            self.rows.free(row)
            raise

    def _shrink(self, growth: Growth, before: Mapping[str, IntArray]) -> None:
        """Undo `_grow`, however far it came; `before`: what the coarse tables of a row that was there named."""
        record, row = growth.record, growth.record.req_pool_idx
        if row is None:
            return
        if growth.needs_row:
            self.rows.free(row)
            record.mark_released()
            return
        for name in self._paged:
            unnamed = np.full(growth.num_pages, PADDING_PAGE, dtype=np.int32)
            self.rows.write(name, row, page_count(growth.start, self.geometry.page_size), unnamed)
        coarse.restore(self.rows, self._coarse, growth, before)
        if record.kv_allocated_len == growth.target:
            record.reserve(growth.start)

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
        inserted = self.tree.insert(key, self._held(record.row, end), priority)
        new_lock = self.tree.lock(inserted.end)
        first, known = page_count(protected, page_size), inserted.num_known
        for name in self._paged if known > first else ():
            own = self.rows.pages(name, record.row, protected, known * page_size)
            trees = np.where(own == PADDING_PAGE, own, self.tree.pages(new_lock, name)[first:known])
            self.rows.write(name, record.row, first, trees)
            self.families.pools[name].release(own[own != trees])
        for family in self._coarse:
            given_up = coarse.give_up(self.rows, family, record, end, self.tree.row_pages(new_lock)[family.name])
            self.families.pools[family.name].release(given_up)
        record.protect(end)
        self.slide_window(record)  # the new lock keeps one window: what the row names before that is not its any more
        self.tree.unlock(lock)
        return new_lock

    def _held(self, row: int, end: int) -> dict[str, IntArray]:
        """For each family, the row's page that serves each full page of `[0, end)`."""
        held = {name: self.rows.pages(name, row, 0, end) for name in self._paged}
        return held | {family.name: coarse.held(self.rows, family, row, end) for family in self._coarse}

    def _publishable_len(self, record: ReqKvInfo, tokens: IntArray, namespace: Namespace) -> int:
        """How much of the committed part the tree may take: it stops at a page that another row holds as well.

        So a page of the tree has no other count, and evicting it always frees it. The other row publishes it later.
        """
        page_size, lo = self.geometry.page_size, record.cache_protected_len
        length = min(record.kv_committed_len, len(tokens))
        end = floor_page(length, page_size)
        for name in self._paged if end > lo else ():
            shared = self.families.pools[name].owners(self.rows.pages(name, record.row, lo, end)) > 1
            if shared.any():
                known = self.tree.known_pages(PrefixKey(tokens[:end], page_size, namespace), name)
                first = page_count(lo, page_size)
                # Where the tree has a page ours is a duplicate; where it has let a window's go ours would fill in.
                shared[: max(0, len(known) - first)] &= known[first:] == PADDING_PAGE
                ours = np.flatnonzero(shared)
                if len(ours):
                    end = (first + int(ours[0])) * page_size
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
        pages = {f.name: self.rows.pages(f.name, parent.row, 0, ceil_page(length, page_size)) for f in self._own}
        in_tree, whole = page_count(protected, page_size), page_count(shared, page_size)
        prefix = {name: ids[:whole] if name in self._paged else ids for name, ids in pages.items()}
        both = {name: pages[name][in_tree:whole] for name in self._paged}
        for family in self._coarse:
            lo, hi = (floor_page(n, family.tokens_per_page) for n in (protected, length))
            both[family.name] = self.rows.pages(family.name, parent.row, lo, hi)
        both = {name: ids[ids != PADDING_PAGE] for name, ids in both.items()}
        self.families.retain(both)
        try:
            growth = grow(child, length, prefix, protected)
            self.commit(plan([growth._replace(swa_evicted=min(parent.swa_evicted_seqlen, protected))]))
        except BaseException:
            self.families.release(both)
            raise
        for name in self._paged if length > shared else ():
            new = int(self.rows.pages(name, child.row, shared, shared + page_size)[0])
            self._copies.append(PageCopy(name, int(pages[name][whole]), new))
        child.schedule(length)
        child.commit(length)
        if self._windowed and parent.swa_evicted_seqlen > child.swa_dead_lo(page_size):
            child.slide_window(parent.swa_evicted_seqlen)
        own_lock = self.tree.lock_again(lock, in_tree)
        if child.kv_allocated_len == protected:
            # It has no copy yet of a coarse page that it ends in: it will make one of the tree's, which its lock keeps.
            for family in self._coarse:
                self.rows.write(family.name, child.row, 0, self.tree.row_pages(own_lock)[family.name])
        return own_lock

    def slide_window(self, record: ReqKvInfo) -> None:
        """Give back the window's pages that no later token reads, and stop naming what the row's lock does not keep.

        0            window_start(protected)   protected     window_start(committed - 1)   committed   allocated
        |  not named  |  the tree's, one window |   given back    |  kept: the window, whole pages  |        |
                       (not named either, once the row gave something back behind it)

        The last committed token may be taken back: a step that was planned early may have computed it for nobody.
        """
        page_size = self.geometry.page_size
        for family in self._windowed:
            assert family.window is not None
            lo = max(record.swa_dead_lo(page_size), record.swa_evicted_seqlen)
            end = window_start(max(0, record.kv_committed_len - 1), family.window, page_size)
            unread = window_start(record.cache_protected_len, family.window, page_size)
            if lo < end:
                given_up, unread = self._unname(family.name, record.row, lo, end), record.cache_protected_len
                record.slide_window(end)
                self.families.pools[family.name].release(given_up)
            self._unname(family.name, record.row, 0, unread)

    def _unname(self, family: str, row: int, start: int, end: int) -> IntArray:
        """Entries of the row's tokens `[start, end)` become the padding page; returns the pages that they named."""
        if start >= end or not self.rows.pages(family, row, end - self.geometry.page_size, end).any():
            return NO_PAGES
        pages = self.rows.pages(family, row, start, end)
        first = int((pages != PADDING_PAGE).argmax())
        nothing = np.full(len(pages) - first, PADDING_PAGE, dtype=np.int32)
        self.rows.write(family, row, page_count(start, self.geometry.page_size) + first, nothing)
        return pages[first:]

    def trim(self, record: ReqKvInfo) -> None:
        """Give back the pages behind what is scheduled.

        0        protected     scheduled   ceil(scheduled)     allocated
        |  tree's   |   readable   |  kept     |      given back     |
        """
        end, allocated = ceil_page(record.kv_scheduled_len, self.geometry.page_size), record.kv_allocated_len
        if self._coarse and end == record.cache_protected_len:
            end = min(end + self.geometry.page_size, allocated)  # it keeps its copy of a page that the tree has part of
        if end == allocated:
            return
        for family in self._own:
            self.families.pools[family.name].release(self.rows.pages(family.name, record.row, end, allocated))
        record.reserve(end)

    def shares_tail(self, record: ReqKvInfo) -> bool:
        """Whether the page that the row writes next holds readable tokens and is another row's, or the tree's, too."""
        return bool(self._shared_tails(record))

    def _shared_tails(self, record: ReqKvInfo) -> list[PageFamily]:
        """Families whose page at the end of the row another row holds as well."""
        end = record.kv_scheduled_len
        if record.req_pool_idx is None:
            return []
        return [f for f in self._own if not is_whole_pages(end, f.tokens_per_page) and self._is_shared(f, record, end)]

    def _is_shared(self, family: PageFamily, record: ReqKvInfo, end: int) -> bool:
        lo = floor_page(end, family.tokens_per_page)
        page = self.rows.pages(family.name, record.row, lo, ceil_page(end, family.tokens_per_page))
        counts = self.families.pools[family.name].owners(page)
        if self.geometry.is_coarse(family):
            # What the tree knows of such a page is left alone by whoever writes behind it.
            is_own = record.kv_allocated_len > record.cache_protected_len
            return is_own and bool((counts - self.tree.num_counts(family.name, page) > 1).any())
        return bool((counts > 1).any())

    def unshare_tail(self, record: ReqKvInfo) -> None:
        """Let idle rows go until none shares the page that the row writes next: then it needs no copy of its own."""
        for holding in list(self.idle):
            if not self.shares_tail(record):
                return
            self.idle.demote(holding)

    def own_tail(self, record: ReqKvInfo) -> None:
        """Replace a shared page that the row is about to write by a copy, which the next step makes first.

        A rewind may end inside a page that a fork shares: written in place, it would change the other row. Whoever
        rewinds gives the pages behind back (`trim`), so there is one such page of each family at most.

        Raises OutOfPages: nothing changed.
        """
        shared = self._shared_tails(record)
        if not shared:
            return
        if self.lacking(1):
            raise OutOfPages(1, self.num_available)
        demand = {"full": 0} | {family.name: 1 for family in shared}
        self._make_room(0, demand)
        taken = self.families.alloc(demand)
        for family in shared:
            name, new = family.name, taken[family.name]
            lo = floor_page(record.kv_scheduled_len, family.tokens_per_page)
            old = self.rows.pages(name, record.row, lo, lo + family.tokens_per_page)
            self._copies.append(PageCopy(name, int(old[0]), int(new[0])))
            self.rows.write(name, record.row, page_count(lo, family.tokens_per_page), new)
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
