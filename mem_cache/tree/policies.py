"""The order in which leaves are evicted: the one with the smallest key goes first.

A key never falls while a node lives (time, hits and priority only grow). The eviction queue relies on it: an entry
that is out of date is too early, never too late.
"""

from __future__ import annotations

from collections.abc import Callable

from mem_cache.tree.node import Node

EvictionKey = tuple[int, ...]

SLRU_PROTECTED_HITS = 2
"""Hits that lift a node from the probationary to the protected segment."""

EVICTION_POLICIES: dict[str, Callable[[Node], EvictionKey]] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.hits, node.last_access),
    "slru": lambda node: (int(node.hits >= SLRU_PROTECTED_HITS), node.last_access),
    "priority": lambda node: (node.priority, node.last_access),
}
