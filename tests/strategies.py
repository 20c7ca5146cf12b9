"""The domain's words as hypothesis strategies, and small books (pools, rows, tree, allocator) to play them on.

Prompts are made of *blocks*: a block is a page whose tokens are all known from its number, so two prompts that start
with the same block numbers share whole pages, and `prompts` also bends a single token so that they part inside one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from devices.page_pool import PageFamilies, PageFamily
from devices.pages import IntArray
from mem_cache.allocation import KvAllocator
from mem_cache.kv_info import Owner, OwnerKind, ReqKvInfo, RowGeometry
from mem_cache.rows import RowPool
from mem_cache.tree.components import components_of
from mem_cache.tree.events import KvEventLog
from mem_cache.tree.keys import Namespace
from mem_cache.tree.policies import EVICTION_POLICIES
from mem_cache.tree.prefix_tree import PrefixTree

settings.register_profile("rung", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rung")

PAGE_SIZES = (1, 4, 16, 128)
TREE_PAGE_SIZES = (1, 4, 16)
POLICIES = tuple(EVICTION_POLICIES)

NAMESPACES = (
    Namespace(),
    Namespace(extra_key="x"),
    Namespace(cache_salt="x"),
    Namespace(extra_key="x", cache_salt="x"),
    Namespace(weights_version=1),
)

LADDER_MOVES = ("adopt", "reserve", "schedule", "commit", "protect", "rewind", "shield_window", "slide_window")

page_sizes = st.sampled_from(PAGE_SIZES)
tree_page_sizes = st.sampled_from(TREE_PAGE_SIZES)
policies = st.sampled_from(POLICIES)
namespaces = st.sampled_from(NAMESPACES)
priorities = st.integers(0, 3)


def tokens_of(values: Iterable[int]) -> IntArray:
    """Token ids as the engine holds them."""
    return np.array(list(values), dtype=np.int32)


def block(number: int, page_size: int) -> list[int]:
    """The tokens of one page; the same number gives the same page."""
    return [1000 * (number + 1) + offset for offset in range(page_size)]


def blocks(numbers: Sequence[int], page_size: int) -> IntArray:
    """A prompt of whole pages."""
    return tokens_of(token for number in numbers for token in block(number, page_size))


@st.composite
def prompts(draw: st.DrawFn, page_size: int, max_pages: int = 5, num_blocks: int = 2) -> IntArray:
    """Token ids that often share a head of whole pages, sometimes part inside a page, and may end inside one."""
    numbers = draw(st.lists(st.integers(0, num_blocks - 1), max_size=max_pages))
    tokens = blocks(numbers, page_size)
    if len(tokens) and draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] += 1
    tail = draw(st.integers(0, page_size - 1))
    return np.concatenate([tokens, tokens_of(block(0, page_size)[:tail])])


def ladder_moves(row_width: int, max_size: int = 30) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Moves of a record in any order, most of them illegal where they stand; lengths reach behind both ends."""
    move = st.tuples(st.sampled_from(LADDER_MOVES), st.integers(-1, row_width + 2))
    return st.lists(move, max_size=max_size)


@st.composite
def ragged_batches(draw: st.DrawFn, page_size: int, max_rows: int = 4) -> tuple[list[list[int]], list[int], list[int]]:
    """Page tables (a list of page ids a row), starts and lengths of a step; every token has a page."""
    num_pages = draw(st.integers(1, 4))
    num_rows = draw(st.integers(0, max_rows))
    page = st.integers(1, 10_000)
    tables = [draw(st.lists(page, min_size=num_pages, max_size=num_pages)) for _ in range(num_rows)]
    ends = [draw(st.integers(0, num_pages * page_size)) for _ in range(num_rows)]
    starts = [draw(st.integers(0, end)) for end in ends]
    return tables, starts, [end - start for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Books:
    """Everything that can own a page, small enough to look at."""

    families: PageFamilies
    rows: RowPool
    tree: PrefixTree
    allocator: KvAllocator
    events: KvEventLog

    @property
    def geometry(self) -> RowGeometry:
        return self.rows.geometry

    @property
    def page_size(self) -> int:
        return self.rows.geometry.page_size

    def record(self, name: str = "r") -> ReqKvInfo:
        return ReqKvInfo(self.geometry, Owner(OwnerKind.REQUEST, name))


def geometry(
    page_size: int, row_pages: int, *, window: bool = False, derived: bool = False, coarse: int = 0
) -> RowGeometry:
    """A row of `row_pages` pages; a window of two pages, a derived family, and pages of `coarse` pages on request."""
    kinds = [PageFamily("full", page_size)]
    if window:
        kinds.append(PageFamily("window", page_size, window=2 * page_size))
    if derived:
        kinds.append(PageFamily("derived", page_size, derived_from="full"))
    if coarse:
        kinds.append(PageFamily("coarse", coarse * page_size))
    return RowGeometry(page_size, row_pages * page_size, tuple(kinds))


def make_books(
    page_size: int,
    *,
    num_pages: int = 16,
    num_rows: int = 4,
    row_pages: int = 8,
    policy: str = "lru",
    window: bool = False,
    derived: bool = False,
    coarse: int = 0,
    caching: bool = True,
) -> Books:
    """Empty books with a tree that records KV events; every family that has a pool gets `num_pages`."""
    shape = geometry(page_size, row_pages, window=window, derived=derived, coarse=coarse)
    families = PageFamilies((family, num_pages) for family in shape.families)
    rows = RowPool(num_rows, shape)
    events = KvEventLog()
    tree = PrefixTree(components_of(shape, families), page_size, policy, events)
    return Books(families, rows, tree, KvAllocator(families, rows, tree, caching=caching), events)


def snapshot_tree(tree: PrefixTree) -> object:
    """Everything a tree remembers, as plain values: equal before and after means that nothing moved."""
    nodes = [
        (
            node.edge,
            node.raw,
            node.num_pages,
            {family: ids.tolist() for family, ids in node.held.items()},
            (node.lock_count, node.last_access, node.hits, node.priority, node.queued),
            tuple(node.hashes),
            id(node.parent),
            id(node),
        )
        for node in tree.nodes()
    ]
    queue = [(key, serial, id(node)) for key, serial, node in tree._queue]
    scalars = (tree.num_evictable, tree.num_protected, tree._clock, tree._queue_serial)
    return sorted(nodes, key=lambda item: item[-1]), queue, scalars, tree.receipts


def snapshot(books: Books, records: Iterable[ReqKvInfo] = ()) -> object:
    """Everything the books remember, the records included, as plain values."""
    pools = [
        (pool.refcounts().tolist(), pool.free_pages().tolist(), pool.pending_pages().tolist())
        for pool in books.families.pools.values()
    ]
    tables = {name: table.tolist() for name, table in books.rows.tables.items()}
    rows = (tables, books.rows.used, books.rows.num_free, len(books.rows._changes))
    return pools, rows, snapshot_tree(books.tree), [snapshot_record(record) for record in records]


def snapshot_record(record: ReqKvInfo) -> tuple[object, ...]:
    """Every field of a record."""
    return (
        record.req_pool_idx,
        record.cache_protected_len,
        record.kv_committed_len,
        record.kv_scheduled_len,
        record.kv_allocated_len,
        record.swa_evict_floor,
        record.swa_evicted_seqlen,
        record.owner,
        record.borrower,
        record.state,
        record.backup,
    )
