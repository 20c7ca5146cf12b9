"""Forking a row: whole pages shared by count, the partial last page copied, the parent untouched."""

from __future__ import annotations

import numpy as np
import pytest

from devices.page_pool import OutOfPages, PageFamilies, PageFamily
from mem_cache.allocation import KvAllocator
from mem_cache.audit import Holding, audit
from mem_cache.growth import extend, plan
from mem_cache.kv_info import LadderError, Owner, OwnerKind, ReqKvInfo, RowGeometry
from mem_cache.rows import OutOfRows, RowPool
from mem_cache.tree.components import FullPages
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import LockReceipt, Match, PrefixTree

NAMESPACE = Namespace()
TOKENS = np.arange(100, 124, dtype=np.int32)


def new_allocator(page_size: int, num_pages: int = 32, num_rows: int = 4) -> KvAllocator:
    family = PageFamily("full", page_size)
    families = PageFamilies([(family, num_pages)])
    rows = RowPool(num_rows, RowGeometry(page_size, 32, (family,)))
    return KvAllocator(families, rows, PrefixTree((FullPages(families.pools["full"]),), page_size))


def new_record(allocator: KvAllocator, name: str) -> ReqKvInfo:
    return ReqKvInfo(allocator.geometry, Owner(OwnerKind.REQUEST, name))


def grown_parent(allocator: KvAllocator, length: int, published: int) -> tuple[ReqKvInfo, LockReceipt]:
    parent = new_record(allocator, "parent")
    lock = allocator.tree.lock(Match((), 0))
    allocator.commit(plan([extend(parent, length)]))
    parent.schedule(length)
    parent.commit(published)
    lock = allocator.publish(parent, TOKENS, NAMESPACE, lock)
    parent.commit(length)
    return parent, lock


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("published", [0, 3, 8, 12])
def test_the_child_reads_the_parents_tokens_and_owns_its_own_tail(page_size, length, published):
    allocator = new_allocator(page_size)
    parent, lock = grown_parent(allocator, 12, published)
    before, refs = str(parent), allocator.families.pools["full"].refcounts()
    child = new_record(allocator, "child")
    child_lock = allocator.fork(parent, lock, child, length)
    assert str(parent) == before
    assert audit(allocator, [Holding(parent, lock), Holding(child, child_lock)]) == []
    assert child.kv_committed_len == child.kv_scheduled_len == length
    whole = length // page_size
    ours = allocator.rows.pages("full", child.row, 0, child.kv_allocated_len).tolist()
    theirs = allocator.rows.pages("full", parent.row, 0, parent.kv_allocated_len).tolist()
    assert ours[:whole] == theirs[:whole]
    copies = allocator.take_copies()
    if length % page_size:
        [copy] = copies
        assert (copy.source, copy.target) == (theirs[whole], ours[whole])
        assert refs[copy.target] == 0
    else:
        assert copies == ()
    assert allocator.take_copies() == ()
    allocator.release(parent, lock)
    assert audit(allocator, [Holding(child, child_lock)]) == []
    allocator.release(child, child_lock)
    assert audit(allocator, []) == []


def test_a_child_keeps_only_what_it_reads_of_the_tree():
    """Found by the simulator (profile tiny, seed 4): the child kept the parent's last page as well, and ended with
    `capacity` in a pool that holds it."""
    allocator = new_allocator(4, num_pages=3)
    parent, lock = grown_parent(allocator, 8, 8)
    child = new_record(allocator, "child")
    child_lock = allocator.fork(parent, lock, child, 7)
    allocator.release(parent, lock)
    assert (allocator.tree.num_protected, allocator.tree.num_evictable) == (1, 1)
    assert audit(allocator, [Holding(child, child_lock)]) == []
    allocator.commit(plan([extend(child, 12)]))
    allocator.release(child, child_lock)
    assert audit(allocator, []) == []


def test_a_fork_that_finds_no_room_changes_nothing():
    for kwargs, error in (({"num_pages": 3}, OutOfPages), ({"num_rows": 1}, OutOfRows)):
        allocator = new_allocator(4, **kwargs)
        parent, lock = grown_parent(allocator, 12, 8)
        child = new_record(allocator, "child")
        with pytest.raises(error):
            allocator.fork(parent, lock, child, 11)
        assert child.req_pool_idx is None
        assert allocator.take_copies() == ()
        assert audit(allocator, [Holding(parent, lock)]) == []


@pytest.mark.parametrize("length", [0, 13])
def test_only_what_is_committed_can_be_forked(length):
    allocator = new_allocator(4)
    parent, lock = grown_parent(allocator, 12, 8)
    with pytest.raises(LadderError, match=str(length)):
        allocator.fork(parent, lock, new_record(allocator, "child"), length)


def test_the_tree_takes_a_shared_page_from_the_last_that_holds_it():
    """A page of the tree has no other owner, so that evicting it always frees it."""
    allocator = new_allocator(4)
    parent, lock = grown_parent(allocator, 12, 3)
    child = new_record(allocator, "child")
    child_lock = allocator.fork(parent, lock, child, 12)
    lock = allocator.publish(parent, TOKENS, NAMESPACE, lock)
    assert (parent.cache_protected_len, allocator.tree.num_protected) == (0, 0)
    allocator.release(parent, lock)
    child_lock = allocator.publish(child, TOKENS, NAMESPACE, child_lock)
    assert audit(allocator, [Holding(child, child_lock)]) == []
    assert (child.cache_protected_len, allocator.tree.num_protected) == (12, 3)
    allocator.release(child, child_lock)
    allocator.tree.flush()
    assert allocator.families.pools["full"].num_free == allocator.num_pages


def test_what_the_tree_knows_already_is_published_in_spite_of_a_second_holder():
    allocator = new_allocator(4)
    parent, lock = grown_parent(allocator, 12, 3)
    child = new_record(allocator, "child")
    child_lock = allocator.fork(parent, lock, child, 12)
    other, other_lock = grown_parent(allocator, 8, 8)
    lock = allocator.publish(parent, TOKENS, NAMESPACE, lock)
    assert parent.cache_protected_len == 8
    held = [Holding(parent, lock), Holding(child, child_lock), Holding(other, other_lock)]
    assert audit(allocator, held) == []
