"""The owner census: every page, row and lock has exactly the owners that say so.

`free + pending + owned == total` for each family, and a page's reference count equals the number of owners that name
it: the tree for each page of a node, a record for each page that `plan_release` would give back. The audit only
looks; it returns what is wrong, with the owner's name, and works while requests and sessions are alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from devices.page_pool import PADDING_PAGE, PagePool
from devices.pages import floor_page, is_whole_pages
from mem_cache.allocation import KvAllocator
from mem_cache.growth import plan_release
from mem_cache.holding import Holding
from mem_cache.tree.node import Node
from mem_cache.tree.prefix_tree import PrefixTree

TREE = "tree"


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong.

    Attributes:
        kind: short name of the rule that is broken.
        owner: who is involved; "nobody" when a page has no owner.
        text: the numbers.
    """

    kind: str
    owner: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} [{self.owner}]: {self.text}"


def audit(allocator: KvAllocator, holdings: Iterable[Holding]) -> list[Violation]:
    """Every violation; empty when the books are right. A holding that is named twice (lent) counts once."""
    held = list({id(holding): holding for holding in holdings}.values())
    with_row = [holding for holding in held if holding.record.req_pool_idx is not None]
    nodes = list(allocator.tree.nodes())
    found: list[Violation] = []
    for name, pool in allocator.families.pools.items():
        if not _counts_are_right(allocator, pool, nodes, with_row):
            found += _census(pool, _owners(allocator, name, nodes, with_row), _is_shared_with_tree(allocator, name))
    found += _ladders(held)
    found += _rows(allocator, with_row)
    found += _windows(allocator, with_row)
    found += _locks(allocator.tree, held)
    if not _nodes_are_right(allocator.tree, nodes):
        found += _nodes(allocator.tree, nodes)
    return found


def _counts_are_right(allocator: KvAllocator, pool: PagePool, nodes: list[Node], with_row: list[Holding]) -> bool:
    """Whether the census has nothing to say, without a name for any page."""
    family, rows = pool.family, allocator.rows
    in_tree = _pages_of_tree(allocator.tree, family, nodes)
    in_rows: list[int] = []
    for holding in with_row:
        for part in plan_release(holding.record, allocator.geometry):
            if part.family == family:
                in_rows += rows.pages(family, holding.record.row, part.start, part.end).tolist()
    refs: list[int] = pool.refcounts().tolist()
    counts = [0] * (pool.num_pages + 1)
    try:
        for page in in_tree:
            counts[page] += 1
        for page in in_rows:
            counts[page] += 1
    except IndexError:
        return False
    if counts != refs or min(in_tree, default=1) < 1:
        return False
    if in_tree and max([refs[page] for page in in_tree]) > 1 and not _is_shared_with_tree(allocator, family):
        return False
    idle = sorted([*pool.free_pages().tolist(), *pool.pending_pages().tolist()])
    return min(in_rows, default=1) > 0 and idle == [page for page, count in enumerate(refs) if page and not count]


def _is_shared_with_tree(allocator: KvAllocator, family: str) -> bool:
    """Whether a page of the tree may have other counts: a coarse one has a count of each node and row that names it."""
    return allocator.geometry.is_coarse(allocator.families.families[family])


def _pages_of_tree(tree: PrefixTree, family: str, nodes: list[Node]) -> list[int]:
    """Pages of which the tree has a count, once for each."""
    owned = next((c.owned for c in tree.components if c.family == family), None)
    if owned is None:
        return []
    return [page for node in nodes if family in node.held for page in owned(node.held[family]).tolist()]


def _owners(allocator: KvAllocator, family: str, nodes: list[Node], with_row: list[Holding]) -> dict[int, list[str]]:
    """Page id -> the owners that hold a count of it."""
    owners: dict[int, list[str]] = defaultdict(list)
    for page in _pages_of_tree(allocator.tree, family, nodes):
        owners[page].append(TREE)
    for holding in with_row:
        record = holding.record
        for part in plan_release(record, allocator.geometry):
            if part.family == family:
                for page in allocator.rows.pages(family, record.row, part.start, part.end).tolist():
                    owners[page].append(str(record.owner))
    return owners


def _census(pool: PagePool, owners: dict[int, list[str]], is_shared: bool) -> list[Violation]:
    found: list[Violation] = []
    refs = pool.refcounts().tolist()
    free, pending = pool.free_pages().tolist(), pool.pending_pages().tolist()
    for kind, pages in (("free", free), ("pending", pending)):
        if len(set(pages)) != len(pages):
            found.append(Violation(f"{kind}-twice", "nobody", f"the {kind} list of {pool.family!r} names a page twice"))
    idle = set(free) | set(pending)
    if set(free) & set(pending):
        found.append(Violation("free-and-pending", "nobody", f"pages {sorted(set(free) & set(pending))[:8]}"))
    for page in range(1, pool.num_pages + 1):
        names = owners.get(page, [])
        is_shared_well = is_shared or refs[page] < 2 or TREE not in names
        if len(names) == refs[page] and bool(names) is (page not in idle) and is_shared_well:
            continue  # right, like nearly all
        if page in idle and names:
            found.append(Violation("used-after-free", names[0], f"page {page} is not handed out and named by {names}"))
        elif page not in idle and not names:
            found.append(Violation("leak", "nobody", f"page {page} of {pool.family!r} has {refs[page]} counts"))
        elif TREE in names and len(names) > 1 and not is_shared:
            found.append(Violation("not-evictable", names[-1], f"page {page} of {pool.family!r} is held by {names}"))
        else:
            owner = ", ".join(names) or "nobody"
            found.append(Violation("miscounted", owner, f"page {page} of {pool.family!r} has {refs[page]} counts"))
    unknown = owners.keys() - set(range(1, pool.num_pages + 1))
    found += [Violation("no-such-page", owners[page][0], f"page {page} of {pool.family!r}") for page in unknown]
    return found


def _ladders(held: list[Holding]) -> list[Violation]:
    found = []
    for holding in held:
        r = holding.record
        if r.is_sound:
            continue
        protected, allocated, page_size = r.cache_protected_len, r.kv_allocated_len, r.geometry.page_size
        climbs = 0 <= protected <= r.kv_committed_len <= r.kv_scheduled_len <= allocated <= r.geometry.row_width
        if not climbs or not is_whole_pages(protected, page_size) or not is_whole_pages(allocated, page_size):
            found.append(Violation("ladder", str(r.owner), str(r)))
        if r.req_pool_idx is None and (protected or allocated or r.kv_committed_len or r.kv_scheduled_len):
            found.append(Violation("length-without-row", str(r.owner), str(r)))
    return found


def _rows(allocator: KvAllocator, with_row: list[Holding]) -> list[Violation]:
    """Each row handed out has one record, and its protected part names the tree's pages."""
    found = []
    used = allocator.rows.used
    holders: dict[int, list[Holding]] = defaultdict(list)
    for holding in with_row:
        holders[holding.record.row].append(holding)
    for row, sharers in holders.items():
        if len(sharers) > 1:
            found.append(Violation("row-shared", ", ".join(str(one.record.owner) for one in sharers), f"row {row}"))
        if row not in used:
            found.append(Violation("row-not-handed-out", str(sharers[0].record.owner), f"row {row}"))
    found += [Violation("row-leak", "nobody", f"row {row}") for row in used - holders.keys()]
    for holding in with_row:
        record = holding.record
        if record.cache_protected_len == 0:
            continue
        if holding.lock is None:
            found.append(Violation("unlocked", str(record.owner), str(record)))
            continue
        for component in allocator.tree.components:
            family = allocator.families.families[component.family]
            end = floor_page(record.cache_protected_len, family.tokens_per_page)
            named = allocator.rows.pages(family.name, record.row, 0, end)
            if allocator.geometry.is_coarse(family):
                locked = allocator.tree.row_pages(holding.lock)[family.name][: len(named)]
            else:
                locked = allocator.tree.pages(holding.lock, family.name)[: len(named)]
            if family.window is not None and len(locked) == len(named):
                locked = np.where(named == PADDING_PAGE, named, locked)
            if named.tobytes() != locked.tobytes():
                text = f"{record} names {family.name!r} pages {named[:8]}.. where the tree has {locked[:8]}.."
                found.append(Violation("not-the-trees-pages", str(record.owner), text))
    return found


def _windows(allocator: KvAllocator, with_row: list[Holding]) -> list[Violation]:
    """Each row names the pages of its window that later tokens read."""
    found = []
    for family in allocator.geometry.families:
        for holding in with_row if family.window is not None else ():
            record, page_size = holding.record, allocator.geometry.page_size
            oldest = max(0, record.kv_committed_len + 1 - (family.window or 0))
            lo = max(floor_page(oldest, page_size), record.swa_evicted_seqlen)
            if not allocator.rows.pages(family.name, record.row, lo, record.kv_allocated_len).all():
                found.append(Violation("window-lost", str(record.owner), f"{record} lacks pages behind {lo}"))
    return found


def _locks(tree: PrefixTree, held: list[Holding]) -> list[Violation]:
    """Every lock has one holder."""
    receipts, holders = tree.receipts, [holding.lock for holding in held if holding.lock is not None]
    if len(holders) == len(receipts) and set(holders) == receipts:
        return []
    return [Violation("lock-leak", TREE, f"{len(receipts)} locks are out, {len(holders)} have a holder")]


def _lock_counts(tree: PrefixTree) -> dict[Node, int]:
    """How many receipts are anchored at or below each node."""
    locks: dict[Node, int] = defaultdict(int)
    for receipt in tree.receipts:
        node: Node | None = receipt.node
        while node is not None:
            locks[node] += 1
            node = node.parent
    return locks


def _nodes_are_right(tree: PrefixTree, nodes: list[Node]) -> bool:
    """Whether `_nodes` has nothing to say: the same rules, each over all nodes at once."""
    num_pages = [node.num_pages for node in nodes]
    lock_counts = [node.lock_count for node in nodes]
    locks = _lock_counts(tree)
    num_protected = sum([n for n, count in zip(num_pages, lock_counts, strict=True) if count])
    page_bytes = tree.page_bytes
    return (
        0 not in num_pages
        and [len(node.raw) for node in nodes] == [n * page_bytes for n in num_pages]
        and not [node for node in nodes for pages in node.held.values() if len(pages) != node.num_pages]
        and not [node for node in nodes if node.parent is None or node.parent.children.get(node.edge) is not node]
        and not [node for node in nodes if not node.raw.startswith(node.edge[-page_bytes:])]
        and lock_counts == [locks.get(node, 0) for node in nodes]
        and not [node for node in nodes if not (node.queued or node.lock_count or node.children)]
        and (tree.num_protected, tree.num_evictable) == (num_protected, sum(num_pages) - num_protected)
    )


def _nodes(tree: PrefixTree, nodes: list[Node]) -> list[Violation]:
    """Edges, lock counts and the two totals, recomputed from the nodes and the receipts."""
    found = []
    locks = _lock_counts(tree)
    evictable = protected = 0
    page_bytes = tree.page_bytes
    for node in nodes:
        num_pages, num_locks = node.num_pages, node.lock_count
        if num_pages == 0 or len(node.raw) != num_pages * page_bytes:
            found.append(Violation("edge-length", TREE, f"{_named(node)} spells {len(node.raw)} bytes"))
        for family, ids in node.held.items():
            if len(ids) != num_pages:
                found.append(Violation("edge-pages", TREE, f"{_named(node)} holds {len(ids)} of {family!r}"))
        if (
            node.parent is None
            or node.parent.children.get(node.edge) is not node
            or not node.raw.startswith(node.edge[-page_bytes:])
        ):
            found.append(Violation("edge-name", TREE, f"{_named(node)} cannot be reached by its edge"))
        if num_locks != locks[node]:
            found.append(Violation("lock-count", TREE, f"{_named(node)} counts {num_locks}, receipts {locks[node]}"))
        if num_locks:
            protected += num_pages
            continue
        evictable += num_pages
        if not node.queued and node.is_evictable_leaf:
            found.append(Violation("not-queued", TREE, f"{_named(node)} can never be evicted"))
    if (evictable, protected) != (tree.num_evictable, tree.num_protected):
        text = f"counts {tree.num_evictable} + {tree.num_protected}, nodes hold {evictable} + {protected}"
        found.append(Violation("tree-totals", TREE, text))
    return found


def _named(node: Node) -> str:
    return f"a node of {node.num_pages} pages"
