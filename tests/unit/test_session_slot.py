"""The slot: what a turn may continue from, what goes back, and that nothing is lost or freed twice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from devices.base import Capabilities
from devices.page_pool import PageFamilies, PageFamily
from devices.pages import ceil_page, floor_page
from mem_cache.allocation import KvAllocator
from mem_cache.audit import audit
from mem_cache.growth import extend, plan
from mem_cache.kv_info import LadderError, OwnershipError, RecurrentState, ReqKvInfo, RowGeometry, Turn
from mem_cache.rows import RowPool
from mem_cache.tree.components import FullPages
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import Match, PrefixTree
from session.slot import SessionSlot, legal_len, resumable_len

TURN = Turn("r1", 0)
TOKENS = np.arange(1, 600, dtype=np.int32)
BASE = Namespace()


def capabilities(unit: str) -> Capabilities:
    return Capabilities(page_sizes=(1, 4, 16, 128), default_page_size=16, resume_unit=unit)


def new_allocator(page_size: int, *, num_pages: int = 600, caching: bool = True) -> KvAllocator:
    family = PageFamily("full", page_size)
    families = PageFamilies([(family, num_pages)])
    rows = RowPool(4, RowGeometry(page_size, ceil_page(512, page_size), (family,)))
    return KvAllocator(families, rows, PrefixTree((FullPages(families.pools["full"]),), page_size), caching=caching)


def slot_with(
    allocator: KvAllocator, unit: str, *, committed: int, allocated: int, protected: int, namespace: Namespace = BASE
) -> SessionSlot:
    """An idle slot whose row has these lengths."""
    slot = SessionSlot(allocator, capabilities(unit), "s", namespace)
    record = slot.record
    slot.held.lock = allocator.tree.lock(Match((), 0))
    allocator.commit(plan([extend(record, allocated)]))
    record.schedule(committed)
    record.commit(min(committed, ceil_page(protected, record.geometry.page_size)))
    slot.held.lock = allocator.publish(record, TOKENS[:protected], namespace, slot.held.lock)
    record.commit(committed)
    assert record.cache_protected_len == protected
    return slot


@dataclass(frozen=True)
class Resume:
    """A line of the reference's measured clamp table (sessions-and-trees.md 2.3).

    Attributes:
        prefix: what the turn continues from; 0: the row goes back and the turn prefills.
        freed: first and last token of the pages that go back; None when none does. Rows here own whole pages, so a
            range ends at the page border behind the reference's.
    """

    unit: str
    page_size: int
    committed: int
    allocated: int
    key: int
    protected: int
    prefix: int
    freed: tuple[int, int] | None


TABLE = [
    Resume("page", 128, 130, 140, 200, 0, 128, (128, 256)),
    Resume("page", 128, 100, 110, 200, 0, 0, (0, 128)),
    Resume("page", 128, 256, 256, 255, 0, 128, (128, 256)),
    Resume("page", 128, 256, 256, 127, 128, 0, (128, 256)),
    Resume("token", 128, 130, 140, 200, 0, 130, None),
    Resume("token", 128, 130, 400, 200, 0, 130, (256, 512)),
    Resume("token", 16, 100, 100, 99, 96, 99, None),
    Resume("token", 1, 100, 103, 99, 0, 99, (99, 103)),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda c: f"{c.unit}-{c.page_size}-{c.committed}-{c.allocated}-{c.key}")
def test_the_measured_clamp_table(case):
    allocator = new_allocator(case.page_size, caching=case.protected > 0)
    slot = slot_with(allocator, case.unit, committed=case.committed, allocated=case.allocated, protected=case.protected)
    free = allocator.families.pools["full"].num_free
    in_tree = allocator.tree.num_evictable + allocator.tree.num_protected
    assert slot.lend(TURN, case.key, TOKENS, BASE) == case.prefix
    freed = allocator.families.pools["full"].num_free - free
    # A row that goes back leaves whole pages to the tree rather than freeing them.
    freed += allocator.tree.num_evictable + allocator.tree.num_protected - in_tree
    lo, hi = case.freed or (0, 0)
    assert freed * case.page_size == hi - lo
    record = slot.record
    assert record.borrower == TURN
    assert record.kv_committed_len == record.kv_scheduled_len == case.prefix
    assert record.kv_allocated_len == ceil_page(case.prefix, case.page_size)
    assert slot.has_row is (case.prefix > 0)
    assert audit(allocator, [slot.held]) == []


WINDOWED = [
    # cursor 96, page 16: the window's KV before 96 is gone. The reference resumes the first at 80 and reads it.
    (90, 8, 0),
    (99, 3, 99),
    (99, 4, 99),  # computing token 99 reads [96, 99]: all there
    (99, 5, 0),
    (98, 2, 98),
]


@pytest.mark.parametrize(("key", "window", "prefix"), WINDOWED)
def test_a_row_whose_window_is_gone_is_not_continued(key, window, prefix):
    geometry = RowGeometry(16, 512, (PageFamily("full", 16), PageFamily("window", 16, window=window)))
    record = ReqKvInfo(geometry)
    record.bind(1)
    record.reserve(112)
    record.schedule(100)
    record.commit(100)
    record.slide_window(96)
    assert resumable_len(record, key, capabilities("token")) == prefix
    assert legal_len(record, key) == prefix


def test_every_length_that_may_be_resumed_is_legal_and_the_largest():
    """Brute force over every small record: the answer is the largest length that breaks no rule."""
    checked = 0
    for page_size, unit, state_at in itertools.product((1, 2, 4), ("token", "page"), (None, 0, 3, 4, 6)):
        geometry = RowGeometry(page_size, 8, (PageFamily("full", page_size), PageFamily("w", page_size, window=2)))
        for protected, committed, cursor, wanted in itertools.product(range(9), range(9), range(9), range(10)):
            record = ReqKvInfo(geometry)
            record.bind(1)
            try:
                record.reserve(8)
                record.schedule(committed)
                record.commit(committed)
                record.slide_window(cursor)
                record.protect(protected)
            except LadderError:
                continue
            if state_at is not None:
                record.state = RecurrentState(1, state_at)
            legal = [
                n
                for n in range(1, min(wanted, committed) + 1)
                if n >= protected
                and (unit == "token" or n % page_size == 0)
                and (cursor == 0 or n + 1 - 2 >= cursor)
                and (state_at is None or n == state_at)
            ]
            assert resumable_len(record, wanted, capabilities(unit)) == max(legal, default=0)
            checked += 1
    assert checked > 5000


def test_only_one_borrower_and_only_he_gives_back():
    slot = slot_with(new_allocator(16), "token", committed=40, allocated=48, protected=32)
    slot.lend(TURN, 39, TOKENS, BASE)
    before = str(slot.record)
    with pytest.raises(OwnershipError):
        slot.lend(Turn("r2", 0), 10, TOKENS, BASE)
    with pytest.raises(OwnershipError):
        slot.give_back(Turn("r1", 1))
    with pytest.raises(OwnershipError, match="demoted"):
        slot.demote(TOKENS)
    assert str(slot.record) == before
    slot.give_back(TURN)
    assert slot.is_idle


@pytest.mark.parametrize("length", range(50))
@pytest.mark.parametrize("protected", [0, 16, 32])
def test_rewinding_keeps_the_row_down_to_what_the_tree_protects(length, protected):
    allocator = new_allocator(16)
    slot = slot_with(allocator, "page", committed=40, allocated=64, protected=protected)
    slot.rewind(length, TOKENS)
    kept = min(length, 40)
    if kept < max(1, protected):
        assert not slot.has_row
        assert slot.held.lock is None
        assert allocator.tree.num_evictable == 2, "its whole pages are the tree's"
    else:
        assert slot.record.kv_committed_len == kept
        assert slot.record.kv_allocated_len == ceil_page(kept, 16)
    assert audit(allocator, [slot.held]) == []


def test_a_row_of_older_weights_is_not_continued_and_stays_in_its_own_namespace():
    allocator = new_allocator(16)
    slot = slot_with(allocator, "token", committed=40, allocated=48, protected=16)
    newer = Namespace(weights_version=1)
    assert slot.lend(TURN, 39, TOKENS, newer) == 0
    assert allocator.match(TOKENS[:41], newer).num_pages == 0
    assert allocator.match(TOKENS[:41], BASE).num_pages == 2
    assert audit(allocator, [slot.held]) == []


def test_a_demoted_row_is_found_again_in_the_tree():
    allocator = new_allocator(16)
    slot = slot_with(allocator, "token", committed=47, allocated=64, protected=16)
    slot.demote(TOKENS)
    assert not slot.has_row
    assert allocator.match(TOKENS[:48], BASE).num_pages == floor_page(47, 16) // 16
    assert slot.lend(TURN, 47, TOKENS, BASE) == 0
    assert slot.publishes_prompt, "the row that it gets is a new one"


def test_what_is_dropped_is_not_published():
    allocator = new_allocator(16)
    slot = slot_with(allocator, "token", committed=47, allocated=64, protected=16)
    slot.drop()
    assert allocator.match(TOKENS[:48], BASE).num_pages == 1
    assert audit(allocator, [slot.held]) == []
