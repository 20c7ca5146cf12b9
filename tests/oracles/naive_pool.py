"""Physical pages as a dictionary of owner counts: no free list, no order, no arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class NaivePool:
    """Pages `1 .. num_pages`; each is owned (a count), pending (behind fences) or free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owners: Counter[int] = Counter()
        self.fences: set[int] = set()
        self.pending: dict[int, set[int]] = {}

    @property
    def free(self) -> set[int]:
        return {page for page in self.ids if not self.owners[page] and page not in self.pending}

    @property
    def ids(self) -> range:
        return range(1, self.num_pages + 1)

    def can_alloc(self, n: int) -> bool:
        return 0 <= n <= len(self.free)

    def take(self, pages: Sequence[int]) -> None:
        """The pool handed these out."""
        assert set(pages) <= self.free, "a page that is not free was handed out"
        assert len(set(pages)) == len(pages), "a page was handed out twice"
        for page in pages:
            self.owners[page] = 1

    def can_retain(self, pages: Sequence[int]) -> bool:
        return all(page in self.ids and self.owners[page] > 0 for page in pages)

    def retain(self, pages: Sequence[int]) -> None:
        self.owners.update(pages)

    def can_release(self, pages: Sequence[int]) -> bool:
        return self.can_retain(pages) and len(set(pages)) == len(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page] and self.fences:
                self.pending[page] = set(self.fences)

    def lift(self, fence: int) -> None:
        self.fences.remove(fence)
        for waits_for in self.pending.values():
            waits_for.discard(fence)
        self.pending = {page: waits_for for page, waits_for in self.pending.items() if waits_for}
