"""Requests that wait, and the order in which they are admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from engine.request import Request

POLICIES = ("fcfs", "lpm", "priority")
"""fcfs: arrival. lpm: longest cached prefix first. priority: larger number first, then arrival."""

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

    def in_order(self) -> list[Request]:
        """All waiting requests, the next to admit first."""
        fresh = list(self._fresh.values())
        if self.policy == "priority":
            fresh.sort(key=lambda request: (-request.priority, request.arrival))
        elif self.policy == "lpm" and len(fresh) <= LPM_LIMIT:
            fresh.sort(key=lambda request: -self._cached_len(request))
        return [*self._retracted, *fresh]
