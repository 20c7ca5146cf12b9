"""A node of the prefix tree: the edge that leads to it, the pages that hold its KV, and why it is kept.

A node exists only on page borders and never has an empty edge. `lock_count` counts the receipts anchored at or below
it, so an unlocked node has no locked descendant.
"""

from __future__ import annotations

from devices.pages import IntArray


class Node:
    """Attributes:
    parent: None for the root and for a node that was removed.
    edge: its name among the parent's children (`PrefixKey.edge`).
    raw: token ids of the edge, little-endian int32, whole pages.
    num_pages: pages of the edge.
    held: ids of the pages that hold the edge's KV, int32, by family.
    lock_count: receipts anchored at this node or below.
    last_access: logical time of the last use; a parent's is never older than its child's.
    hits: how many requests continued from here.
    priority: highest priority of a request that published it.
    hashes: chained hash of each page, kept only while KV events are recorded.
    queued: whether the eviction queue has an entry for it.
    """

    __slots__ = (
        "children",
        "edge",
        "hashes",
        "held",
        "hits",
        "last_access",
        "lock_count",
        "num_pages",
        "parent",
        "priority",
        "queued",
        "raw",
    )

    def __init__(self, parent: Node | None, edge: bytes, raw: bytes, num_pages: int, held: dict[str, IntArray]) -> None:
        self.parent = parent
        self.edge = edge
        self.raw = raw
        self.num_pages = num_pages
        self.held = held
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_access = 0
        self.hits = 0
        self.priority = 0
        self.hashes: list[bytes] = []
        self.queued = False

    @property
    def is_evictable_leaf(self) -> bool:
        return self.lock_count == 0 and not self.children and self.parent is not None
