"""The prefix tree, case by case; names like B005 are the reports in the project's corpus of cache faults."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from oracles.naive_tree import chained_hash
from strategies import NAMESPACES, POLICIES, TREE_PAGE_SIZES, Books, blocks, make_books, snapshot_tree, tokens_of

from devices.pages import IntArray
from mem_cache.audit import Holding, audit
from mem_cache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, page_hashes
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.node import Node
from mem_cache.tree.policies import EvictionKey
from mem_cache.tree.prefix_tree import Inserted, LockError, LockReceipt, Match

BASE = Namespace()


def key(books: Books, tokens: IntArray, namespace: Namespace = BASE) -> PrefixKey:
    return PrefixKey(tokens, books.page_size, namespace)


def insert(books: Books, tokens: IntArray, namespace: Namespace = BASE, priority: int = 0) -> Inserted:
    """Publish a prompt computed on fresh pages; the copies of known pages go back, as a publisher must do."""
    wanted = key(books, tokens, namespace)
    pages = books.families.pools["full"].alloc(wanted.num_pages)
    inserted = books.tree.insert(wanted, {"full": pages}, priority)
    books.families.pools["full"].release(pages[: inserted.num_known])
    return inserted


def match(books: Books, tokens: IntArray, namespace: Namespace = BASE) -> Match:
    return books.tree.match(key(books, tokens, namespace))


def lock(books: Books, tokens: IntArray, namespace: Namespace = BASE) -> LockReceipt:
    return books.tree.lock(match(books, tokens, namespace))


def well_formed(books: Books, *receipts: LockReceipt) -> None:
    """Nothing to complain of, and the totals are those of the distinct pages."""
    assert audit(books.allocator, [Holding(books.record(), receipt) for receipt in receipts]) == []
    nodes = list(books.tree.nodes())
    locked = {page for node in nodes if node.lock_count for page in node.held["full"].tolist()}
    unlocked = {page for node in nodes if not node.lock_count for page in node.held["full"].tolist()}
    assert (books.tree.num_protected, books.tree.num_evictable) == (len(locked), len(unlocked))
    assert not locked & unlocked
    for node in nodes:
        assert node.num_pages > 0
        assert node.parent is not None
        assert node.parent.children[node.edge] is node


def test_a_prompt_is_found_up_to_its_last_whole_page() -> None:
    books = make_books(4)
    insert(books, tokens_of(range(10)))
    assert match(books, tokens_of(range(10))).num_pages == 2
    assert match(books, tokens_of(range(7))).num_pages == 1
    assert match(books, tokens_of([0, 1, 2, 9])).num_pages == 0
    assert match(books, tokens_of([])) == Match((), 0)


def test_a_prompt_below_one_page_leaves_no_node() -> None:
    books = make_books(16)
    assert insert(books, tokens_of(range(15))) == Inserted(Match((), 0), 0)
    assert list(books.tree.nodes()) == []


def test_known_pages_stand_and_new_ones_are_taken_over() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    first = books.tree.pages(lock(books, blocks([0, 1], 4)))
    inserted = insert(books, blocks([0, 1, 2], 4))
    assert inserted.num_known == 2
    receipt = books.tree.lock(inserted.end)
    assert books.tree.pages(receipt).tolist()[:2] == first.tolist()


# B005: shared pages are counted once.


@pytest.mark.parametrize("order", permutations([48, 33, 31, 64]), ids=str)
def test_b005_prompts_that_part_inside_a_page_share_whole_pages_only(order: tuple[int, ...]) -> None:
    books = make_books(32, num_pages=16)
    held: list[LockReceipt] = []
    for number, shared in enumerate(order):
        prompt = np.concatenate([np.arange(shared), np.arange(96 - shared) + 1000 * (number + 1)]).astype(np.int32)
        insert(books, prompt)
        if number == 1:
            held.append(lock(books, prompt))
        well_formed(books, *held)
    pages = [page for node in books.tree.nodes() for page in node.held["full"].tolist()]
    assert len(pages) == len(set(pages))
    assert books.tree.evict(99) == len(pages) - 3
    books.tree.unlock(held.pop())
    assert books.tree.evict(99) == 3
    assert books.families.pools["full"].num_free == 16
    well_formed(books)


# B007: splits below a lock.


def test_b007_splitting_a_locked_node_keeps_the_totals_and_a_surplus_unlock_raises() -> None:
    books = make_books(1)
    insert(books, tokens_of([1, 2, 3, 4, 5, 6]))
    held = lock(books, tokens_of([1, 2, 3, 4, 5, 6]))
    well_formed(books, held)
    insert(books, tokens_of([1, 2, 3, 7, 8, 9]))
    well_formed(books, held)
    assert (books.tree.num_protected, books.tree.num_evictable) == (6, 3)
    assert books.tree.pages(held).tolist() == [1, 2, 3, 4, 5, 6]
    books.tree.unlock(held)
    well_formed(books)
    assert (books.tree.num_protected, books.tree.num_evictable) == (0, 9)
    before = snapshot_tree(books.tree)
    with pytest.raises(LockError, match="given back already"):
        books.tree.unlock(held)
    assert snapshot_tree(books.tree) == before


def test_a_receipt_of_another_tree_unlocks_nothing() -> None:
    mine, other = make_books(4), make_books(4)
    for books in (mine, other):
        insert(books, blocks([0], 4))
    foreign = lock(other, blocks([0], 4))
    held = lock(mine, blocks([0], 4))
    with pytest.raises(LockError):
        mine.tree.unlock(foreign)
    well_formed(mine, held)


def test_each_lock_on_one_prefix_has_its_own_receipt() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    first, second = lock(books, blocks([0, 1], 4)), lock(books, blocks([0, 1], 4))
    assert first != second
    books.tree.unlock(first)
    assert books.tree.evict(9) == 0
    well_formed(books, second)


def test_a_lock_in_the_middle_of_an_edge_frees_the_rest_of_it_for_eviction() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1, 2], 4))
    held = lock(books, blocks([0], 4))
    well_formed(books, held)
    assert books.tree.evict(9) == 2
    assert books.tree.pages(held).tolist() == [1]
    well_formed(books, held)


@pytest.mark.parametrize("change", ["split by a lock", "split by an insert", "trimmed", "evicted"])
def test_a_match_that_the_tree_has_outrun_is_refused_and_changes_nothing(change: str) -> None:
    books = make_books(4)
    insert(books, blocks([0, 1, 2, 3], 4))
    found = match(books, blocks([0, 1, 2], 4))
    held = []
    if change == "split by a lock":
        held = [books.tree.lock(match(books, blocks([0, 1, 2], 4)))]
    elif change == "split by an insert":
        insert(books, blocks([0, 9], 4))
    else:
        books.tree.evict(2 if change == "trimmed" else 4)
    before = snapshot_tree(books.tree)
    with pytest.raises(LockError, match="a match of 3 pages is out of date"):
        books.tree.lock(found)
    assert snapshot_tree(books.tree) == before
    well_formed(books, *held)


def test_a_match_outlives_changes_elsewhere_in_the_tree() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1, 2, 3], 4))
    found = match(books, blocks([0, 1], 4))
    insert(books, blocks([5, 6], 4))
    insert(books, blocks([0, 1, 2, 3, 4], 4))
    well_formed(books, books.tree.lock(found))


# B026: a namespace's parts have tags.

SAME_WORD = (
    Namespace(),
    Namespace(extra_key="1"),
    Namespace(cache_salt="1"),
    Namespace(extra_key="1", cache_salt="1"),
    Namespace(weights_version=1),
    Namespace(extra_key=""),
    Namespace(cache_salt=""),
)


@pytest.mark.parametrize(("one", "other"), combinations(SAME_WORD, 2), ids=str)
def test_b026_the_same_word_in_another_part_of_the_namespace_is_another_prefix(
    one: Namespace, other: Namespace
) -> None:
    books = make_books(4)
    prompt = blocks([0, 1, 2], 4)
    insert(books, prompt, one)
    assert match(books, prompt, other).num_pages == 0
    assert match(books, prompt, one).num_pages == 3
    assert insert(books, prompt, other).num_known == 0
    well_formed(books)


def test_b026_no_extra_key_can_be_forged_into_another_part() -> None:
    books = make_books(1)
    prompt = tokens_of([7, 7])
    insert(books, prompt, Namespace(cache_salt="x"))
    salt = Namespace(cache_salt="x").encoded.decode("latin-1")
    for forged in ("x", "salt", "saltx", salt, "salt\0x", salt[8:]):
        assert match(books, prompt, Namespace(extra_key=forged)).num_pages == 0
        assert match(books, prompt, Namespace(extra_key=forged, cache_salt="x")).num_pages == 0


def test_b042_new_weights_find_nothing_that_old_weights_computed() -> None:
    books = make_books(4)
    prompt = blocks([0, 1], 4)
    insert(books, prompt, Namespace(weights_version=0))
    assert match(books, prompt, Namespace(weights_version=1)).num_pages == 0
    insert(books, prompt, Namespace(weights_version=1))
    assert match(books, prompt, Namespace(weights_version=1)).num_pages == 2
    assert books.tree.num_evictable == 4


# B031: tokens are compared; hashes chain over parent and namespace.


@pytest.mark.parametrize("at", range(0, 11))
def test_b031_tokens_that_fool_a_polynomial_hash_do_not_match(at: int) -> None:
    books = make_books(4)
    prompt = tokens_of(range(100, 112))
    insert(books, prompt)
    forged = prompt.copy()
    forged[at] += 31
    forged[at + 1] -= 1
    assert match(books, forged).num_pages == at // 4
    honest = page_hashes(b"", key(books, prompt).raw, 16)
    assert not set(honest[at // 4 :]) & set(page_hashes(b"", key(books, forged).raw, 16)[at // 4 :])


def test_b031_minus_one_and_minus_two_are_different_tokens() -> None:
    books = make_books(2)
    insert(books, tokens_of([1, -1]))
    assert match(books, tokens_of([1, -2])).num_pages == 0
    assert match(books, tokens_of([1, -1])).num_pages == 1


def test_b031_no_two_of_many_pages_have_one_hash() -> None:
    raw = np.random.default_rng(0).integers(0, 3, 400_000, dtype=np.int32)
    pages = {raw[start : start + 16].tobytes() for start in range(0, len(raw), 16)}
    assert len({page_hashes(b"parent", page, 64)[0] for page in pages}) == len(pages)


# B037: the locked node itself stays.


@pytest.mark.parametrize("policy", POLICIES)
def test_b037_a_lock_keeps_the_node_it_ends_in_and_everything_above(policy: str) -> None:
    books = make_books(4, policy=policy)
    insert(books, blocks([0], 4))
    insert(books, blocks([0, 1], 4))
    insert(books, blocks([0, 2], 4))
    held = lock(books, blocks([0, 1], 4))
    assert books.tree.evict(99) == 1
    assert match(books, blocks([0, 1], 4)).num_pages == 2
    well_formed(books, held)
    books.tree.unlock(held)
    assert books.tree.evict(99) == 2
    assert list(books.tree.nodes()) == []
    assert books.families.pools["full"].num_free == 16
    well_formed(books)


# B041: a lookup that is not whole pages.


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129])
def test_b041_an_unaligned_lookup_is_floored_first_and_makes_no_empty_node(length: int) -> None:
    books = make_books(64)
    insert(books, tokens_of(range(64)))
    insert(books, tokens_of(range(128)))
    before = snapshot_tree(books.tree)
    found = match(books, tokens_of(range(length)))
    assert found.num_pages == min(length, 128) // 64
    assert snapshot_tree(books.tree) == before
    held = books.tree.lock(found)
    well_formed(books, held)
    books.tree.unlock(held)
    assert books.tree.evict(99) == 2
    well_formed(books)


# B045: a hole ends the match.


@pytest.mark.parametrize("dropped", [s for n in range(4) for s in combinations([1, 2, 3], n)], ids=str)
def test_b045_a_match_is_the_leading_run_only(dropped: tuple[int, ...]) -> None:
    """The tree evicts from the tail, so a hole can come only from keys: pages 2, 3 without 1 are another prefix."""
    books = make_books(1)
    kept = [page for page in (1, 2, 3) if page not in dropped]
    insert(books, tokens_of(kept))
    leading = next((n for n, page in enumerate([*kept, None]) if page != n + 1), 0)
    assert match(books, tokens_of([1, 2, 3])).num_pages == leading


@pytest.mark.parametrize("num_evicted", range(5))
def test_b045_eviction_trims_the_tail_so_that_what_is_left_is_a_leading_run(num_evicted: int) -> None:
    books = make_books(4)
    prompt = blocks([0, 1, 2, 3], 4)
    insert(books, prompt)
    assert books.tree.evict(num_evicted) == num_evicted
    assert match(books, prompt).num_pages == 4 - num_evicted
    assert books.families.pools["full"].num_free == 12 + num_evicted
    well_formed(books)
    insert(books, prompt)
    assert match(books, prompt).num_pages == 4
    well_formed(books)


def test_b045_what_hangs_behind_the_rest_of_an_edge_is_not_reached_by_skipping_the_rest() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1, 2], 4))
    insert(books, blocks([0, 1, 3], 4))
    assert match(books, blocks([0, 2], 4)).num_pages == 1
    assert match(books, blocks([0, 3, 3], 4)).num_pages == 1


# Matching only looks.


@pytest.mark.parametrize("page_size", TREE_PAGE_SIZES)
def test_matching_changes_nothing_at_all(page_size: int) -> None:
    books = make_books(page_size)
    insert(books, blocks([0, 1, 2], page_size))
    insert(books, blocks([0, 1, 3], page_size))
    held = lock(books, blocks([0], page_size))
    before = snapshot_tree(books.tree)
    for numbers in ([], [0], [0, 1], [0, 1, 2], [0, 1, 2, 4], [0, 9], [9]):
        for namespace in NAMESPACES:
            match(books, blocks(numbers, page_size), namespace)
            match(books, blocks([*numbers, 5], page_size)[:-1], namespace)
    assert snapshot_tree(books.tree) == before
    well_formed(books, held)


def test_edges_divide_on_page_borders_only() -> None:
    books = make_books(4)
    insert(books, tokens_of([*range(8), *range(8)]))
    insert(books, tokens_of([*range(7), 99, *range(8)]))
    edges = sorted((node.num_pages, len(node.raw) // 16) for node in books.tree.nodes())
    assert edges == [(1, 1), (3, 3), (3, 3)]
    well_formed(books)


# The order of eviction.


def three_prompts(policy: str) -> Books:
    """Leaves a, b, c (blocks 0, 1, 2) inserted in this order."""
    books = make_books(4, policy=policy)
    for number in range(3):
        insert(books, blocks([number], 4), priority=2 - number)
    return books


def use(books: Books, number: int, times: int = 1) -> None:
    for _ in range(times):
        books.tree.unlock(books.tree.lock(match(books, blocks([number], 4)), count_hit=True))


def eviction_order(books: Books) -> list[int]:
    order = []
    left = [n for n in range(3) if match(books, blocks([n], 4)).num_pages]
    while left:
        assert books.tree.evict(1) == 1
        now = [n for n in left if match(books, blocks([n], 4)).num_pages]
        order += sorted(set(left) - set(now))
        left = now
    return order


@pytest.mark.parametrize(
    ("policy", "uses", "order"),
    [
        ("lru", [], [0, 1, 2]),
        ("lru", [0], [1, 2, 0]),
        ("lru", [0, 0, 1], [2, 0, 1]),
        ("lfu", [0, 0, 1, 2], [1, 2, 0]),
        ("lfu", [2], [0, 1, 2]),
        ("slru", [0, 0, 1, 2], [1, 2, 0]),
        ("slru", [0, 0, 0, 1, 1, 2], [2, 0, 1]),
        ("priority", [0, 1], [2, 1, 0]),
        ("priority", [2, 2, 2], [2, 1, 0]),
    ],
)
def test_the_policy_orders_the_leaves(policy: str, uses: list[int], order: list[int]) -> None:
    books = three_prompts(policy)
    for number in uses:
        use(books, number)
    assert eviction_order(books) == order


def test_a_lock_of_a_publisher_is_not_a_hit() -> None:
    books = three_prompts("lfu")
    books.tree.unlock(lock(books, blocks([0], 4)))
    assert all(node.hits == 0 for node in books.tree.nodes())


def test_publishing_again_with_a_higher_priority_raises_the_whole_path_and_never_lowers_it() -> None:
    books = make_books(4, policy="priority")
    insert(books, blocks([0, 1], 4), priority=1)
    insert(books, blocks([0, 2], 4), priority=3)
    insert(books, blocks([0, 2], 4), priority=0)
    priorities = {node.edge: node.priority for node in books.tree.nodes()}
    assert sorted(priorities.values()) == [1, 3, 3]


def test_a_parent_waits_for_its_children_and_is_evicted_after_them() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    insert(books, blocks([0, 2], 4))
    use(books, 0)
    assert books.tree.evict(2) == 2
    assert match(books, blocks([0, 1], 4)).num_pages == 1
    assert books.tree.evict(1) == 1
    assert list(books.tree.nodes()) == []


def test_evicting_nothing_and_evicting_an_empty_tree_evict_nothing() -> None:
    books = make_books(4)
    assert books.tree.evict(3) == 0
    insert(books, blocks([0], 4))
    assert books.tree.evict(0) == 0
    assert books.tree.num_evictable == 1


def test_the_queue_of_eviction_stays_as_short_as_the_tree_is_small() -> None:
    books = make_books(4)
    for number in range(3):
        insert(books, blocks([0, number], 4))
    for _ in range(200):
        use(books, 0)
        books.tree.unlock(lock(books, blocks([0, 1], 4)))
    assert len(books.tree._queue) <= len(list(books.tree.nodes()))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_eviction_does_not_look_at_every_leaf(policy: str) -> None:
    books = make_books(4, num_pages=100, policy=policy)
    for number in range(100):
        insert(books, blocks([number], 4), priority=number % 3)
    looked_at: list[Node] = []
    order = books.tree._order

    def watched(node: Node) -> EvictionKey:
        looked_at.append(node)
        return order(node)

    books.tree._order = watched
    assert books.tree.evict(1) == 1
    assert len(looked_at) < 5


# Flush.


def test_a_flush_empties_the_tree_and_gives_every_page_back() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    insert(books, blocks([0, 2], 4), Namespace(extra_key="x"))
    books.tree.flush()
    assert list(books.tree.nodes()) == []
    assert books.families.pools["full"].num_free == 16
    assert books.events.take()[-1] == AllBlocksCleared()
    well_formed(books)


def test_b042_a_flush_that_cannot_be_done_raises_and_changes_nothing() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    held = lock(books, blocks([0], 4))
    before, _ = snapshot_tree(books.tree), books.events.take()
    with pytest.raises(LockError, match="1 pages are in use"):
        books.tree.flush()
    assert snapshot_tree(books.tree) == before
    assert books.events.take() == ()
    well_formed(books, held)


def test_a_lock_on_nothing_does_not_stand_in_the_way_of_a_flush_and_goes_back_once() -> None:
    books = make_books(4)
    nothing = lock(books, blocks([0], 4))
    assert books.tree.pages(nothing).tolist() == []
    insert(books, blocks([0], 4))
    books.tree.flush()
    well_formed(books, nothing)
    books.tree.unlock(nothing)
    with pytest.raises(LockError):
        books.tree.unlock(nothing)


# KV events.


def test_events_tell_what_became_readable_and_what_went() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    insert(books, blocks([0, 2], 4))
    whole, branch = books.events.take()
    assert isinstance(whole, BlockStored)
    assert isinstance(branch, BlockStored)
    assert whole.token_ids == tuple(blocks([0, 1], 4).tolist())
    assert branch.token_ids == tuple(blocks([2], 4).tolist())
    assert branch.parent_block_hash == whole.block_hashes[0]
    assert whole.block_hashes[0] == chained_hash((BASE, tuple(blocks([0], 4).tolist())), 4)
    assert (whole.block_size, whole.namespace) == (4, BASE)
    books.tree.evict(1)
    assert books.events.take() == (BlockRemoved((whole.block_hashes[1],)),)


def test_a_known_prompt_makes_no_event() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1], 4))
    books.events.take()
    insert(books, blocks([0], 4))
    insert(books, blocks([0, 1], 4))
    books.tree.unlock(lock(books, blocks([0], 4)))
    assert books.events.take() == ()


def test_equal_tokens_hash_differently_in_another_namespace_and_behind_another_prefix() -> None:
    books = make_books(4)
    for namespace in NAMESPACES:
        insert(books, blocks([0, 1], 4), namespace)
    insert(books, blocks([2, 1], 4))
    stored = [event for event in books.events.take() if isinstance(event, BlockStored)]
    hashes = [block_hash for event in stored for block_hash in event.block_hashes]
    assert len(set(hashes)) == len(hashes) == 2 * len(NAMESPACES) + 2


def test_the_walk_shortens_a_match_to_where_every_component_can_continue() -> None:
    books = make_books(4)
    insert(books, blocks([0, 1, 2], 4))
    insert(books, blocks([0, 1, 3], 4))

    class EveryOther:
        """KV that a computation may continue from at even pages only."""

        family = "state"

        def legal_end(self, path: list[Node], num_pages: int) -> int:
            return num_pages - num_pages % 2

    books.tree.components = (*books.tree.components, EveryOther())  # type: ignore[assignment]
    found = match(books, blocks([0, 1, 2], 4))
    assert found.num_pages == 2
    assert sum(node.num_pages for node in found.path) == 2
    assert match(books, blocks([0], 4)) == Match((), 0)


def test_pages_behind_locks_are_those_that_nobody_else_locks() -> None:
    """What giving some receipts back would unlock, for every choice among four on one tree."""
    books = make_books(4)
    for head in ([0, 1, 2], [0, 1, 3, 4], [5]):
        insert(books, blocks(head, 4))
    receipts = [lock(books, blocks(head, 4)) for head in ([0, 1, 2], [0], [0, 1, 3, 4], [0, 1, 3, 4])]
    for n in range(len(receipts) + 1):
        for chosen in combinations(range(len(receipts)), n):
            before = books.tree.num_evictable
            promised = books.tree.num_pages_behind([receipts[i] for i in chosen])
            for i in chosen:
                books.tree.unlock(receipts[i])
            assert books.tree.num_evictable - before == promised
            for i in chosen:
                receipts[i] = lock(books, blocks(([0, 1, 2], [0], [0, 1, 3, 4], [0, 1, 3, 4])[i], 4))
    well_formed(books, *receipts)
