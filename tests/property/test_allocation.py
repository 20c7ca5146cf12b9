"""Requests come, grow, publish, rewind and go in any order, and each row still spells its own tokens.

Memory is shadowed: `memory[page]` is what forwards wrote into a page, wiped when the page is free. A row that names a
wrong page, shares one it should own, or lost one reads a wrong token; a page counted wrong shows in the audit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import strategies as domain
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from devices.page_pool import Fence, OutOfPages
from devices.pages import IntArray
from mem_cache.allocation import Growth, Plan, decode, extend, plan, speculate
from mem_cache.audit import Holding, audit
from mem_cache.kv_info import ReqKvInfo
from mem_cache.rows import OutOfRows
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import LockReceipt

NUM_ROWS = 3
ROW_PAGES = 6
WIPED = -1

which = st.integers(0, 11)


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
        self.memory = np.full((num_pages + 1, page_size), WIPED)
        self.mirror = {name: table.copy() for name, table in self.books.rows.tables.items()}
        self.fences: list[dict[str, Fence]] = []
        self.number = 0

    # How a step is played.

    def commits(self, *growths: Growth) -> bool:
        """Commit a plan. When it is refused nothing has moved; when it is not, exactly what lacked was evicted."""
        wanted: Plan = plan(growths)
        records = [live.record for live in self.live]
        before = domain.snapshot(self.books, records)
        rows_fit = wanted.num_rows <= self.books.rows.num_free
        lacking = self.allocator.lacking_pages(wanted)
        free, evictable = self.books.families.pools["full"].num_free, self.books.tree.num_evictable
        try:
            self.allocator.commit(wanted)
        except OutOfRows:
            assert not rows_fit
            assert domain.snapshot(self.books, records) == before
            return False
        except OutOfPages:
            # Behind a fence, evicted pages arrive later: the plan waits, and only the tree has lost something.
            assert lacking or self.fences
            if lacking:
                assert domain.snapshot(self.books, records) == before
            assert [domain.snapshot_record(record) for record in records] == before[-1]  # type: ignore[index]
            return False
        assert rows_fit
        assert not lacking
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

    @rule(data=st.data(), namespace=st.sampled_from(domain.NAMESPACES[:2]), chunk=st.integers(1, 40))
    def start(self, data: st.DataObject, namespace: Namespace, chunk: int) -> None:
        prompt = data.draw(domain.prompts(self.page_size, max_pages=ROW_PAGES - 1))
        if len(prompt) == 0:
            return
        self.number += 1
        lock = self.books.tree.lock(self.allocator.match(prompt, namespace), count_hit=True)
        prefix = self.books.tree.pages(lock)
        matched = lock.num_pages * self.page_size
        assert matched < len(prompt)
        live = Live(self.books.record(f"r{self.number}"), lock, namespace, prompt, prompt[:matched].tolist())
        end = min(len(prompt), matched + chunk)
        prefixes = {name: self.books.tree.pages(lock, name) for name in self.books.families.pools}
        assert self.memory[prefix].ravel().tolist() == live.tokens
        if self.commits(extend(live.record, end, prefixes)):
            assert live.record.cache_protected_len == matched
            self.live.append(live)
            self.compute(live, end)
        else:
            self.allocator.release(live.record, lock)

    @precondition(lambda self: self.live)
    @rule(number=which, chunk=st.integers(1, 40))
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
        live.record.commit(end)
        live.record.rewind(end)
        del live.tokens[end:]

    @precondition(lambda self: self.live)
    @rule(number=which, priority=domain.priorities)
    def publish(self, number: int, priority: int) -> None:
        live = self.pick(number)
        tokens = domain.tokens_of(live.tokens)
        live.lock = self.allocator.publish(live.record, tokens, live.namespace, live.lock, priority)
        whole = live.record.kv_committed_len // self.page_size * self.page_size
        assert live.record.cache_protected_len == whole
        assert live.lock.num_pages * self.page_size == whole

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
    @rule(number=which, publish=st.booleans())
    def release(self, number: int, publish: bool) -> None:
        if publish:
            self.publish(number, 0)
        live = self.pick(number)
        self.live = [other for other in self.live if other is not live]
        self.allocator.release(live.record, live.lock)
        before = domain.snapshot(self.books, [live.record])
        self.allocator.release(live.record, None)
        assert domain.snapshot(self.books, [live.record]) == before

    @rule(num_pages=st.integers(0, 8))
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
TestRowsSpellTheirTokens.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
