"""What windows and sidecars add to the tree: where a match may end, which pages go, who has a count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import blocks, make_books

from devices.page_pool import PagePool
from devices.pages import IntArray
from mem_cache.audit import audit
from mem_cache.tree.components import SidecarPages, WindowPages
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.node import Node
from mem_cache.tree.prefix_tree import PrefixTree

PAGE = 4
BASE = Namespace()


def ids(*pages: int) -> IntArray:
    return np.array(pages, dtype=np.int32)


def key(*numbers: int) -> PrefixKey:
    return PrefixKey(blocks(list(numbers), PAGE), PAGE, BASE)


def a_tree(*, window: int = 0, per_page: int = 0) -> tuple[PrefixTree, dict[str, PagePool]]:
    books = make_books(PAGE, num_pages=40, window=window > 0, coarse=per_page)
    if window:
        component = WindowPages(books.families.pools["window"], window, PAGE)
        books.tree.components = (books.tree.components[0], component)
        books.tree._by_family["window"] = component
    return books.tree, dict(books.families.pools)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 17), st.integers(1, 4))
def test_a_match_ends_where_its_whole_window_is_alive(alive: list[bool], window: int, cut: int) -> None:
    pool = PagePool(20, "window")
    pages = ids(*[i + 1 if is_alive else 0 for i, is_alive in enumerate(alive)])
    parts = [pages[i : i + cut] for i in range(0, len(pages), cut)]
    path = [Node(None, b"", b"", len(part), {"window": part}) for part in parts]
    component = WindowPages(pool, window, PAGE)

    def can_continue_from(end: int) -> bool:
        needed = {position // PAGE for position in range(max(0, end * PAGE - window), end * PAGE)}
        return all(alive[page] for page in needed)

    for length in range(len(alive) + 1):
        expected = max(end for end in range(length + 1) if can_continue_from(end))
        reached = path[: -(-length // cut)]
        assert component.legal_end(reached, length) == expected


def insert(tree: PrefixTree, pools: dict[str, PagePool], *numbers: int, gone: int = 0) -> PrefixKey:
    """Publish pages whose window has lost its first `gone`."""
    new = key(*numbers)
    full = pools["full"].alloc(len(numbers))
    window = np.append(np.zeros(gone, dtype=np.int32), pools["window"].alloc(len(numbers) - gone)).astype(np.int32)
    inserted = tree.insert(new, {"full": full, "window": window})
    pools["full"].release(full[: inserted.num_known])
    trees = tree.pages(lock := tree.lock(inserted.end), "window")
    tree.unlock(lock)
    pools["window"].release(window[(window != 0) & (window != trees)])
    return new


def test_a_lost_window_is_filled_by_who_computes_it_again() -> None:
    tree, pools = a_tree(window=2 * PAGE)
    lost = insert(tree, pools, 1, 2, 3, 4, gone=4)
    assert tree.match(lost).num_pages == 0
    again = insert(tree, pools, 1, 2, 3, gone=1)
    assert tree.match(again).num_pages == 3
    assert tree.match(lost).num_pages == 3
    assert pools["window"].num_free == 40 - 2


def test_a_lock_keeps_one_window_and_eviction_takes_the_rest_first_pages_first() -> None:
    tree, pools = a_tree(window=2 * PAGE)
    old, new = insert(tree, pools, 1, 2, 3, 4), insert(tree, pools, 9, 8, 7)
    lock = tree.lock(tree.match(old))
    assert tree.num_evictable_of("window") == 2 + 3
    assert tree.num_evictable_of("window", [lock]) == 4 + 3
    assert tree.evict_family("window", 1) == 1
    assert tree.match(new).num_pages == 3  # (9) is gone; its last two pages are a window
    assert tree.evict_family("window", 9) == 4
    assert tree.match(new).num_pages == 0
    assert tree.match(old).num_pages == 4
    tree.unlock(lock)
    assert tree.evict_family("window", 9) == 2
    assert (pools["window"].num_free, tree.num_evictable) == (40, 7)


def test_what_is_evicted_as_a_whole_takes_its_window_along() -> None:
    tree, pools = a_tree(window=2 * PAGE)
    insert(tree, pools, 1, 2, 3, 4, gone=1)
    assert tree.evict(3) == 3
    assert pools["window"].num_free == 40
    insert(tree, pools, 5, 6)
    tree.flush()
    assert [pool.num_free for pool in pools.values()] == [40, 40]


def test_nodes_on_a_path_share_a_sidecar_page_and_each_has_a_count() -> None:
    tree, pools = a_tree(per_page=4)
    pool = pools["coarse"]
    x, y = pool.alloc(2).tolist()
    tree.insert(key(1, 2, 3, 4, 5), {"full": pools["full"].alloc(5), "coarse": ids(x, x, x, x, y)})
    pool.release(ids(x, y))
    assert pool.refcounts()[[x, y]].tolist() == [1, 1]
    lock = tree.lock(tree.match(key(1, 2)))  # splits inside x
    assert pool.refcounts()[[x, y]].tolist() == [2, 1]
    assert tree.num_evictable_of("coarse") == 1
    assert tree.evict(3) == 3
    assert pool.refcounts()[[x, y]].tolist() == [1, 0]
    tree.unlock(lock)
    tree.flush()
    assert pool.num_free == pool.num_pages


def test_a_row_names_the_deepest_nodes_page_of_each_group() -> None:
    component = SidecarPages(PagePool(9, "coarse"), 4)
    assert component.for_row(ids(1, 1, 2, 2, 3, 3, 4)).tolist() == [2, 4]
    assert component.for_row(ids()).tolist() == []


def test_pages_of_a_sidecar_go_with_their_leaves_until_enough_are_free() -> None:
    books = make_books(PAGE, num_pages=40, coarse=4)
    tree, pool = books.tree, books.families.pools["coarse"]
    for first in (1, 20):
        own = pool.alloc(1)
        held = {"full": books.families.pools["full"].alloc(3), "coarse": np.repeat(own, 3)}
        tree.insert(key(first, first + 1, first + 2), held)
        pool.release(own)
    assert tree.evict_family("coarse", 1) == 1
    assert tree.num_evictable == 3
    assert audit(books.allocator, []) == []


@pytest.mark.parametrize("family", ["window", "coarse"])
def test_the_audit_sees_a_page_that_is_counted_wrong(family: str) -> None:
    tree_books = make_books(PAGE, num_pages=12, window=True, coarse=2)
    held = {name: pool.alloc(2) for name, pool in tree_books.families.pools.items()}
    tree_books.tree.insert(key(1, 2), held)
    tree_books.families.pools["coarse"].release(held["coarse"])
    assert audit(tree_books.allocator, []) == []
    tree_books.families.pools[family].retain(held[family][:1])
    assert [violation.kind for violation in audit(tree_books.allocator, [])] == ["miscounted"]
