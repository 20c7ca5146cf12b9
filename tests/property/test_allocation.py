"""Requests come, grow, publish, rewind and go in any order, and each row still spells its own tokens.

Memory is shadowed: `memory[page]` is what forwards wrote into a page, wiped when the page is free. A row that names a
wrong page, shares one it should own, or lost one reads a wrong token; a page counted wrong shows in the audit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import strategies as domain
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from devices.page_pool import Fence, OutOfPages
from devices.pages import IntArray
from mem_cache.audit import Holding, audit
from mem_cache.growth import Growth, Plan, decode, extend, plan, speculate
from mem_cache.kv_info import ReqKvInfo
from mem_cache.rows import OutOfRows
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import LockReceipt

NUM_ROWS = 3
ROW_PAGES = 6
WIPED = -1

EVENTS_OF_A_DAY = (
    "evicted",
    "evicted a part",
    "published duplicates",
    "ran out of pages",
    "started from the cache",
    "rejected drafts",
)

which = st.integers(0, 11)
chunks = st.sampled_from([1, 3, 20, 1000])


@dataclass
class Live:
    """A request as a scheduler sees it: `tokens` are those of `[0, scheduled)`."""

    record: ReqKvInfo
    lock: LockReceipt
    namespace: Namespace
    prompt: IntArray
    tokens: list[int] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return self.record.kv_scheduled_len - self.record.kv_committed_len


class RowsSpellTheirTokens(RuleBasedStateMachine):
    """start, extend, decode, speculate, result, publish, rewind, release, evict and fences, several rows at once."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        policy=domain.policies,
        num_pages=st.integers(5, 16),
        window=st.booleans(),
    )
    def open_books(self, page_size: int, policy: str, num_pages: int, window: bool) -> None:
        self.books = domain.make_books(
            page_size, num_pages=num_pages, num_rows=NUM_ROWS, row_pages=ROW_PAGES, policy=policy, window=window
        )
        self.allocator, self.page_size = self.books.allocator, page_size
        self.live: list[Live] = []
        self.seen: list[tuple[IntArray, Namespace]] = []
        self.memory = np.full((num_pages + 1, page_size), WIPED)
        self.mirror = {name: table.copy() for name, table in self.books.rows.tables.items()}
        self.fences: list[dict[str, Fence]] = []
        self.number = 0
        self.happened: Counter[str] = Counter()

    # How a step is played.

    def commits(self, *growths: Growth) -> bool:
        """Commit a plan. When it is refused nothing has moved; when it is not, exactly what lacked was evicted."""
        wanted: Plan = plan(growths)
        records = [live.record for live in self.live]
        before = domain.snapshot(self.books, records)
        rows_fit = wanted.num_rows <= self.books.rows.num_free
        lacking = self.allocator.lacking_pages(wanted)
        free, evictable = self.books.families.pools["full"].num_free, self.books.tree.num_evictable
        arriving = self.allocator.num_arriving
        try:
            self.allocator.commit(wanted)
        except OutOfRows:
            assert not rows_fit
            assert domain.snapshot(self.books, records) == before
            return False
        except OutOfPages:
            # Behind a fence, evicted pages arrive later: the plan waits, and only the tree has lost something.
            assert lacking or (self.fences and wanted.num_pages > free)
            self.happened["ran out of pages"] += 1
            if lacking:
                assert domain.snapshot(self.books, records) == before
            assert [domain.snapshot_record(record) for record in records] == before[-1]  # type: ignore[index]
            assert evictable - self.books.tree.num_evictable in (0, wanted.num_pages - free - arriving)
            return False
        assert rows_fit
        assert not lacking
        self.happened["evicted"] += wanted.num_pages > free
        self.happened["evicted a part"] += wanted.num_pages > free > 0 and self.books.tree.num_evictable > 0
        assert evictable - self.books.tree.num_evictable == max(0, wanted.num_pages - free)
        return True

    def write(self, live: Live, start: int, end: int) -> None:
        """A forward writes tokens `[start, end)` through the page table."""
        pages = self.books.rows.pages("full", live.record.row, 0, live.record.kv_allocated_len)
        for position in range(start, end):
            self.memory[pages[position // self.page_size], position % self.page_size] = live.tokens[position]

    def compute(self, live: Live, end: int) -> None:
        """Launch and finish a prefill or chunk that ends at `end`."""
        start = live.record.kv_committed_len
        live.tokens[start:] = live.prompt[start:end].tolist()
        live.record.schedule(end)
        self.write(live, start, end)
        live.record.commit(end)

    def pick(self, number: int) -> Live:
        return self.live[number % len(self.live)]

    # The rules.

    @rule(data=st.data(), namespace=st.sampled_from(domain.NAMESPACES[:2]), chunk=chunks)
    def start(self, data: st.DataObject, namespace: Namespace, chunk: int) -> None:
        prompt = data.draw(domain.prompts(self.page_size, max_pages=ROW_PAGES - 1))
        if len(prompt):
            self.seen.append((prompt, namespace))
            self.begin(prompt, namespace, chunk)

    @precondition(lambda self: self.seen)
    @rule(number=which, chunk=chunks)
    def start_the_same_again(self, number: int, chunk: int) -> None:
        prompt, namespace = self.seen[number % len(self.seen)]
        self.begin(prompt, namespace, chunk)

    def begin(self, prompt: IntArray, namespace: Namespace, chunk: int) -> None:
        self.number += 1
        lock = self.books.tree.lock(self.allocator.match(prompt, namespace), count_hit=True)
        matched = lock.num_pages * self.page_size
        assert matched < len(prompt)
        live = Live(self.books.record(f"r{self.number}"), lock, namespace, prompt, prompt[:matched].tolist())
        end = min(len(prompt), matched + chunk)
        prefix = {name: self.books.tree.pages(lock, name) for name in self.books.families.pools}
        assert self.memory[prefix["full"]].ravel().tolist() == live.tokens
        if self.commits(extend(live.record, end, prefix)):
            assert live.record.cache_protected_len == matched
            self.happened["started from the cache"] += matched > 0
            self.live.append(live)
            self.compute(live, end)
        else:
            self.allocator.release(live.record, lock)

    @precondition(lambda self: self.live)
    @rule(number=which, chunk=chunks)
    def extend(self, number: int, chunk: int) -> None:
        live = self.pick(number)
        end = min(len(live.prompt), live.record.kv_committed_len + chunk)
        if not live.in_flight and end > live.record.kv_committed_len and self.commits(extend(live.record, end)):
            self.compute(live, end)

    @precondition(lambda self: self.live)
    @rule(numbers=st.sets(which, min_size=1, max_size=3), tokens=st.lists(st.integers(5, 7), min_size=1, max_size=4))
    def launch_decode(self, numbers: set[int], tokens: list[int]) -> None:
        width = self.books.geometry.row_width
        chosen = {id(live): live for live in map(self.pick, numbers)}.values()
        batch = [live for live in chosen if live.record.kv_scheduled_len + len(tokens) <= width]
        if batch and self.commits(*(decode(live.record, len(tokens)) for live in batch)):
            for live in batch:
                live.tokens += tokens
                live.record.schedule(len(live.tokens))

    @precondition(lambda self: self.live)
    @rule(number=which, drafts=st.lists(st.integers(5, 7), min_size=1, max_size=9))
    def launch_speculation(self, number: int, drafts: list[int]) -> None:
        live = self.pick(number)
        room = self.books.geometry.row_width - live.record.kv_committed_len
        if live.in_flight or len(drafts) > room:
            return
        if self.commits(speculate(live.record, len(drafts))):
            live.tokens += drafts
            live.record.schedule(len(live.tokens))

    @precondition(lambda self: any(live.in_flight for live in self.live))
    @rule(number=which, accepted=st.integers(0, 9))
    def result(self, number: int, accepted: int) -> None:
        flying = [live for live in self.live if live.in_flight]
        live = flying[number % len(flying)]
        committed = live.record.kv_committed_len
        self.write(live, committed, live.record.kv_scheduled_len)
        end = committed + min(accepted, live.in_flight)
        self.happened["rejected drafts"] += end < live.record.kv_scheduled_len
        live.record.commit(end)
        live.record.rewind(end)
        del live.tokens[end:]

    @precondition(lambda self: self.live)
    @rule(number=which, priority=domain.priorities)
    def publish(self, number: int, priority: int) -> None:
        live = self.pick(number)
        tokens = domain.tokens_of(live.tokens)
        own = self.books.rows.pages("full", live.record.row, 0, live.record.kv_committed_len).tolist()
        live.lock = self.allocator.publish(live.record, tokens, live.namespace, live.lock, priority)
        whole = live.record.kv_committed_len // self.page_size * self.page_size
        assert live.record.cache_protected_len == whole
        assert live.lock.num_pages * self.page_size == whole
        now = self.books.rows.pages("full", live.record.row, 0, live.record.kv_committed_len).tolist()
        self.happened["published duplicates"] += own != now

    @precondition(lambda self: self.live)
    @rule(number=which, back=st.integers(0, 40))
    def rewind(self, number: int, back: int) -> None:
        live = self.pick(number)
        end = max(live.record.cache_protected_len, len(live.tokens) - back)
        live.record.rewind(end)
        del live.tokens[end:]
        if len(live.prompt) > end:
            live.prompt = domain.tokens_of(live.tokens)

    @precondition(lambda self: self.live)
    @rule(number=which)
    def finish(self, number: int) -> None:
        self.publish(number, 0)
        self.release(number)

    @precondition(lambda self: self.live)
    @rule(number=which)
    def release(self, number: int) -> None:
        live = self.pick(number)
        self.live = [other for other in self.live if other is not live]
        self.allocator.release(live.record, live.lock)
        before = domain.snapshot(self.books, [live.record])
        self.allocator.release(live.record, None)
        assert domain.snapshot(self.books, [live.record]) == before

    @rule(num_pages=st.integers(0, 2))
    def evict(self, num_pages: int) -> None:
        evictable = self.books.tree.num_evictable
        assert self.books.tree.evict(num_pages) == min(num_pages, evictable)

    @precondition(lambda self: len(self.fences) < 2)
    @rule()
    def fence(self) -> None:
        self.fences.append(self.books.families.fence("a step"))

    @precondition(lambda self: self.fences)
    @rule(number=which)
    def lift(self, number: int) -> None:
        self.books.families.lift(self.fences.pop(number % len(self.fences)))

    # What must be true after each of them.

    @invariant()
    def the_books_are_right(self) -> None:
        self.free_pages_are_wiped_and_the_mirror_follows()
        self.every_row_spells_its_tokens()
        self.every_cached_page_spells_its_tokens()
        assert audit(self.allocator, [Holding(live.record, live.lock) for live in self.live]) == []

    def free_pages_are_wiped_and_the_mirror_follows(self) -> None:
        pool = self.books.families.pools["full"]
        self.memory[pool.free_pages()] = WIPED
        self.memory[pool.pending_pages()] = WIPED
        for change in self.books.rows.take_changes():
            self.mirror[change.family][change.row, change.start : change.start + len(change.pages)] = change.pages
        for name, table in self.books.rows.tables.items():
            assert np.array_equal(self.mirror[name], table)

    def every_row_spells_its_tokens(self) -> None:
        for live in self.live:
            record = live.record
            assert len(live.tokens) == record.kv_scheduled_len
            num_pages = record.kv_allocated_len // self.page_size
            pages = self.mirror["full"][record.row, :num_pages]
            assert len(set(pages.tolist())) == num_pages
            assert 0 not in pages
            committed = record.kv_committed_len
            assert self.memory[pages].ravel()[:committed].tolist() == live.tokens[:committed]

    def every_cached_page_spells_its_tokens(self) -> None:
        for node in self.books.tree.nodes():
            tokens = np.frombuffer(node.raw, dtype="<i4")
            assert self.memory[node.held["full"]].ravel().tolist() == tokens.tolist()

    def teardown(self) -> None:
        """Idle: everything comes back."""
        for live in self.live:
            self.allocator.release(live.record, live.lock)
        for fences in self.fences:
            self.books.families.lift(fences)
        self.books.tree.flush()
        for pool in self.books.families.pools.values():
            assert pool.num_free == pool.num_pages
        assert audit(self.allocator, []) == []


TestRowsSpellTheirTokens = RowsSpellTheirTokens.TestCase
TestRowsSpellTheirTokens.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (4, "lfu"), (4, "priority"), (16, "slru")])
def test_a_long_day_of_requests_leaves_every_row_right(page_size: int, policy: str) -> None:
    """The same moves, thousands in a row and weighted as a server's are: deeper than a shrinkable example goes."""
    random = Random(f"{page_size} {policy}")
    day = RowsSpellTheirTokens()
    day.open_books(page_size, policy, num_pages=11, window=False)
    heads = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 4, 5], [6, 7], [8, 1, 2], [9, 9, 9, 9]]
    prompts = [
        np.append(domain.blocks(head, page_size), [7] * extra).astype(np.int32) for head in heads for extra in (1, 2)
    ]

    def some_tokens() -> list[int]:
        return random.choices([5, 6, 7], k=random.randint(1, 3 + page_size))

    def a_row() -> int:
        return random.randrange(12)

    def a_prompt() -> IntArray:
        twin[0] = random.choice(prompts)
        return twin[0]

    twin = [prompts[0]]

    moves = {
        lambda: day.begin(a_prompt(), domain.NAMESPACES[0], random.choice([1, 3, 1000])): 8,
        lambda: day.begin(twin[0], domain.NAMESPACES[0], 1000): 4,
        lambda: day.live and day.extend(a_row(), random.choice([1, 3, 1000])): 6,
        lambda: day.live and day.launch_decode({a_row(), a_row()}, some_tokens()): 4,
        lambda: day.live and day.launch_speculation(a_row(), some_tokens()): 3,
        lambda: any(live.in_flight for live in day.live) and day.result(a_row(), random.randint(0, 9)): 6,
        lambda: day.live and day.publish(a_row(), random.randint(0, 3)): 3,
        lambda: day.live and day.finish(a_row()): 5,
        lambda: day.live and day.release(a_row()): 1,
        lambda: day.live and day.rewind(a_row(), random.randint(0, 5)): 1,
        lambda: len(day.fences) < 2 and day.fence(): 1,
        lambda: day.fences and day.lift(a_row()): 6,
    }
    for move in random.choices(list(moves), list(moves.values()), k=3000):
        move()
        day.the_books_are_right()
    day.teardown()
    for event in EVENTS_OF_A_DAY:
        assert day.happened[event] >= 3, f"{event}: {day.happened}"
