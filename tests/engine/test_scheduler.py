"""Who runs, who waits, who gives way: the scheduler's decisions, read from the steps that it sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, add, assert_idle, make_llm, outputs, prompts_with_shared_heads, run

from devices.page_pool import Fence
from devices.pages import is_whole_pages, page_count
from engine import LLM, SamplingParams
from engine.errors import BadRequest
from engine.request import Request, RequestStatus
from engine.scheduler.estimate import (
    INITIAL_SHARE,
    MINIMUM_OF_INITIAL,
    OUTPUT_CAP,
    RETRACTION_HEADROOM,
    STEPS_TO_MINIMUM,
    OutputEstimate,
)
from engine.scheduler.queue import LPM_LIMIT, POLICIES, WaitingQueue
from engine.step import StepInput

EAGER = {"schedule_conservativeness": 0.001}
"""Admits whatever fits now and thinks of no output: the pool runs short on purpose."""


def ids(seed: int, n: int) -> list[int]:
    """A random prompt of `n` tokens."""
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


def up_to(n: int) -> SamplingParams:
    return replace(GREEDY, max_new_tokens=n)


def finish(llm: LLM, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not llm.core.has_work:
            return
        llm.core.step()
    raise AssertionError("no progress")


def record_steps(llm: LLM) -> list[StepInput]:
    steps: list[StepInput] = []
    launch = llm.core.runner.launch

    def recorded(step: StepInput) -> None:
        steps.append(step)
        launch(step)

    llm.core.runner.launch = recorded  # type: ignore[method-assign]
    return steps


def record_calls(owner: Any, name: str) -> list[Any]:
    """First arguments of every call of a method."""
    calls: list[Any] = []
    method = getattr(owner, name)

    def recorded(first: Any, *args: Any) -> Any:
        calls.append(first)
        return method(first, *args)

    setattr(owner, name, recorded)
    return calls


def admissions(llm: LLM) -> list[str]:
    """Ids in the order in which they leave the queue; a retracted request leaves it again."""
    order: list[str] = []
    remove = llm.core.scheduler.waiting.remove

    def recorded(request: Request) -> None:
        order.append(request.id)
        remove(request)

    llm.core.scheduler.waiting.remove = recorded  # type: ignore[method-assign]
    return order


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of a prompt alone in an engine without a cache."""
    engine = make_llm(tiny_path, page_size=1, disable_radix_cache=True, chunked_prefill_size=-1, max_total_tokens=256)
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int], n: int = 24) -> list[int]:
        have = known.get(tuple(prompt), [])
        if len(have) < n:
            have = known[tuple(prompt)] = outputs(run(engine, [prompt], up_to(n)))[0]
        return have[:n]

    return tokens


# Retraction.


def test_the_request_with_the_fewest_outputs_gives_way_and_comes_back_first(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=100, **EAGER)
    retracted, admitted = record_calls(llm.core.scheduler, "retract"), admissions(llm)
    prompts = [ids(seed, 20) for seed in (1, 2, 3)]
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(add(llm, prompt, up_to(30), request_id=f"old{i}"))
        llm.core.step()
        llm.core.step()
    assert [request.num_output for request in requests] == [6, 4, 2]
    while not retracted:
        llm.core.step()
    assert [request.id for request in retracted] == ["old2"], "two may stay, so one goes"
    kept = requests[2].output_ids
    assert 0 < len(kept) < min(requests[0].num_output, requests[1].num_output)
    assert requests[2].status is RequestStatus.WAITING
    late = add(llm, ids(4, 5), up_to(3), request_id="late")
    finish(llm)
    assert outputs(requests) == [plain(prompt, 30) for prompt in prompts]
    assert requests[2].output_ids[: len(kept)] == kept
    assert late.output_ids == plain(ids(4, 5), 3)
    assert admitted[3:].index("old2") < admitted[3:].index("late")
    assert_idle(llm)


def test_of_equal_outputs_the_longest_prompt_gives_way(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=64, **EAGER)
    retracted = record_calls(llm.core.scheduler, "retract")
    prompts = [ids(seed, n) for seed, n in ((1, 12), (2, 30), (3, 12))]
    requests = run(llm, prompts)
    assert retracted[0] is requests[1]
    assert outputs(requests) == [plain(prompt) for prompt in prompts]


def test_of_equal_outputs_and_prompts_the_latest_gives_way(tiny_path):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=64, **EAGER)
    retracted = record_calls(llm.core.scheduler, "retract")
    requests = run(llm, [ids(seed, 16) for seed in (1, 2, 3)])
    assert retracted[0] is requests[2]


def test_the_lowest_priority_gives_way_before_the_fewest_outputs(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=64, schedule_policy="priority", **EAGER)
    retracted = record_calls(llm.core.scheduler, "retract")
    low = add(llm, ids(1, 16), up_to(30), priority=0)
    for _ in range(5):
        llm.core.step()
    high = [add(llm, ids(seed, 16), up_to(30), priority=5) for seed in (2, 3)]
    while not retracted:
        llm.core.step()
    assert retracted == [low]
    assert low.num_output > max(request.num_output for request in high)
    finish(llm)
    assert outputs([low, *high]) == [plain(ids(seed, 16), 30) for seed in (1, 2, 3)]
    assert_idle(llm)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_than_needed_are_retracted(tiny_path, policy):
    """Each retraction frees a whole request; a second one in the same step would be one too many."""
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=100, schedule_policy=policy, **EAGER)
    retracted = record_calls(llm.core.scheduler, "retract")
    for seed in range(5):
        add(llm, ids(seed, 18), up_to(20))
    while llm.core.has_work:
        before = len(retracted)
        llm.core.step()
        assert len(retracted) - before <= 1
    assert retracted
    assert_idle(llm)


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_a_stream_that_is_retracted_after_any_token_repeats_and_loses_nothing(tiny_path, plain, chunk, no_cache):
    llm = make_llm(
        tiny_path, page_size=1, max_total_tokens=128, chunked_prefill_size=chunk, disable_radix_cache=no_cache
    )
    prompt = ids(5, 21)
    whole = llm.generate(prompt, GREEDY)
    for k in range(1, 21):
        tokens: list[int] = []
        text = ""
        for piece in llm.generate(prompt, GREEDY, stream=True):
            tokens += piece.token_ids
            text += piece.text
            if len(tokens) == k and llm.core.scheduler.running:
                llm.core.scheduler.retract(llm.core.scheduler.running[0])
        assert tokens == plain(prompt), f"retracted after token {k}"
        assert text == whole.text
    assert llm.stats()["num_retracted_total"] == 20
    assert_idle(llm)


def test_a_request_that_comes_back_in_another_row_is_computed_there(tiny_path, plain):
    """With pages of one token it comes back with one token to compute, and the batch looks as it did before."""
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=256)
    prompts = [ids(1, 9), ids(2, 12)]
    requests = [add(llm, prompt) for prompt in prompts]
    steps = record_steps(llm)
    while requests[1].num_output < 4:
        llm.core.step()
    row, free = requests[1].kv.row, llm.core.allocator.rows._free
    llm.core.scheduler.retract(requests[1])
    free.insert(0, free.pop())  # the row that is taken next is another
    llm.core.step()
    assert steps[-1].num_new.tolist() == [1, 1]
    assert steps[-1].rows.tolist() == [request.kv.row for request in requests]
    assert requests[1].kv.row != row
    finish(llm)
    assert [request.output_ids for request in requests] == [plain(prompt) for prompt in prompts]


def test_a_batch_that_stays_keeps_its_columns(tiny_path):
    llm = make_llm(tiny_path, max_total_tokens=256)
    for seed in (1, 2):
        add(llm, ids(seed, 9), up_to(3 + seed))
    steps = record_steps(llm)
    finish(llm)
    first, second, third, fourth = steps[1:5]
    assert first.rows is second.rows is third.rows
    assert third.starts.tolist() == [start + 2 for start in first.starts.tolist()]
    assert third.sampling.position.tolist() == [position + 2 for position in first.sampling.position.tolist()]
    assert fourth.rows.tolist() == first.rows.tolist()[1:], "the first has ended"


def test_retracted_requests_come_back_before_every_waiting_one_of_their_priority():
    @dataclass
    class Waiting:
        id: str
        priority: int
        arrival: int
        passed_over: int = 0

    for policy in POLICIES:
        queue = WaitingQueue(policy, lambda request: request.arrival)
        fresh = [Waiting(f"fresh{i}", 0 if policy == "priority" else 9, i) for i in range(3)]
        back = [Waiting(f"back{i}", 0, 10 + i) for i in range(2)]
        for request in fresh:
            queue.add(request)  # type: ignore[arg-type]
        for request in back:
            queue.add_retracted(request)  # type: ignore[arg-type]
        order = [request.id for request in queue.in_order()]
        assert order[:2] == ["back1", "back0"], "the one retracted last held its pages longest"
        assert len(queue) == len(order) == 5
        queue.remove(back[0])  # type: ignore[arg-type]
        queue.remove(fresh[0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not in"):
            queue.remove(fresh[0])  # type: ignore[arg-type]
        assert len(queue) == 3


# Pages that are still being let go.


def fenced_and_short(llm: LLM) -> tuple[list[Request], Fence]:
    """Four requests that need a page each, none free, and 21 pages of a fifth behind a fence."""
    pool = llm.core.allocator.families.pools["full"]
    requests = [add(llm, ids(seed, 20), up_to(6)) for seed in (1, 2, 3, 4)]
    fifth = add(llm, ids(5, 20), up_to(6))
    llm.core.step()
    spare = pool.num_free + llm.stats()["tree_evictable_pages"]
    assert all(request.num_output == 1 for request in [*requests, fifth])
    fence = pool.fence("a remote reader")
    llm.core.abort(fifth.id)
    assert spare < 4
    return requests, fence


@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_pending_pages_are_waited_for_and_nobody_gives_way(tiny_path, plain, no_cache):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=103, disable_radix_cache=no_cache, **EAGER)
    pool = llm.core.allocator.families.pools["full"]
    requests, fence = fenced_and_short(llm)
    steps = record_steps(llm)
    for _ in range(5):
        llm.core.step()
    assert steps == [], "nothing can run before the fence is lifted"
    assert llm.stats()["num_retracted_total"] == 0
    assert pool.num_pending >= 1
    assert len(llm.core.scheduler.running) == 4
    pool.lift(fence)
    llm.core.step()
    assert len(steps) == 1
    assert len(steps[0].rows) == 4
    finish(llm)
    assert llm.stats()["num_retracted_total"] == 0
    assert outputs(requests) == [plain(ids(seed, 20), 6) for seed in (1, 2, 3, 4)]
    assert_idle(llm)


@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_a_newcomer_waits_for_pending_pages_and_takes_nothing_meanwhile(tiny_path, plain, no_cache):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=64, disable_radix_cache=no_cache, **EAGER)
    pool = llm.core.allocator.families.pools["full"]
    first = add(llm, ids(1, 50), up_to(12))
    llm.core.step()
    fence = pool.fence("a remote reader")
    llm.core.abort(first.id)
    second = add(llm, ids(2, 40), up_to(12))
    for _ in range(5):
        assert llm.core.step() == []
    assert second.status is RequestStatus.WAITING
    assert pool.num_free + pool.num_pending <= max(40, pool.num_free + 50 * no_cache), (
        "no more is evicted than it needs"
    )
    pool.lift(fence)
    finish(llm)
    assert second.output_ids == plain(ids(2, 40), 12)
    assert_idle(llm)


def test_while_evicted_pages_are_pending_no_more_are_evicted(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=128)
    pool, tree = llm.core.allocator.families.pools["full"], llm.core.allocator.tree
    run(llm, [ids(1, 100)], up_to(1))
    fence = pool.fence("a remote reader")
    request = add(llm, ids(2, 60), up_to(8))
    for _ in range(5):
        assert llm.core.step() == []
    assert (pool.num_free, pool.num_pending, tree.num_evictable) == (28, 32, 68)
    pool.lift(fence)
    finish(llm)
    assert request.output_ids == plain(ids(2, 60), 8)
    assert_idle(llm)


@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_that_come_free_one_step_late_stop_nobody(tiny_path, plain, page_size, no_cache):
    """As with a step in flight: a fence is up whenever a step is planned, and goes down one step later."""
    llm = make_llm(
        tiny_path,
        page_size=page_size,
        max_total_tokens=96,
        disable_radix_cache=no_cache,
        chunked_prefill_size=16,
        **EAGER,
    )
    families = llm.core.allocator.families
    fences = [families.fence("the step before")]

    def one_step_late(step: int, requests: list[Request]) -> None:
        fences.append(families.fence("the step before"))
        families.lift(fences.pop(0))

    retracted = record_calls(llm.core.scheduler, "retract")
    prompts = [ids(seed, 20) for seed in range(4)]
    requests = run(llm, prompts, up_to(20), between=one_step_late, max_steps=400)
    assert outputs(requests) == [plain(prompt, 20) for prompt in prompts]
    assert 1 <= len(retracted) <= 12
    families.lift(fences.pop())
    assert_idle(llm)


# What does not fit.


def test_what_can_never_fit_is_refused_at_once_and_the_queue_lives_on(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=64, context_length=256)
    with pytest.raises(BadRequest, match=r"prompt=100: .*KV pool holds 64.*--max-total-tokens"):
        add(llm, ids(1, 100))
    with pytest.raises(BadRequest, match="prompt=65"):
        add(llm, ids(1, 65))
    assert not llm.core.has_work
    grows, behind = add(llm, ids(2, 60), up_to(30)), add(llm, ids(3, 5), up_to(8))
    finish(llm)
    assert grows.finish.reason == "capacity"
    assert grows.output_ids == plain(ids(2, 60), 5)
    assert behind.output_ids == plain(ids(3, 5), 8)
    whole = add(llm, ids(4, 64), up_to(1))
    finish(llm)
    assert (whole.finish.reason, whole.output_ids) == ("length", plain(ids(4, 64), 1))
    assert_idle(llm)


def test_one_that_outgrew_the_pool_ends_and_those_it_pushed_out_come_back(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=64, **EAGER)
    small, large = add(llm, ids(1, 10), up_to(20)), add(llm, ids(2, 40), up_to(100))
    finish(llm)
    assert small.output_ids == plain(ids(1, 10), 20)
    assert large.finish.reason == "capacity"
    assert large.output_ids == plain(ids(2, 40), 25)
    assert_idle(llm)


def test_nobody_overtakes_the_head_of_the_queue(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=100)
    order = admissions(llm)
    running = add(llm, ids(1, 60), up_to(20), request_id="running")
    llm.core.step()
    add(llm, ids(2, 50), up_to(10), request_id="large")
    add(llm, ids(3, 2), up_to(2), request_id="small")
    for _ in range(10):
        llm.core.step()
    assert order == ["running"], "the large one does not fit yet, the small one stands behind it"
    finish(llm)
    assert order == ["running", "large", "small"]
    assert running.output_ids == plain(ids(1, 60), 20)
    assert llm.stats()["num_retracted_total"] == 0


def test_admission_keeps_room_for_the_output_that_is_expected(tiny_path):
    """Two requests of 20 + 40 tokens in 80: together only when nobody thinks of outputs."""
    for options, together in ((EAGER, True), ({}, False)):
        llm = make_llm(tiny_path, page_size=1, max_total_tokens=80, **options)
        for seed in (1, 2):
            add(llm, ids(seed, 20), up_to(40))
        llm.core.step()
        assert (llm.stats()["num_running"] == 2) is together
        finish(llm)
        assert (llm.stats()["num_retracted_total"] > 0) is together


# Policies.


def warmed(tiny_path: Path, policy: str) -> tuple[LLM, list[str]]:
    """One row, so that requests run one after another, and cached prefixes of 32 and 64 tokens."""
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=512, schedule_policy=policy, max_running_requests=1)
    run(llm, [ids(1, 33)], up_to(1))
    run(llm, [ids(2, 65)], up_to(1))
    order = admissions(llm)
    add(llm, ids(3, 40), up_to(2), request_id="cold")
    add(llm, ids(1, 32) + ids(4, 20), up_to(2), request_id="warm")
    add(llm, ids(2, 64) + ids(5, 9), up_to(2), request_id="warmer")
    add(llm, ids(6, 9), up_to(2), request_id="cold-too")
    return llm, order


def test_lpm_serves_the_longest_cached_prefix_first(tiny_path):
    llm, order = warmed(tiny_path, "lpm")
    finish(llm)
    assert order == ["warmer", "warm", "cold", "cold-too"]


def test_fcfs_serves_by_arrival_whatever_is_cached(tiny_path):
    llm, order = warmed(tiny_path, "fcfs")
    finish(llm)
    assert order == ["cold", "warm", "warmer", "cold-too"]


def test_lpm_serves_a_long_queue_by_arrival():
    class Waiting:
        def __init__(self, number: int) -> None:
            self.id, self.number, self.passed_over = str(number), number, 0

    queue = WaitingQueue("lpm", lambda request: request.number)  # type: ignore[attr-defined]
    for number in range(LPM_LIMIT):
        queue.add(Waiting(number))  # type: ignore[arg-type]
    assert [r.number for r in queue.in_order()] == list(range(LPM_LIMIT))[::-1]  # type: ignore[attr-defined]
    queue.add(Waiting(LPM_LIMIT))  # type: ignore[arg-type]
    assert [r.number for r in queue.in_order()] == list(range(LPM_LIMIT + 1))  # type: ignore[attr-defined]


def test_priority_serves_the_larger_number_first_then_arrival(tiny_path):
    llm = make_llm(tiny_path, page_size=16, schedule_policy="priority", max_running_requests=1)
    order = admissions(llm)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 2), ("e", 1)):
        add(llm, ids(ord(name), 10), up_to(2), priority=priority, request_id=name)
    finish(llm)
    assert order == ["b", "d", "e", "a", "c"]


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_run_than_there_are_rows(tiny_path, plain, limit):
    llm = make_llm(tiny_path, page_size=16, max_running_requests=limit)
    steps = record_steps(llm)
    prompts = prompts_with_shared_heads(seed=1, n=8, max_len=150)
    requests = run(llm, prompts, up_to(6))
    assert max(len(step.rows) for step in steps) == limit
    assert max(int(step.rows.max()) for step in steps) == limit
    assert outputs(requests) == [plain(prompt, 6) for prompt in prompts]


# Chunks.


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_the_prompt_tokens_of_a_step_stay_within_the_budget(tiny_path, chunk):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=768, chunked_prefill_size=chunk, disable_radix_cache=True)
    steps = record_steps(llm)
    prompts = prompts_with_shared_heads(seed=2, n=5, max_len=150)
    run(llm, prompts, up_to(4))
    prefill = [int(step.num_new[(step.num_new > 1) | ~step.is_sampled].sum()) for step in steps]
    assert max(prefill) == chunk
    # Nothing is computed twice: every prompt once, and every output but the last.
    assert sum(int(step.num_new.sum()) for step in steps) == sum(map(len, prompts)) + 3 * len(prompts)
    # Nothing is left lying: while a prompt is not through, its step is full.
    assert {used for used, step in zip(prefill, steps, strict=True) if not step.is_sampled.all()} == {chunk}


def test_without_a_chunk_size_prompts_are_taken_whole(tiny_path):
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=-1)
    steps = record_steps(llm)
    prompts = [ids(seed, 200) for seed in range(4)]
    run(llm, prompts, up_to(2))
    assert steps[0].num_new.tolist() == [200] * 4
    assert all(step.is_sampled.all() for step in steps)


def test_decodes_are_in_every_step_beside_a_long_prefill(tiny_path):
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=16)
    steps = record_steps(llm)
    first = add(llm, ids(1, 10))
    llm.core.step()
    add(llm, ids(2, 150), up_to(2))
    for n in range(2, 9):
        llm.core.step()
        assert first.num_output == n
        assert steps[-1].num_new.tolist() == [1, 16]
        assert steps[-1].is_sampled.tolist() == [True, False]


def test_where_the_device_resumes_by_the_page_a_chunk_ends_on_a_page_border(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=40)
    scheduler = llm.core.scheduler
    scheduler.capabilities = replace(scheduler.capabilities, resume_unit="page")
    steps = record_steps(llm)
    prompts = prompts_with_shared_heads(seed=5, n=6, max_len=170)
    requests = run(llm, prompts, up_to(6))
    ends = [
        (int(start + new), bool(sampled))
        for step in steps
        for start, new, sampled in zip(step.starts, step.num_new, step.is_sampled, strict=True)
    ]
    assert all(is_whole_pages(end, 16) for end, sampled in ends if not sampled)
    assert sum(not sampled for _, sampled in ends) > 10
    assert max(int(step.num_new[step.num_new > 1].sum()) for step in steps) <= 40
    assert outputs(requests) == [plain(prompt, 6) for prompt in prompts]
    assert_idle(llm)


@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_four_rows_and_eight_requests_of_several_chunks_lose_nobody(tiny_path, plain, no_cache):
    llm = make_llm(
        tiny_path,
        page_size=16,
        max_total_tokens=640,
        max_running_requests=4,
        chunked_prefill_size=16,
        disable_radix_cache=no_cache,
    )
    steps = record_steps(llm)
    prompts = [ids(seed, 64 + 4 * seed) for seed in range(8)]  # 4 to 6 chunks each
    requests = run(llm, prompts)
    assert outputs(requests) == [plain(prompt) for prompt in prompts]
    assert max(len(step.rows) for step in steps) == 4
    assert sum(int(step.is_sampled.sum()) for step in steps) == 8 * 24, "only a last chunk is sampled"
    assert_idle(llm)


# The estimate of outputs.


@dataclass
class Writing:
    """What the estimate reads of a request."""

    prompt_len: int
    max_tokens: int
    num_output: int


def test_the_estimate_starts_high_decays_by_steps_and_stops_at_its_floor():
    estimate = OutputEstimate()
    assert estimate.share == INITIAL_SHARE == 0.7
    estimate.step_passed()
    floor = INITIAL_SHARE * MINIMUM_OF_INITIAL
    assert estimate.share == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    for _ in range(STEPS_TO_MINIMUM // 2 - 1):
        estimate.step_passed()
    assert estimate.share == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(2 * STEPS_TO_MINIMUM):
        estimate.step_passed()
    assert estimate.share == pytest.approx(floor) == pytest.approx(0.098)


def test_a_retraction_sets_the_estimate_from_what_the_survivors_wrote():
    estimate = OutputEstimate()
    for _ in range(STEPS_TO_MINIMUM):
        estimate.step_passed()
    estimate.retracted([Writing(10, 110, 30), Writing(50, 150, 10)])
    assert estimate.share == pytest.approx((30 + 10 + 2 * RETRACTION_HEADROOM) / (100 + 100 + 1))
    high = estimate.share
    estimate.retracted([Writing(10, 1010, 1)])
    assert estimate.share == high, "a retraction never lowers it"
    estimate.retracted([Writing(10, 30, 20)])
    assert estimate.share == 1.0, "and it is a share"
    estimate.reset()
    assert estimate.share == 0.7


def test_conservativeness_scales_the_start_up_to_the_whole():
    assert OutputEstimate(0.5).share == pytest.approx(0.35)
    assert OutputEstimate(1.2).share == pytest.approx(0.84)
    assert OutputEstimate(50).share == 1.0


def test_an_expected_length_is_known_tokens_and_a_share_of_what_may_follow():
    estimate = OutputEstimate()
    assert estimate.expected_len(Writing(10, 110, 0)) == 10 + 70
    assert estimate.expected_len(Writing(10, 110, 50)) == 60 + 35
    assert estimate.expected_len(Writing(10, 110, 100)) == 110
    assert estimate.expected_len(Writing(10, 10**7, 0)) == 10 + int(OUTPUT_CAP * 0.7)


def test_the_engines_estimate_decays_rises_with_a_retraction_and_resets_when_idle(tiny_path):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=70, schedule_conservativeness=0.1)
    estimate = llm.core.scheduler._estimate
    assert estimate.share == pytest.approx(0.07)
    for seed in (1, 2):
        add(llm, ids(seed, 20), up_to(40))
    shares = []
    while not llm.stats()["num_retracted_total"]:
        shares.append(estimate.share)
        llm.core.step()
    assert len(shares) > 10
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares) - 1, "each step lowers it, but the one that only admits"
    [survivor] = llm.core.scheduler.running
    written = survivor.num_output - 1 + RETRACTION_HEADROOM  # before the token of this step
    assert estimate.share == pytest.approx(written / 41)
    finish(llm)
    llm.core.launch()
    assert estimate.share == pytest.approx(0.07)


# Eviction.


def test_eviction_takes_exactly_what_a_plan_lacks_and_nothing_inside_a_page(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=128)
    run(llm, [ids(seed, 32) for seed in (1, 2, 3)], up_to(1))
    pool = llm.core.allocator.families.pools["full"]
    assert (llm.stats()["tree_evictable_pages"], pool.num_free) == (6, 2)
    evictions = record_calls(llm.core.allocator.tree, "evict")
    request = add(llm, ids(4, 40), up_to(24))
    expected_free = 2
    while llm.core.has_work:
        before = page_count(request.kv.kv_allocated_len, 16)
        evictions.clear()
        llm.core.launch()
        new = page_count(request.kv.kv_allocated_len, 16) - before
        lacking = max(0, new - expected_free)
        assert evictions == ([lacking] if lacking else [])
        expected_free = max(0, expected_free - new)
        assert pool.num_free == expected_free
        llm.core.collect()
        if request.finish is None:
            assert pool.num_free == expected_free, "publishing frees nothing"
    assert request.output_ids == plain(ids(4, 40), 24)


def test_a_request_evicts_no_prefix_that_it_uses_itself(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=64)
    prompt = ids(1, 33)
    run(llm, [prompt], up_to(1))
    request = run(llm, [prompt], up_to(24))[0]
    assert request.cached_tokens == 32
    assert request.output_ids == plain(prompt, 24)
    assert_idle(llm)


@pytest.mark.parametrize("num_waiting", [0, 1, 30])
def test_waiting_requests_evict_nothing(tiny_path, num_waiting):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=128, max_running_requests=1)
    run(llm, [ids(1, 32), ids(2, 32)], up_to(1))
    evictions = record_calls(llm.core.allocator.tree, "evict")
    add(llm, ids(3, 40), up_to(8))
    for seed in range(num_waiting):
        add(llm, ids(seed, 60), up_to(1))
    for _ in range(8):
        llm.core.step()
    assert evictions == [], "one request needs three pages and four are free"
