"""The owner census: every page, row and lock has exactly the owners that say so.

`free + pending + owned == total` for each family, and a page's reference count equals the number of owners that name
it: the tree for each page of a node, a record for each page that `plan_release` would give back. The audit only
looks; it returns what is wrong, with the owner's name, and works while requests and sessions are alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from devices.page_pool import PagePool
from devices.pages import is_whole_pages
from mem_cache.allocation import Holding, KvAllocator, plan_release
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
    found: list[Violation] = []
    for name, pool in allocator.families.pools.items():
        found += _census(pool, _owners(allocator, name, held))
    found += _ladders(held)
    found += _rows(allocator, held)
    found += _tree(allocator.tree, held)
    return found


def _owners(allocator: KvAllocator, family: str, held: list[Holding]) -> dict[int, list[str]]:
    """Page id -> the owners that hold a count of it."""
    owners: dict[int, list[str]] = defaultdict(list)
    for node in allocator.tree.nodes():
        for page in node.held[family].tolist() if family in node.held else ():
            owners[page].append(TREE)
    for holding in held:
        record = holding.record
        if record.req_pool_idx is None:
            continue
        owner = str(record.owner)
        for part in plan_release(record, allocator.geometry):
            if part.family == family:
                for page in allocator.rows.pages(family, record.row, part.start, part.end).tolist():
                    owners[page].append(owner)
    return owners


def _census(pool: PagePool, owners: dict[int, list[str]]) -> list[Violation]:
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
        if len(names) == refs[page] and bool(names) is (page not in idle) and (refs[page] < 2 or TREE not in names):
            continue  # right, like nearly all
        if page in idle and names:
            found.append(Violation("used-after-free", names[0], f"page {page} is not handed out and named by {names}"))
        elif page not in idle and not names:
            found.append(Violation("leak", "nobody", f"page {page} of {pool.family!r} has {refs[page]} counts"))
        elif TREE in names and len(names) > 1:
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
        lengths = [r.cache_protected_len, r.kv_committed_len, r.kv_scheduled_len, r.kv_allocated_len]
        climbs = 0 <= lengths[0] <= lengths[1] <= lengths[2] <= lengths[3] <= r.geometry.row_width
        page_size = r.geometry.page_size
        if not climbs or not is_whole_pages(lengths[0], page_size) or not is_whole_pages(lengths[3], page_size):
            found.append(Violation("ladder", str(r.owner), str(r)))
        if r.req_pool_idx is None and any(lengths):
            found.append(Violation("length-without-row", str(r.owner), str(r)))
    return found


def _rows(allocator: KvAllocator, held: list[Holding]) -> list[Violation]:
    """Each row handed out has one record, and its protected part names the tree's pages."""
    found = []
    holders: dict[int, list[str]] = defaultdict(list)
    for holding in held:
        if holding.record.req_pool_idx is not None:
            holders[holding.record.row].append(str(holding.record.owner))
    for row, names in holders.items():
        if len(names) > 1:
            found.append(Violation("row-shared", ", ".join(names), f"row {row}"))
        if row not in allocator.rows.used:
            found.append(Violation("row-not-handed-out", names[0], f"row {row}"))
    found += [Violation("row-leak", "nobody", f"row {row}") for row in allocator.rows.used - holders.keys()]
    for holding in held:
        record = holding.record
        if record.req_pool_idx is None or record.cache_protected_len == 0:
            continue
        if holding.lock is None:
            found.append(Violation("unlocked", str(record.owner), str(record)))
            continue
        for component in allocator.tree.components:
            locked = allocator.tree.pages(holding.lock, component.family).tolist()
            named = allocator.rows.pages(component.family, record.row, 0, record.cache_protected_len).tolist()
            if named != locked[: len(named)]:
                text = f"{record} names {component.family!r} pages {named[:8]}.. where the tree has {locked[:8]}.."
                found.append(Violation("not-the-trees-pages", str(record.owner), text))
    return found


def _tree(tree: PrefixTree, held: list[Holding]) -> list[Violation]:
    """Edges, lock counts and the two totals, recomputed from the nodes and the receipts."""
    found = []
    receipts = [holding.lock for holding in held if holding.lock is not None]
    if len(receipts) != len(tree.receipts) or set(receipts) != tree.receipts:
        text = f"{len(tree.receipts)} locks are out, {len(receipts)} have a holder"
        found.append(Violation("lock-leak", TREE, text))
    locks: dict[int, int] = defaultdict(int)
    for receipt in tree.receipts:
        node: Node | None = receipt.node
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
    evictable = protected = 0
    for node in tree.nodes():
        if node.num_pages == 0 or len(node.raw) != node.num_pages * tree.page_bytes:
            found.append(Violation("edge-length", TREE, f"{_named(node)} spells {len(node.raw)} bytes"))
        if {len(ids) for ids in node.held.values()} - {node.num_pages}:
            found.append(
                Violation("edge-pages", TREE, f"{_named(node)} holds { {f: len(i) for f, i in node.held.items()} }")
            )
        if (
            node.parent is None
            or node.parent.children.get(node.edge) is not node
            or not node.raw.startswith(node.edge[-tree.page_bytes :])
        ):
            found.append(Violation("edge-name", TREE, f"{_named(node)} cannot be reached by its edge"))
        if node.lock_count != locks[id(node)]:
            found.append(
                Violation("lock-count", TREE, f"{_named(node)} counts {node.lock_count}, receipts {locks[id(node)]}")
            )
        if node.is_evictable_leaf and not node.queued:
            found.append(Violation("not-queued", TREE, f"{_named(node)} can never be evicted"))
        if node.lock_count:
            protected += node.num_pages
        else:
            evictable += node.num_pages
    if (evictable, protected) != (tree.num_evictable, tree.num_protected):
        text = f"counts {tree.num_evictable} + {tree.num_protected}, nodes hold {evictable} + {protected}"
        found.append(Violation("tree-totals", TREE, text))
    return found


def _named(node: Node) -> str:
    return f"a node of {node.num_pages} pages"
