"""The prefix tree against a dictionary of prefixes, for every policy, with its KV events replayed beside it."""

from __future__ import annotations

import strategies as domain
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from oracles.naive_tree import NaiveTree, Prefix, chained_hash

from devices.pages import IntArray
from mem_cache.audit import Holding, audit
from mem_cache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.node import Node
from mem_cache.tree.prefix_tree import LockError, LockReceipt

NUM_PAGES = 48


class TreeIsADictionary(RuleBasedStateMachine):
    """match, insert, lock, unlock, evict and flush; the same answers, the same pages, the same victims."""

    locks = Bundle("locks")

    @initialize(page_size=domain.tree_page_sizes, policy=domain.policies)
    def open_books(self, page_size: int, policy: str) -> None:
        self.books = domain.make_books(page_size, num_pages=NUM_PAGES, policy=policy)
        self.tree, self.pool = self.books.tree, self.books.families.pools["full"]
        self.naive = NaiveTree(page_size, policy)
        self.receipts: list[LockReceipt] = []
        self.heard: set[bytes] = set()

    def key(self, tokens: IntArray, namespace: Namespace) -> PrefixKey:
        return PrefixKey(tokens, self.naive.page_size, namespace)

    def draw_prompt(self, data: st.DataObject) -> IntArray:
        return data.draw(domain.prompts(self.naive.page_size))

    @rule(data=st.data(), namespace=domain.namespaces, priority=domain.priorities)
    def insert(self, data: st.DataObject, namespace: Namespace, priority: int) -> None:
        tokens = self.draw_prompt(data)
        key = self.key(tokens, namespace)
        if key.num_pages > self.pool.num_free:
            return
        pages = self.pool.alloc(key.num_pages)
        inserted = self.tree.insert(key, {"full": pages}, priority)
        assert inserted.num_known == self.naive.insert(namespace, tokens.tolist(), pages.tolist(), priority)
        assert inserted.end.num_pages == key.num_pages
        self.pool.release(pages[: inserted.num_known])

    @rule(data=st.data(), namespace=domain.namespaces)
    def match(self, data: st.DataObject, namespace: Namespace) -> None:
        tokens = self.draw_prompt(data)
        before = domain.snapshot_tree(self.tree)
        match = self.tree.match(self.key(tokens, namespace))
        assert domain.snapshot_tree(self.tree) == before
        assert match.num_pages == len(self.naive.match(namespace, tokens.tolist()))

    @rule(target=locks, data=st.data(), namespace=domain.namespaces, count_hit=st.booleans())
    def lock(self, data: st.DataObject, namespace: Namespace, count_hit: bool) -> tuple[LockReceipt, Prefix]:
        tokens = self.draw_prompt(data)
        pages = self.naive.match(namespace, tokens.tolist())
        receipt = self.tree.lock(self.tree.match(self.key(tokens, namespace)), count_hit=count_hit)
        assert self.tree.pages(receipt).tolist() == pages
        self.receipts.append(receipt)
        return receipt, self.naive.lock(namespace, tokens.tolist(), count_hit=count_hit)

    @rule(held=locks)
    def read_locked_pages(self, held: tuple[LockReceipt, Prefix]) -> None:
        receipt, (namespace, tokens) = held
        assert self.tree.pages(receipt).tolist() == self.naive.match(namespace, tokens)

    @rule(target=locks, held=consumes(locks), again=st.booleans())
    def unlock(self, held: tuple[LockReceipt, Prefix], again: bool) -> object:
        receipt, locked = held
        self.tree.unlock(receipt)
        self.naive.unlock(locked)
        self.receipts.remove(receipt)
        if again:
            before = domain.snapshot_tree(self.tree)
            try:
                self.tree.unlock(receipt)
            except LockError:
                assert domain.snapshot_tree(self.tree) == before
            else:
                raise AssertionError("a receipt was given back twice")
        return multiple()

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        free = set(self.pool.free_pages().tolist())
        victims = self.naive.evict(num_pages)
        assert self.tree.evict(num_pages) == len(victims)
        assert set(self.pool.free_pages().tolist()) - free == set(victims)

    @rule()
    def flush(self) -> None:
        if self.naive.protected():
            before = domain.snapshot_tree(self.tree)
            try:
                self.tree.flush()
            except LockError:
                assert domain.snapshot_tree(self.tree) == before
            else:
                raise AssertionError("pages in use were flushed")
        else:
            self.tree.flush()
            assert set(self.naive.evict(NUM_PAGES)) | set(self.pool.free_pages().tolist()) == set(
                range(1, 1 + NUM_PAGES)
            )

    @invariant()
    def the_same_prefixes_have_the_same_pages_and_the_same_past(self) -> None:
        spelled: dict[tuple[bytes, int], tuple[int, ...]] = {}
        for node in self.tree.nodes():
            first, raw = _path(node)
            for number, page in enumerate(node.held["full"].tolist()):
                end = len(raw) - len(node.raw) + (number + 1) * self.tree.page_bytes
                spelled[first + raw[:end], end] = (page, node.hits, node.priority, node.last_access)
        want = {}
        for (namespace, tokens), cached in self.naive.pages.items():
            raw = domain.tokens_of(tokens).astype("<i4").tobytes()
            want[namespace.encoded + raw, len(raw)] = (cached.page, cached.hits, cached.priority, cached.last_use)
        assert _by_age(spelled) == _by_age(want)

    @invariant()
    def counters_are_those_of_distinct_pages(self) -> None:
        assert self.tree.num_protected == len(self.naive.protected())
        assert self.tree.num_evictable == len(self.naive.evictable())
        assert self.pool.num_free == NUM_PAGES - len(self.naive.pages)
        assert len(self.tree._queue) <= len(self.naive.pages)

    @invariant()
    def the_audit_finds_nothing(self) -> None:
        record = self.books.record()
        assert audit(self.books.allocator, [Holding(record, receipt) for receipt in self.receipts]) == []

    @invariant()
    def replayed_events_give_the_cached_hashes(self) -> None:
        for event in self.books.events.take():
            if isinstance(event, BlockStored):
                assert not self.heard & set(event.block_hashes)
                self.heard |= set(event.block_hashes)
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            elif isinstance(event, BlockRemoved):
                assert self.heard >= set(event.block_hashes)
                self.heard -= set(event.block_hashes)
            else:
                assert event == AllBlocksCleared()
                assert not self.heard
        assert self.heard == self.naive.hashes()


def _by_age(pages: dict[tuple[bytes, int], tuple[int, ...]]) -> dict[tuple[bytes, int], tuple[int, ...]]:
    """The same, with each time of last use replaced by its place among them."""
    times = sorted({past[-1] for past in pages.values()})
    return {prefix: (*past[:-1], times.index(past[-1])) for prefix, past in pages.items()}


def _path(node: Node) -> tuple[bytes, bytes]:
    """The namespace and the tokens from the root to the end of a node, as bytes."""
    raw = b""
    while node.parent is not None:
        raw = node.raw + raw
        top, node = node, node.parent
    return top.edge[: len(top.edge) - _page_bytes(top)], raw


def _page_bytes(node: Node) -> int:
    return len(node.raw) // node.num_pages


TestTreeIsADictionary = TreeIsADictionary.TestCase
TestTreeIsADictionary.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(st.data(), domain.page_sizes)
def test_every_page_of_every_prefix_and_namespace_has_a_hash_of_its_own(data: st.DataObject, page_size: int) -> None:
    prefixes: set[Prefix] = set()
    naive = NaiveTree(page_size)
    for tokens in data.draw(st.lists(domain.prompts(page_size), max_size=3)):
        for namespace in domain.NAMESPACES:
            prefixes.update(naive.prefixes(namespace, tokens.tolist()))
    assert len({chained_hash(prefix, page_size) for prefix in prefixes}) == len(prefixes)


words = st.none() | st.text(max_size=4) | st.sampled_from(["extra", "salt", "weights", "0", "1"])


@given(st.lists(st.builds(Namespace, words, words, st.integers(-1, 11)), min_size=2, max_size=2), st.integers(1, 3))
def test_no_two_namespaces_and_prefixes_have_one_first_edge(pair: list[Namespace], page_size: int) -> None:
    one, other = pair
    edges = {
        PrefixKey(domain.tokens_of([token] * page_size), page_size, namespace).edge(0)
        for namespace in (one, other)
        for token in (0, 1)
    }
    assert len(edges) == (2 if one == other else 4)
    assert (one.encoded == other.encoded) == (one == other)
