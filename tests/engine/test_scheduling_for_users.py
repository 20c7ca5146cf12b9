"""Priorities that displace, patience that ends, time that runs out, and the line that says so."""

from __future__ import annotations

import logging

import pytest
from harness import add, assert_idle, make_llm, outputs, run

from engine import SamplingParams
from engine.request import RequestStatus
from engine.scheduler.queue import PATIENCE

LONG = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)


def finish_order(llm, requests):
    order = []
    while llm.core.has_work:
        order += [request for request in llm.core.step() if request.finish is not None]
    return [requests.index(request) for request in order]


def test_a_much_higher_priority_displaces_the_lowest_and_its_tokens_stay(tiny_path):
    llm = make_llm(tiny_path, schedule_policy="priority", max_running_requests=2)
    low, middle = add(llm, list(range(3, 40)), LONG, priority=0), add(llm, list(range(50, 90)), LONG, priority=5)
    for _ in range(5):
        llm.core.step()
    before = low.output_ids
    high = add(llm, list(range(100, 130)), SHORT, priority=11)
    llm.core.step()
    assert (low.status, middle.status, high.status) == (
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
    )
    assert finish_order(llm, [low, middle, high]) == [2, 1, 0]
    assert low.output_ids[: len(before)] == before
    assert outputs([low]) == outputs(run(make_llm(tiny_path), [list(range(3, 40))], LONG))
    assert_idle(llm)


@pytest.mark.parametrize(("priority", "displaces"), [(10, False), (11, True)])
def test_a_priority_within_the_threshold_waits(tiny_path, priority, displaces):
    llm = make_llm(tiny_path, schedule_policy="priority", max_running_requests=1)
    running = add(llm, [5, 6, 7], LONG, priority=0)
    llm.core.step()
    add(llm, [8, 9], SHORT, priority=priority)
    llm.core.step()
    assert (running.num_retractions == 1) is displaces


def test_only_the_priority_policy_displaces(tiny_path):
    llm = make_llm(tiny_path, max_running_requests=1)
    running = add(llm, [5, 6, 7], LONG, priority=0)
    llm.core.step()
    add(llm, [8, 9], SHORT, priority=1000)
    llm.core.step()
    assert running.num_retractions == 0


def test_nobody_waits_for_ever_behind_cache_hits(tiny_path):
    """One row; a stream of requests with a long cached prefix keeps coming. The one without a hit gets its turn."""
    llm = make_llm(tiny_path, schedule_policy="lpm", max_running_requests=1, page_size=16)
    popular = list(range(3, 70))
    run(llm, [popular], SHORT)
    add(llm, [*popular, 80], SHORT)
    llm.core.step()
    unlucky = add(llm, list(range(200, 240)), SHORT)
    served = 0
    while unlucky.finish is None and served < 3 * PATIENCE:
        while len(llm.core.scheduler.waiting) < 3:
            add(llm, [*popular, 81 + served % 50, served % 200 + 3], SHORT)
        served += sum(request.finish is not None for request in llm.core.step())
    assert unlucky.finish is not None
    assert PATIENCE <= served < PATIENCE + 8
    assert unlucky.passed_over == PATIENCE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("where", ["waiting", "decoding"])
def test_a_request_ends_when_its_time_is_up(tiny_path, where):
    llm = make_llm(tiny_path, max_running_requests=1)
    clock = llm.core.scheduler.clock = Clock()
    limited = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True, time_limit_s=10.0)
    other = add(llm, [9, 8, 7], LONG) if where == "waiting" else None
    request = add(llm, [5, 6, 7], limited)
    for _ in range(5):
        llm.core.step()
    clock.now += 9.9
    llm.core.step()
    assert request.finish is None
    clock.now += 0.2
    ended = [one for one in llm.core.step() if one.finish is not None]
    assert ended == [request]
    assert request.finish.reason == "timeout"
    assert request.num_output == (0 if other else 6)
    while llm.core.has_work:
        llm.core.step()
    assert other is None or other.finish.reason == "length"
    assert_idle(llm)


def test_the_status_log_writes_one_line_each_interval(tiny_path, caplog):
    llm = make_llm(tiny_path, decode_log_interval=5)
    with caplog.at_level(logging.INFO, logger="rung"):
        run(llm, [[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines] == ["5", "10"]
    columns = [[i for i, char in enumerate(line) if char == "|"] for line in lines]
    assert columns[0] == columns[1]
    assert "run   2 wait    0" in lines[0]
