"""The walk: match, insert, lock, evict. Pages come and go through components; rows are none of its business.

    root --[tokens, pages]-- node --[tokens, pages]-- node        one count of every page is the tree's
                              `-----[tokens, pages]-- node

Matching only looks: it neither splits nor refreshes, so the scheduler may ask about every waiting request. A match is
good until the tree changes next; `lock` turns it into a receipt that lasts. Splits happen on page borders only.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from devices.pages import IntArray
from mem_cache.tree.components import Anchor, Component, SidecarPages, WindowPages
from mem_cache.tree.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventLog,
    namespace_hash,
    page_hashes,
)
from mem_cache.tree.keys import TOKEN_BYTES, PrefixKey
from mem_cache.tree.misses import MissLedger, MissReason
from mem_cache.tree.node import Node
from mem_cache.tree.policies import EVICTION_POLICIES, EvictionKey

NO_PAGES = np.empty(0, dtype=np.int32)


class LockError(Exception):
    """A lock that cannot be: a receipt given back twice or foreign, a match that is out of date; nothing changed."""


@dataclass(frozen=True, slots=True)
class Match:
    """Where a key ends in the tree.

    Attributes:
        path: nodes from below the root to the one in which the match ends.
        num_pages: matched pages, counted from the root.
    """

    path: tuple[Node, ...]
    num_pages: int


@dataclass(frozen=True, slots=True, eq=False)
class LockReceipt:
    """Proof of a lock: the path from the root to `node` stays until the receipt is given back."""

    node: Node
    num_pages: int


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of an insert.

    Attributes:
        end: where the key ends in the tree now.
        num_known: leading pages of the key that the tree had already; its own copy of them stands.
    """

    end: Match
    num_known: int


class PrefixTree:
    """A radix tree over whole pages of token ids.

    Attributes:
        num_evictable, num_protected: pages of unlocked and of locked nodes.
    misses: what explains matches that end early.
    """

    def __init__(
        self, components: tuple[Component, ...], page_size: int, policy: str = "lru", events: KvEventLog | None = None
    ) -> None:
        self.components = components
        self._by_family = {component.family: component for component in components}
        self.page_size = page_size
        self.num_evictable = 0
        self.num_protected = 0
        self.page_bytes = page_size * TOKEN_BYTES
        self.misses = MissLedger(self.page_bytes)
        self._order = EVICTION_POLICIES[policy]
        self._events = events
        self._root = Node(None, b"", b"", 0, {})
        self._clock = 0
        self._receipts: set[LockReceipt] = set()
        # Each evictable leaf has exactly one entry, whose key may be out of date (see policies.py).
        self._queue: list[tuple[EvictionKey, int, Node]] = []
        self._queue_serial = 0
        for component in components:
            if isinstance(component, WindowPages):
                component.follow(self._order)

    def match(self, key: PrefixKey) -> Match:
        """The longest cached prefix of `key` that every component can serve."""
        path, depth = self._walk(key)
        return self._legal(path, depth)

    def why_shorter(self, key: PrefixKey, match: Match) -> MissReason | None:
        """Why the match of a key ends before the key does; None when it does not."""
        depth = match.num_pages
        if depth >= key.num_pages:
            return None
        if self._walk(key)[1] > depth:
            return "clamped"
        page = key.raw[depth * self.page_bytes : (depth + 1) * self.page_bytes]
        return self.misses.why(page, is_first=depth == 0)

    def _walk(self, key: PrefixKey) -> tuple[list[Node], int]:
        """Nodes that `key` leads through, and how many pages of it they spell."""
        path: list[Node] = []
        node, depth = self._root, 0
        while depth < key.num_pages:
            child = node.children.get(key.edge(depth))
            if child is None:
                break
            shared = key.shared_pages(depth, child.raw)
            path.append(child)
            depth += shared
            node = child
            if shared < child.num_pages:
                break
        return path, depth

    def known_pages(self, key: PrefixKey, family: str) -> IntArray:
        """Pages of the leading part of `key` that an insert would find, whether or not one may continue from there."""
        path, depth = self._walk(key)
        return np.concatenate([NO_PAGES, *(node.held[family] for node in path)])[:depth]

    def row_pages(self, lock: LockReceipt) -> dict[str, IntArray]:
        """What a row that continues from the locked prefix names, by family."""
        return {c.family: c.for_row(self.pages(lock, c.family)) for c in self.components}

    def pages(self, lock: LockReceipt, family: str = "full") -> IntArray:
        """Ids of the locked prefix's pages, int32 [num_pages]; read only."""
        parts: list[IntArray] = []
        node = lock.node
        while node.parent is not None:
            parts.append(node.held[family])
            node = node.parent
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)

    def insert(self, key: PrefixKey, held: Mapping[str, IntArray], priority: int = 0) -> Inserted:
        """Publish a key. The tree takes over the caller's count of the pages it did not know.

        Args:
            key: whole pages of tokens.
            held: for each family the ids of the key's pages, from its first page on.
            priority: of the publisher; raises that of the nodes on the path.
        Returns:
            Where the key ends, and how many leading pages were known: the caller's copies of those are duplicates
            that it must stop naming and then release.
        """
        path, depth = self._walk(key)
        self._merge(path, depth, held)
        is_new = depth < key.num_pages
        if is_new and path:
            path[-1] = self._split_at(path, depth)
        self._touch(path)
        for node in path:
            node.priority = max(node.priority, priority)
        if is_new:
            parent = path[-1] if path else self._root
            path.append(self._add_leaf(parent, key, depth, held, priority))
        return Inserted(Match(tuple(path), key.num_pages), depth)

    def _merge(self, path: list[Node], depth: int, held: Mapping[str, IntArray]) -> None:
        """Show each component what a row has of the `depth` pages that the tree knew."""
        first = 0
        for node in path:
            last = min(depth, first + node.num_pages)
            for component in self.components:
                if component.family in node.held:
                    component.merge(node, held[component.family][first:last])
            first = last

    def lock(self, match: Match, *, count_hit: bool = False) -> LockReceipt:
        """Keep the matched prefix until the receipt is given back; an empty match locks nothing but has a receipt.

        Args:
            count_hit: the match is a request that continues from it (for lfu and slru).
        Raises:
            LockError: the path was split or evicted since it was matched; nothing changed.
        """
        path = list(match.path)
        self._check_fresh(match)
        if path:
            path[-1] = self._split_at(path, match.num_pages)
            self._touch(path)
        for node in path:
            node.hits += count_hit
        return self._lock_path(path, match.num_pages)

    def lock_again(self, receipt: LockReceipt, num_pages: int) -> LockReceipt:
        """A second receipt for the first `num_pages` of what the first one keeps: no more than its holder reads.

        Raises LockError when the first is not out or keeps fewer.
        """
        self._check_out(receipt)
        path, node, above = [], receipt.node, receipt.num_pages
        while node.parent is not None:
            above -= node.num_pages
            if above < num_pages:
                path.append(node)
            node = node.parent
        return self.lock(Match(tuple(path[::-1]), num_pages))

    def _lock_path(self, path: list[Node], num_pages: int) -> LockReceipt:
        for node in path:
            if node.lock_count == 0:
                self.num_evictable -= node.num_pages
                self.num_protected += node.num_pages
            node.lock_count += 1
        receipt = LockReceipt(path[-1] if path else self._root, num_pages)
        self._receipts.add(receipt)
        return receipt

    def unlock(self, receipt: LockReceipt) -> None:
        """Give a receipt back. Raises LockError, changing nothing, when it is not out."""
        self._check_out(receipt)
        self._receipts.remove(receipt)
        node = receipt.node
        while node.parent is not None:
            node.lock_count -= 1
            if node.lock_count == 0:
                self.num_protected -= node.num_pages
                self.num_evictable += node.num_pages
                self._enqueue(node)
            node = node.parent

    def num_pages_behind(self, receipts: Iterable[LockReceipt]) -> int:
        """Pages that would become evictable if these receipts were given back: nothing else locks them."""
        counts: Counter[Node] = Counter()
        for receipt in receipts:
            node = receipt.node
            while node.parent is not None:
                counts[node] += 1
                node = node.parent
        return sum(node.num_pages for node, count in counts.items() if node.lock_count == count)

    def _check_out(self, receipt: LockReceipt) -> None:
        if receipt not in self._receipts:
            raise LockError(f"no such lock is held: {receipt.num_pages} pages; it was given back already or is foreign")

    def evict(self, num_pages: int) -> int:
        """Let unlocked pages go, leaf tails first in the policy's order, until `num_pages` are gone.

        Returns how many went: fewer only when nothing unlocked is left. O(log nodes) a leaf.
        """
        gone = 0
        while gone < num_pages and (leaf := self._pop_victim()) is not None:
            n = min(num_pages - gone, leaf.num_pages)
            self._trim(leaf, n)
            gone += n
        return gone

    def evict_family(self, family: str, num_pages: int) -> int:
        """Make `num_pages` pages of a family free, or as many as nothing keeps; returns how many went.

        A window's go alone. A sidecar's go with the leaves that name them, page by page.
        """
        component = self._by_family[family]
        if isinstance(component, WindowPages):
            return component.evict(num_pages, self._anchors())
        if isinstance(component, SidecarPages):
            before = component.num_unowned
            while component.num_unowned - before < num_pages and self.evict(1):
                pass
            return component.num_unowned - before
        return self.evict(num_pages)

    def num_evictable_of(self, family: str, without: Collection[LockReceipt] = ()) -> int:
        """Pages of a family that eviction could free now, or if the receipts `without` were given back."""
        component = self._by_family[family]
        if isinstance(component, WindowPages | SidecarPages):
            return component.num_evictable(self.nodes(), self._anchors(without))
        return self.num_evictable + self.num_pages_behind(without)

    def num_counts(self, family: str, pages: IntArray) -> IntArray:
        """The tree's counts of pages that it may share with rows, int32 [pages]."""
        component = self._by_family[family]
        assert isinstance(component, SidecarPages)
        return component.counts[pages]

    def _anchors(self, without: Collection[LockReceipt] = ()) -> list[Anchor]:
        return [(receipt.node, receipt.num_pages) for receipt in self._receipts if receipt not in without]

    def flush(self) -> None:
        """Empty the tree. Raises LockError, changing nothing, while a lock is out: its pages are in use."""
        if self.num_protected:
            raise LockError(f"the cache cannot be flushed: {self.num_protected} pages are in use")
        self.evict(self.num_evictable)
        if self._events is not None:
            self._events.add(AllBlocksCleared())

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; for the audit."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def receipts(self) -> frozenset[LockReceipt]:
        """Locks that are out; for the audit."""
        return frozenset(self._receipts)

    def _legal(self, path: list[Node], depth: int) -> Match:
        """Shorten a match until every component accepts its end."""
        settled = False
        while not settled:
            settled = True
            for component in self.components:
                end = component.legal_end(path, depth)
                if end < depth:
                    depth, settled = end, False
        covered = sum(node.num_pages for node in path)
        while path and covered - path[-1].num_pages >= depth:
            covered -= path.pop().num_pages
        return Match(tuple(path), depth)

    def _check_fresh(self, match: Match) -> None:
        above, length = self._root, 0
        for node in match.path:
            if node.parent is not above:
                break
            above, length = node, length + node.num_pages
        else:
            if match.num_pages <= length:
                return
        raise LockError(f"a match of {match.num_pages} pages is out of date: the tree has changed, match again")

    def _split_at(self, path: list[Node], depth: int) -> Node:
        """The node that ends exactly at `depth` pages; splits the last one of `path` when it reaches further.

        before   parent ------[a b c d]------ node
        after    parent --[a b]-- front --[c d]-- node     receipts stay anchored at `node`
        """
        node = path[-1]
        at = depth - sum(above.num_pages for above in path[:-1])
        if at == node.num_pages:
            return node
        assert 0 < at < node.num_pages
        assert node.parent is not None
        cut = at * self.page_bytes
        halves = {c.family: c.split(node.held[c.family], at) for c in self.components if c.family in node.held}
        front = Node(node.parent, node.edge, node.raw[:cut], at, {family: half[0] for family, half in halves.items()})
        front.lock_count, front.hits, front.priority = node.lock_count, node.hits, node.priority
        front.last_access = node.last_access
        front.hashes, node.hashes = node.hashes[:at], node.hashes[at:]
        node.parent.children[front.edge] = front
        node.parent, node.raw, node.num_pages = front, node.raw[cut:], node.num_pages - at
        node.edge = node.raw[: self.page_bytes]
        node.held = {family: half[1] for family, half in halves.items()}
        front.children[node.edge] = node
        for component in self.components:
            if component.family in front.held:
                component.divided(front)
        return front

    def _add_leaf(self, parent: Node, key: PrefixKey, depth: int, held: Mapping[str, IntArray], priority: int) -> Node:
        raw = key.raw[depth * self.page_bytes :]
        pages = {family: ids[depth:].copy() for family, ids in held.items()}
        leaf = Node(parent, key.edge(depth), raw, key.num_pages - depth, pages)
        # Before it enters a queue: entries that are too early are all mended by the first eviction.
        leaf.last_access, leaf.priority = self._clock, max(0, priority)
        parent.children[leaf.edge] = leaf
        if parent is self._root:
            self.misses.begins(raw)
        for component in self.components:
            if component.family in pages:
                component.take(leaf)
        self.num_evictable += leaf.num_pages
        if self._events is not None:
            before = parent.hashes[-1] if parent.hashes else namespace_hash(key.namespace)
            leaf.hashes = page_hashes(before, raw, self.page_bytes)
            tokens = tuple(np.frombuffer(raw, dtype="<i4").tolist())
            self._events.add(BlockStored(tuple(leaf.hashes), before, tokens, self.page_size, key.namespace))
        self._enqueue(leaf)
        return leaf

    def _trim(self, leaf: Node, n: int) -> None:
        """Drop the last `n` pages of an unlocked leaf, and the leaf with its last page."""
        keep = leaf.num_pages - n
        assert leaf.is_evictable_leaf
        assert keep >= 0
        for component in self.components:
            if component.family in leaf.held:
                leaf.held[component.family], gone = component.split(leaf.held[component.family], keep)
                component.drop(gone)
        if self._events is not None:
            self._events.add(BlockRemoved(tuple(leaf.hashes[keep:])))
            del leaf.hashes[keep:]
        self.misses.evicted(leaf.raw[keep * self.page_bytes :])
        self.num_evictable -= n
        if keep:
            leaf.num_pages, leaf.raw = keep, leaf.raw[: keep * self.page_bytes]
            self._enqueue(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        if parent is self._root:
            self.misses.ends(leaf.raw)
        leaf.parent = None
        self._enqueue(parent)

    def _touch(self, path: list[Node]) -> None:
        self._clock += 1
        for node in path:
            node.last_access = self._clock

    def _enqueue(self, node: Node) -> None:
        """Give an evictable leaf its entry in the queue, if it has none."""
        if node.is_evictable_leaf and not node.queued:
            node.queued = True
            self._queue_serial += 1
            heapq.heappush(self._queue, (self._order(node), self._queue_serial, node))

    def _pop_victim(self) -> Node | None:
        """The evictable leaf with the smallest key; entries that are out of date are mended on the way."""
        while self._queue:
            key, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.is_evictable_leaf:
                if key == self._order(node):
                    return node
                self._enqueue(node)
        return None
