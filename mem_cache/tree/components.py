"""What one kind of KV adds to the prefix tree: where a match may end, and how its pages split, merge and go back.

The walk in `prefix_tree.py` knows nodes, edges and locks; a component knows one family of pages. On a node,
`held[family]` names for each page of the edge the family's page that serves it:

    full       a b c d     one page each, and every matched page may be continued from
    window     0 0 c d     0 where the page is gone: a match ends only where the window before it is alive
    sidecar    x x x y     pages of several edges' pages; two nodes on a path may name the same one, each with a count

The tree has one count of each page that a node names, however often the node names it. Adding a kind does not touch
the walk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from devices.page_pool import PADDING_PAGE, PageFamilies, PagePool
from devices.pages import IntArray, page_count
from mem_cache.kv_info import RowGeometry
from mem_cache.tree.node import Node
from mem_cache.tree.policies import EvictionKey

Anchor = tuple[Node, int]
"""A lock: the node that it is anchored at, and how many pages lead there."""


class Component(Protocol):
    """One family of pages on the tree's nodes (`Node.held[family]`)."""

    family: str

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        """Longest prefix of the matched `num_pages` along `path` that a computation may continue from."""
        ...

    def take(self, node: Node) -> None:
        """The node is new; its pages come from a row, which gives up its counts of a full or window page only."""
        ...

    def merge(self, node: Node, own: IntArray) -> None:
        """A row publishes what the node has already; `own`: the row's pages of the edge's first, 0 where none."""
        ...

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        """Divide what an edge holds at its page `at`."""
        ...

    def divided(self, front: Node) -> None:
        """The upper half of a split is a node of its own now."""
        ...

    def drop(self, held: IntArray) -> None:
        """Give the tree's count of these pages back."""
        ...

    def owned(self, held: IntArray) -> IntArray:
        """Pages that a node which holds these has a count of, each once."""
        ...

    def for_row(self, held: IntArray) -> IntArray:
        """A row's table for a prefix whose pages, from the root on, are `held`: what a computation behind it reads."""
        ...


class FullPages:
    """Full attention: one page for every page of an edge, so every matched page may be continued from."""

    def __init__(self, pool: PagePool) -> None:
        self.family = pool.family
        self._pool = pool

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        return num_pages

    def take(self, node: Node) -> None:
        pass

    def merge(self, node: Node, own: IntArray) -> None:
        pass

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        return held[:at], held[at:]

    def divided(self, front: Node) -> None:
        pass

    def drop(self, held: IntArray) -> None:
        self._pool.release(held)

    def owned(self, held: IntArray) -> IntArray:
        return held

    def for_row(self, held: IntArray) -> IntArray:
        return held


class WindowPages:
    """A sliding window: pages behind it may go while the prefix stays (a *tombstone*, page 0).

    A match ends where the window before it is alive, and a lock keeps that window, not more. When pages are short the
    least recently used node loses its first ones first: prefixes end, and branch, at the ends of nodes.
    """

    def __init__(self, pool: PagePool, window: int, page_size: int) -> None:
        """`window`: tokens; the newest one is among them."""
        self.family = pool.family
        self.num_read = page_count(window, page_size)
        self.num_live = 0
        self._pool = pool
        self._queue: list[tuple[EvictionKey, int, Node]] = []
        self._queued: set[Node] = set()
        self._serial = 0
        self._order: Callable[[Node], EvictionKey] = lambda node: (node.last_access,)

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        if not path:
            return 0
        alive = np.concatenate([node.held[self.family] for node in path])[:num_pages] != PADDING_PAGE
        # Ends from the longest down: the nearest tombstone before an end must lie behind the window.
        dead = np.flatnonzero(~alive)
        end = num_pages
        while len(dead) and dead[-1] >= end - self.num_read:
            end = int(dead[-1])
            dead = dead[:-1]
        return end

    def take(self, node: Node) -> None:
        self.num_live += int(np.count_nonzero(node.held[self.family]))
        self._enqueue(node)

    def merge(self, node: Node, own: IntArray) -> None:
        held = node.held[self.family]
        places = np.flatnonzero((held[: len(own)] == PADDING_PAGE) & (own != PADDING_PAGE))
        if len(places):
            node.held[self.family] = held = held.copy()
            held[places] = own[places]
            self.num_live += len(places)
            self._enqueue(node)

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        return held[:at], held[at:]

    def divided(self, front: Node) -> None:
        self._enqueue(front)

    def drop(self, held: IntArray) -> None:
        gone = self.owned(held)
        self.num_live -= len(gone)
        self._pool.release(gone)

    def owned(self, held: IntArray) -> IntArray:
        alive: IntArray = held[held != PADDING_PAGE]
        return alive

    def for_row(self, held: IntArray) -> IntArray:
        table = held.copy()
        table[: max(0, len(held) - self.num_read)] = PADDING_PAGE
        return table

    def num_evictable(self, nodes: Iterable[Node], locks: Collection[Anchor]) -> int:
        """Pages that no lock keeps."""
        kept = self._kept(locks)
        return self.num_live - sum(int((node.held[self.family][mask] != 0).sum()) for node, mask in kept.items())

    def evict(self, num_pages: int, locks: Collection[Anchor]) -> int:
        """Let pages go that no lock keeps, until `num_pages` are gone; returns how many went."""
        kept, gone, put_back = self._kept(locks), 0, []
        while gone < num_pages and self._queue:
            key, _, node = heapq.heappop(self._queue)
            self._queued.discard(node)
            if node.parent is None:
                continue
            if key != self._order(node):
                self._enqueue(node)
                continue
            held = node.held[self.family]
            may_go = held != PADDING_PAGE
            if node in kept:
                may_go &= ~kept[node]
            victims = np.flatnonzero(may_go)[: num_pages - gone]
            if len(victims):
                node.held[self.family] = held.copy()
                node.held[self.family][victims] = PADDING_PAGE
                self.drop(held[victims])
                gone += len(victims)
            put_back.append(node)
        for node in put_back:
            self._enqueue(node)
        return gone

    def follow(self, order: Callable[[Node], EvictionKey]) -> None:
        """Evict in the tree's order."""
        self._order = order

    def _kept(self, locks: Collection[Anchor]) -> dict[Node, npt.NDArray[np.bool_]]:
        """Which pages of which nodes the locks' windows need."""
        kept: dict[Node, npt.NDArray[np.bool_]] = {}
        for anchor, _ in locks:
            node, left = anchor, self.num_read
            while node.parent is not None and left > 0:
                mask = kept.setdefault(node, np.zeros(node.num_pages, dtype=np.bool_))
                mask[max(0, node.num_pages - left) :] = True
                node, left = node.parent, left - node.num_pages
        return kept

    def _enqueue(self, node: Node) -> None:
        if node not in self._queued and node.held[self.family].any():
            self._queued.add(node)
            self._serial += 1
            heapq.heappush(self._queue, (self._order(node), self._serial, node))
        if len(self._queue) > 2 * self.num_live + 64:  # most are of nodes that are gone
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapq.heapify(self._queue)
            self._queued = {node for _, _, node in self._queue}


class SidecarPages:
    """A compressed cache whose page stands for `per_page` pages of the edge, shared by count.

    A row that ends inside such a page leaves it to the tree all the same, and may go on writing behind what the tree
    knows: nobody reads there. Another row that continues from there gets a copy, so a prefix is reused by the edge's
    page and not by this larger one.
    """

    def __init__(self, pool: PagePool, per_page: int) -> None:
        self.family = pool.family
        self.per_page = per_page
        self.counts = np.zeros(pool.num_pages + 1, dtype=np.int32)
        self._pool = pool

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        return num_pages

    def take(self, node: Node) -> None:
        self._retain(self.owned(node.held[self.family]))

    def merge(self, node: Node, own: IntArray) -> None:
        pass

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        front, back = held[:at], held[at:]
        if len(front) and len(back) and front[-1] == back[0]:
            self._retain(back[:1])
        return front, back

    def divided(self, front: Node) -> None:
        pass

    def drop(self, held: IntArray) -> None:
        pages = self.owned(held)
        self.counts[pages] -= 1
        self._pool.release(pages)

    def owned(self, held: IntArray) -> IntArray:
        return np.unique(held)

    def for_row(self, held: IntArray) -> IntArray:
        """The deepest node's page has all the entries of its ancestors' in the same place, so it serves for them."""
        last = np.arange(self.per_page - 1, len(held) + self.per_page - 1, self.per_page)
        return held[np.minimum(last, len(held) - 1)]

    @property
    def num_unowned(self) -> int:
        """Pages that are free or about to be."""
        return self._pool.num_free + self._pool.num_pending

    def num_evictable(self, nodes: Iterable[Node], locks: Collection[Anchor]) -> int:
        """Pages that would be free if every node went that no lock keeps."""
        locked = set()
        for anchor, _ in locks:
            node = anchor
            while node.parent is not None and node not in locked:
                locked.add(node)
                node = node.parent
        counts = np.zeros_like(self.counts)
        for node in nodes:
            if node not in locked:
                counts[self.owned(node.held[self.family])] += 1
        return int(((counts > 0) & (counts == self._pool.refcounts())).sum())

    def _retain(self, pages: IntArray) -> None:
        self._pool.retain(pages)
        self.counts[pages] += 1


def components_of(geometry: RowGeometry, families: PageFamilies) -> tuple[Component, ...]:
    """One component for each family of a row that has a pool."""
    made: list[Component] = []
    for family in geometry.families:
        if family.derived_from is not None:
            continue
        pool = families.pools[family.name]
        if geometry.is_coarse(family):
            made.append(SidecarPages(pool, page_count(family.tokens_per_page, geometry.page_size)))
        elif family.window is not None:
            made.append(WindowPages(pool, family.window, geometry.page_size))
        else:
            made.append(FullPages(pool))
    return tuple(made)
