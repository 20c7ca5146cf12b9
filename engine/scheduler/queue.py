"""Requests that wait, and the order in which they are admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from engine.request import Request

POLICIES = ("fcfs", "lpm", "priority")
"""fcfs: arrival. lpm: longest cached prefix first. priority: larger number first, then arrival."""

PATIENCE = 32
"""A request that so many younger ones went before goes first itself: nobody waits for ever behind cache hits."""

LPM_LIMIT = 128
"""Longer queues are served by arrival: looking every request up in the tree would cost more than it saves."""


class WaitingQueue:
    """Waiting requests. A retracted request goes before every other: it was admitted once already."""

    def __init__(self, policy: str, cached_len: Callable[[Request], int]) -> None:
        """`cached_len`: pages of a request's tokens that the tree has now (for lpm)."""
        self.policy = policy
        self._cached_len = cached_len
        self._retracted: deque[Request] = deque()
        self._fresh: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._retracted) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        yield from self._retracted
        yield from self._fresh.values()

    def add(self, request: Request) -> None:
        self._fresh[request.id] = request

    def add_retracted(self, request: Request) -> None:
        self._retracted.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a waiting request out. Raises ValueError when it does not wait here."""
        if self._fresh.pop(request.id, None) is None:
            self._retracted.remove(request)

    def admitted(self, request: Request) -> None:
        """Take out a request that was admitted; older ones that still wait were passed over."""
        self.remove(request)
        for other in self._fresh.values():
            other.passed_over += other.arrival < request.arrival

    def in_order(self) -> list[Request]:
        """All waiting requests, the next to admit first."""
        fresh = list(self._fresh.values())
        if self.policy == "priority":
            # Retracted requests stand first among their equals: the sort is stable.
            return sorted([*self._retracted, *fresh], key=lambda request: -request.priority)
        if self.policy == "lpm" and len(fresh) <= LPM_LIMIT:
            fresh.sort(key=self._lpm_key)
        return [*self._retracted, *fresh]

    def _lpm_key(self, request: Request) -> tuple[int, int]:
        if request.passed_over >= PATIENCE:
            return (0, request.arrival)
        return (1, -self._cached_len(request))
