"""Events a second, over the last whole seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10


class Throughput:
    """Counts by the second, of which it keeps `WINDOW_S` and the current one.

    |  second  |  second  | ... |  second  | now, not whole yet: not in the rate
    |<---------- WINDOW_S seconds -------->|
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[int, int]] = deque()  # second, events in it; oldest first

    def add(self, count: int) -> None:
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))
        self._forget(second)

    def per_second(self) -> float:
        second = int(self._clock())
        self._forget(second)
        return sum(count for when, count in self._counts if when < second) / WINDOW_S

    def _forget(self, second: int) -> None:
        while self._counts and self._counts[0][0] < second - WINDOW_S:
            self._counts.popleft()
