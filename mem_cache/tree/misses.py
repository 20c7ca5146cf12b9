"""Why a prefix was not found: what the tree had and let go, and what it has for somebody else only.

A match that ends early is explained by the first page it lacks. The memory of evicted pages is bounded and knows a page
by its tokens alone, so "evicted" is right but for equal pages in different places.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Literal

MissReason = Literal["disabled", "below_page", "clamped", "evicted", "other_key", "never_seen"]
MISS_REASONS: tuple[MissReason, ...] = ("disabled", "below_page", "clamped", "evicted", "other_key", "never_seen")
MAX_REMEMBERED = 1 << 16


class MissLedger:
    """What is remembered for explaining misses."""

    def __init__(self, page_bytes: int, max_remembered: int = MAX_REMEMBERED) -> None:
        self.num_evicted = 0
        self._page_bytes = page_bytes
        self._max_remembered = max_remembered
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._first_pages: Counter[bytes] = Counter()

    def begins(self, raw: bytes) -> None:
        """A branch begins at the root, in any namespace, with the first page of `raw`."""
        self._first_pages[raw[: self._page_bytes]] += 1

    def ends(self, raw: bytes) -> None:
        """Such a branch is gone."""
        first = raw[: self._page_bytes]
        self._first_pages[first] -= 1
        if not self._first_pages[first]:
            del self._first_pages[first]

    def evicted(self, raw: bytes) -> None:
        """Whole pages went."""
        for start in range(0, len(raw), self._page_bytes):
            page = hash(raw[start : start + self._page_bytes])
            self._evicted[page] = None
            self._evicted.move_to_end(page)
            self.num_evicted += 1
        while len(self._evicted) > self._max_remembered:
            self._evicted.popitem(last=False)

    def why(self, page: bytes, *, is_first: bool) -> MissReason:
        """Why the tree lacks this page behind what was matched."""
        if is_first and page in self._first_pages:
            return "other_key"
        return "evicted" if hash(page) in self._evicted else "never_seen"
