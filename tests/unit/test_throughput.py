"""Events a second, over the last whole seconds."""

from __future__ import annotations

import random

from hash_engine import Clock

from engine.server.throughput import WINDOW_S, Throughput


def test_the_rate_is_that_of_the_last_whole_seconds():
    clock, draw, all_events = Clock(), random.Random(3), []
    throughput = Throughput(clock)
    for _ in range(2000):
        clock.now_s += draw.choice((0.0, 0.01, 0.3, 1.0, 2.5, 30.0 if draw.random() < 0.1 else 0.1))
        if draw.random() < 0.7:
            all_events.append((clock.now_s, draw.randrange(50)))
            throughput.add(all_events[-1][1])
        end = int(clock.now_s)
        inside = sum(count for when, count in all_events if end - WINDOW_S <= when < end)
        assert throughput.per_second() == inside / WINDOW_S
    assert len(throughput._counts) <= WINDOW_S + 1
