"""Full, window and compressed pages of a row move together: every read finds what was written, and no page is lost.

Each walk draws moves of a server at random, with three geometries of DeepSeek-V4's caches on Ascend, and after each of
them looks at all pages, rows and counts. Memory is shadowed in plain integers (`oracles/naive_families.py`): a page is
wiped when it is free, and a compressed entry depends on all tokens before it, so a wrong page, a lost copy or a page
that was let go too early reads as another value. At random a call inside a transaction fails; then nothing may have
moved.

`pytest tests/property/test_families.py --families-states 100000` walks through that many states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import strategies as domain
from oracles.naive_families import RATIO, NaiveCache, NaiveRow, sidecar_page_count

from devices.npu.families import compressed_families
from devices.page_pool import Fence, OutOfPages, PageFamilies
from devices.pages import (
    derived_slots,
    is_slot_aligned,
    last_sidecar_slot,
    new_entries,
    num_sidecar_pages,
    sidecar_slots,
    slots_of,
)
from mem_cache.allocation import KvAllocator
from mem_cache.audit import Holding, audit
from mem_cache.growth import Growth, decode, extend, plan, plan_transfer, speculate
from mem_cache.kv_info import Owner, OwnerKind, ReqKvInfo, RowGeometry
from mem_cache.rows import OutOfRows, RowPool
from mem_cache.tree.components import components_of
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.prefix_tree import LockReceipt, PrefixTree

NAMESPACE = Namespace()
GEOMETRIES = ((128, 16), (256, 16), (128, 32))
NUM_ROWS = 6
WALK = 250
MARKS = (
    "ran out of pages",
    "failed inside a transaction",
    "continued inside a sidecar page",
    "copied a shared tail",
    "match shortened by the window",
    "window slid",
    "window page of the tree let go",
    "full page of the tree let go",
    "forked",
    "rejected drafts",
)


class InjectedFailure(Exception):
    pass


@dataclass(eq=False)
class Live:
    record: ReqKvInfo
    lock: LockReceipt
    prompt: list[int]
    naive: NaiveRow = field(default_factory=NaiveRow)
    tokens: list[int] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return self.record.kv_scheduled_len - self.record.kv_committed_len


class Walk:
    """A server's life with `page_size` and `entries_per_page`."""

    def __init__(self, page_size: int, entries_per_page: int, seed: int) -> None:
        self.random = Random(f"{page_size} {entries_per_page} {seed}")
        self.page_size, self.entries_per_page = page_size, entries_per_page
        self.group = RATIO * entries_per_page
        self.window = self.random.choice([page_size // 2, page_size, 2 * page_size + 1])
        width = 2 * self.group + 4 * page_size
        shape = compressed_families(page_size, self.window, entries_per_page)
        num_full = 3 * width // page_size
        sizes = {
            "full": num_full,
            "window": self.random.choice([num_full, num_full // 2 + 2]),
            "c4": 0,
            "c128": self.random.choice([9, 14]),
        }
        geometry = RowGeometry(page_size, width, shape)
        self.families = PageFamilies([(family, sizes[family.name]) for family in shape])
        self.rows = RowPool(NUM_ROWS, geometry)
        self.tree = PrefixTree(components_of(geometry, self.families), page_size)
        self.allocator = KvAllocator(self.families, self.rows, self.tree)
        places = {"full": page_size, "window": page_size, "c128": entries_per_page}
        self.caches = {name: NaiveCache(width) for name, width in places.items()}
        for name, pool in self.families.pools.items():
            pool.on_free = lambda pages, name=name: self.caches[name].wipe(pages.tolist())  # type: ignore[misc]
        self.live: list[Live] = []
        self.fences: list[dict[str, Fence]] = []
        self.happened: Counter[str] = Counter()
        self.heads = [self.text(width // page_size - 1, first) for first in (1, 1, 5, 9)]
        self.number = 0

    def text(self, num_pages: int, first: int) -> list[int]:
        """Pages of equal tokens; texts of the same `first` agree in their first half."""
        half = num_pages // 2
        kinds = [first + i % 3 for i in range(half)] + [self.random.randrange(20) for _ in range(num_pages - half)]
        return [kind for kind in kinds for _ in range(self.page_size)]

    def some(self) -> Live:
        return self.random.choice(self.live)

    # How a step is played.

    def commits(self, *growths: Growth) -> bool:
        """Commit a plan; refused or failed, no page, row or record has moved."""
        wanted = plan(growths)
        records = [live.record for live in self.live]
        before = self.everything(records)
        try:
            with self.failing_at(self.random.randrange(1, 16) if self.random.random() < 0.2 else 0):
                self.allocator.commit(wanted)
        except (OutOfPages, OutOfRows):
            self.happened["ran out of pages"] += 1
            assert self.everything(records)["records"] == before["records"]
            return False
        except InjectedFailure:
            self.happened["failed inside a transaction"] += 1
            assert self.allocator.take_copies() == ()
            after = self.everything(records)
            assert {name: after[name] for name in ("rows", "records", "tables")} == {
                name: before[name] for name in ("rows", "records", "tables")
            }
            return False
        self.make_copies()
        return True

    def everything(self, records: list[ReqKvInfo]) -> dict[str, object]:
        named = {}
        for name, table in self.rows.tables.items():
            family = self.families.families[name]
            for record in records:
                pages = -(-record.kv_allocated_len // family.tokens_per_page)
                named[name, record.row] = table[record.row, :pages].tolist()
        return {
            "rows": (self.rows.used, self.rows.num_free),
            "records": [domain.snapshot_record(record) for record in records],
            "tables": named,
        }

    @contextmanager
    def failing_at(self, nth: int) -> Iterator[None]:
        """The n-th call of anything that a transaction is made of fails; 0: none does."""
        left = nth
        undo: list[Callable[[], None]] = []

        def wrap(owner: Any, name: str) -> None:
            plain = getattr(owner, name)

            def failing(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise InjectedFailure(name)
                return plain(*args, **kwargs)

            own = name in vars(owner)
            setattr(owner, name, failing)
            undo.append(lambda: setattr(owner, name, plain) if own else delattr(owner, name))

        for pool in self.families.pools.values() if nth else ():
            wrap(pool, "alloc")
        for name in ("alloc", "write") if nth else ():
            wrap(self.rows, name)
        for name in ("bind", "adopt", "reserve") if nth else ():
            wrap(ReqKvInfo, name)
        try:
            yield
        finally:
            for one in undo:
                one()

    def make_copies(self) -> None:
        for copy in self.allocator.take_copies():
            self.caches[copy.family].copy(copy.source, copy.target)

    def table(self, live: Live, family: str) -> list[int]:
        return self.rows.pages(family, live.record.row, 0, live.record.kv_allocated_len).tolist()  # type: ignore[no-any-return]

    def write(self, live: Live, start: int) -> None:
        """A forward writes the tokens from `start` on through the row's tables."""
        for name in ("full", "window"):
            self.caches[name].write(self.table(live, name), start, live.naive.values[start:])
        first = start // RATIO
        self.caches["c128"].write(self.table(live, "c128"), first, live.naive.entries[first:])

    def compute(self, live: Live, tokens: list[int]) -> None:
        start = live.record.kv_scheduled_len
        live.tokens += tokens
        live.naive.append(tokens)
        live.record.schedule(start + len(tokens))
        self.write(live, start)

    def own_tail(self, live: Live) -> bool:
        """What the scheduler does before a row writes where it was cut to."""
        try:
            self.happened["copied a shared tail"] += self.allocator.shares_tail(live.record)
            self.allocator.own_tail(live.record)
        except OutOfPages:
            return False
        self.make_copies()
        return True

    # The moves.

    def begin(self) -> None:
        head = self.random.choice(self.heads)
        cut = self.random.randrange(1, len(head))
        cut = max(1, cut - cut % self.page_size + self.random.choice([0, 0, 1, 77]))
        prompt = head[:cut] if self.random.random() < 0.7 else head[:cut] + self.text(1, self.random.randrange(20))
        prompt = prompt[: self.rows.geometry.row_width - self.page_size]
        tokens = domain.tokens_of(prompt)
        known = self.allocator.match(tokens, NAMESPACE)
        whole = self.tree._walk(PrefixKey(tokens[:-1], self.page_size, NAMESPACE))[1]
        self.happened["match shortened by the window"] += known.num_pages < whole
        lock = self.tree.lock(known)
        matched = lock.num_pages * self.page_size
        self.number += 1
        record = ReqKvInfo(self.rows.geometry, Owner(OwnerKind.REQUEST, f"r{self.number}"))
        end = min(len(prompt), matched + self.random.choice([1, self.page_size, len(prompt)]))
        if not self.commits(extend(record, end, self.tree.row_pages(lock))):
            assert record.req_pool_idx is None
            assert record.kv_allocated_len == 0
            self.tree.unlock(lock)
            return
        self.happened["continued inside a sidecar page"] += matched % self.group != 0
        live = Live(record, lock, prompt)
        live.tokens, live.naive = prompt[:matched], NaiveRow()
        live.naive.append(prompt[:matched])
        self.live.append(live)
        self.compute(live, prompt[matched:end])
        record.commit(end)

    def grow(self) -> None:
        live = self.some()
        known = len(live.tokens)
        left = live.prompt[known:] if live.prompt[:known] == live.tokens else []
        room = self.rows.geometry.row_width - live.record.kv_scheduled_len
        kinds = self.random.choice([1, 1, 3, self.page_size, 2 * self.page_size + 3])
        tokens = (left or [self.random.randrange(20)] * kinds)[: min(kinds, room)]
        if not tokens or not self.own_tail(live):
            return
        how = extend(live.record, known + len(tokens)) if left else decode(live.record, len(tokens))
        if live.in_flight == 0 and self.random.random() < 0.3:
            how = speculate(live.record, len(tokens))
        if self.commits(how):
            self.compute(live, tokens)

    def result(self) -> None:
        flying = [live for live in self.live if live.in_flight]
        if not flying:
            return
        live = self.random.choice(flying)
        record = live.record
        rejected = self.random.choice([0, 0, min(2, live.in_flight - 1)])
        self.happened["rejected drafts"] += rejected > 0
        record.commit(record.kv_scheduled_len - rejected)
        self.cut(live, record.kv_committed_len)

    def cut(self, live: Live, length: int) -> None:
        live.record.rewind(length)
        live.naive.cut(length)
        del live.tokens[length:]

    def publish(self) -> None:
        live = self.some()
        live.lock = self.allocator.publish(live.record, domain.tokens_of(live.tokens), NAMESPACE, live.lock)

    def slide(self) -> None:
        live = self.some()
        self.happened["window slid"] -= live.record.swa_evicted_seqlen
        self.allocator.slide_window(live.record)
        self.happened["window slid"] += live.record.swa_evicted_seqlen

    def rewind(self) -> None:
        live = self.some()
        record = live.record
        length = record.kv_scheduled_len - self.random.choice([1, 40, self.random.randrange(1, 4 * self.page_size)])
        if live.in_flight or length < record.cache_protected_len:
            return
        if record.swa_evicted_seqlen and length - self.window < record.swa_evicted_seqlen:
            return
        self.cut(live, length)
        self.allocator.trim(record)

    def fork(self) -> None:
        live = self.some()
        length = live.record.kv_committed_len - self.random.choice([0, 1, self.page_size + 1])
        lowest = max(live.record.cache_protected_len, live.record.swa_evicted_seqlen + self.window, 1)
        if live.record.swa_evicted_seqlen == 0:
            lowest = max(live.record.cache_protected_len, 1)
        if length < lowest:
            return
        self.number += 1
        record = ReqKvInfo(self.rows.geometry, Owner(OwnerKind.REQUEST, f"r{self.number}"))
        try:
            lock = self.allocator.fork(live.record, live.lock, record, length)
        except (OutOfPages, OutOfRows):
            return
        self.make_copies()
        self.happened["forked"] += 1
        self.live.append(Live(record, lock, live.tokens[:length], live.naive.copy(length), live.tokens[:length]))

    def finish(self) -> None:
        live = self.some()
        if self.random.random() < 0.7:
            live.lock = self.allocator.publish(live.record, domain.tokens_of(live.tokens), NAMESPACE, live.lock)
        self.live.remove(live)
        self.allocator.release(live.record, live.lock)

    def evict(self) -> None:
        family = self.random.choice(["full", "window", "c128"])
        n = self.random.randrange(1, 4)
        could = self.tree.num_evictable_of(family)
        gone = self.tree.evict_family(family, n)
        assert gone == min(n, could) or (family == "c128" and gone >= min(n, could))
        self.happened[f"{family} page of the tree let go"] += gone

    def fence(self) -> None:
        if self.fences and self.random.random() < 0.7:
            self.families.lift(self.fences.pop())
        elif len(self.fences) < 2:
            self.fences.append(self.families.fence("a step"))

    def move(self) -> None:
        moves: dict[Callable[[], None], int] = {self.begin: 5, self.evict: 1, self.fence: 1}
        if self.live:
            moves |= {self.grow: 8, self.result: 6, self.publish: 3, self.slide: 4, self.rewind: 3}
            moves |= {self.fork: 4, self.finish: 3}
        self.random.choices(list(moves), weights=list(moves.values()))[0]()

    # What must be true after each of them.

    def check(self) -> None:
        holdings = [Holding(live.record, live.lock) for live in self.live]
        found = audit(self.allocator, holdings)
        assert found == [], "\n".join(map(str, found))
        for live in self.live:
            self.check_row(live)

    def check_row(self, live: Live) -> None:
        record, page_size = live.record, self.page_size
        committed, allocated = record.kv_committed_len, record.kv_allocated_len
        full, window, sidecar = (self.table(live, name) for name in ("full", "window", "c128"))
        assert len(full) * page_size == allocated
        assert 0 not in full
        assert self.caches["full"].reads(full, 0, live.naive.values)
        oldest = max(0, committed + 1 - self.window)
        assert self.caches["window"].reads(window, oldest, live.naive.values[oldest:])
        if allocated > record.cache_protected_len:
            assert len(sidecar) == -(-allocated // self.group)
            assert 0 not in sidecar
            assert self.caches["c128"].reads(sidecar, 0, live.naive.entries)

    def check_formulas(self, live: Live) -> None:
        """The device's arithmetic on a row, against walking token by token."""
        record, page_size, per_page = live.record, self.page_size, self.entries_per_page
        length = record.kv_scheduled_len
        start = self.random.randrange(length + 1)
        full, sidecar = (self.rows.pages(name, record.row, 0, record.kv_allocated_len) for name in ("full", "c128"))
        slots = slots_of(full, 0, length, page_size)
        assert all(is_slot_aligned(slot, position, page_size) for position, slot in enumerate(slots.tolist()))
        quarter = page_size // 4
        assert derived_slots(slots, 4).tolist() == [
            int(full[(4 * i) // page_size]) * quarter + i % quarter for i in range(length // 4)
        ]
        entries = new_entries(start, length, RATIO)
        assert list(entries) == [i for i in range(length // RATIO) if start < (i + 1) * RATIO]
        opened = sidecar_page_count(length, per_page) - sidecar_page_count(start, per_page)
        assert num_sidecar_pages(start, length, RATIO, per_page) == opened
        walked = [int(sidecar[i // per_page]) * per_page + i % per_page for i in range(length // RATIO)]
        if record.kv_allocated_len > record.cache_protected_len:
            assert sidecar_slots(sidecar, entries, per_page).tolist() == walked[entries.start :]
            assert last_sidecar_slot(sidecar, length, RATIO, per_page) == (walked[-1] if walked else -1)
        for part in plan_transfer(start, length, self.rows.geometry):
            assert part.start <= start or part.family == "window"
            assert part.end >= length - length % RATIO

    def empty(self) -> None:
        """Idle: everything comes back."""
        for live in self.live:
            self.allocator.release(live.record, live.lock)
        for fences in self.fences:
            self.families.lift(fences)
        self.tree.flush()
        for pool in self.families.pools.values():
            assert pool.num_free == pool.num_pages
        assert audit(self.allocator, []) == []
        assert self.tree.num_evictable_of("window") == self.tree.num_evictable_of("c128") == 0


def walk(page_size: int, entries_per_page: int, seed: int, num_states: int) -> Counter[str]:
    it = Walk(page_size, entries_per_page, seed)
    for state in range(num_states):
        it.move()
        it.check()
        if it.live and state % 16 == 0:
            it.check_formulas(it.some())
    it.empty()
    return it.happened


def test_rows_of_all_families_read_what_was_written(families_states):
    happened: Counter[str] = Counter()
    num_states = 0
    while num_states < families_states:
        for page_size, entries_per_page in GEOMETRIES:
            happened += walk(page_size, entries_per_page, seed=num_states, num_states=WALK)
            num_states += WALK
    assert [mark for mark in MARKS if not happened[mark]] == []
