"""What one kind of KV adds to the prefix tree: where a match may end, and how its pages split and go back.

The walk in `prefix_tree.py` knows nodes, edges and locks. A component knows one family of pages: full attention keeps
a page for every page of an edge; a window, a recurrent state or a compressed cache will keep fewer and shorten a match
to where their KV is alive. Adding one does not touch the walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from devices.page_pool import PagePool
from devices.pages import IntArray
from mem_cache.tree.node import Node


class Component(Protocol):
    """One family of pages on the tree's nodes (`Node.held[family]`)."""

    family: str

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        """Longest prefix of the matched `num_pages` along `path` that a computation may continue from."""
        ...

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        """Divide what an edge holds at its page `at`."""
        ...

    def drop(self, held: IntArray) -> None:
        """Give the tree's count of these pages back."""
        ...


class FullPages:
    """Full attention: one page for every page of an edge, so every matched page may be continued from."""

    def __init__(self, pool: PagePool) -> None:
        self.family = pool.family
        self._pool = pool

    def legal_end(self, path: Sequence[Node], num_pages: int) -> int:
        return num_pages

    def split(self, held: IntArray, at: int) -> tuple[IntArray, IntArray]:
        return held[:at], held[at:]

    def drop(self, held: IntArray) -> None:
        self._pool.release(held)
