"""Steps planned while a result is on its way: nothing that anybody sees changes.

The CPU has nothing to overlap, but its runner keeps the contract: a step may name tokens that only the device knows.
So `depth = 1` runs the real model that way, and the engine without overlap is the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    GREEDY,
    add,
    assert_idle,
    finish_all,
    force_retractions,
    make_llm,
    outputs,
    prompts_with_shared_heads,
    run,
    run_turn,
)

from engine import LLM
from engine.attention import resolved
from engine.step import StepInput, decode, encode, refer

PROMPTS = prompts_with_shared_heads(seed=11, n=9)
SEEDED = replace(GREEDY, temperature=0.9, seed=5)
MIXED = [
    GREEDY,
    SEEDED,
    replace(SEEDED, top_k=9, seed=6),
    replace(GREEDY, logit_bias={7: 3.0, 9: -100.0}),
    replace(SEEDED, top_p=0.7, min_p=0.01),
    replace(GREEDY, return_logprob=True, top_logprobs_num=2, logprob_start_len=0),
    replace(GREEDY, max_new_tokens=1),
    replace(SEEDED, min_new_tokens=6, stop_token_ids=(17, 40, 99), ignore_eos=False),
    replace(SEEDED, return_logprob=True, seed=8),
]


def ahead(path: Path, **kwargs: Any) -> tuple[LLM, list[StepInput]]:
    """An engine that launches a step before it takes the last one's result, and the steps that it launches."""
    llm = make_llm(path, **kwargs)
    llm.core.depth = 1
    steps: list[StepInput] = []
    launch = llm.core.runner.launch

    def recorded(step: StepInput) -> None:
        steps.append(step)
        launch(decode(encode(step), StepInput))

    llm.core.runner.launch = recorded  # type: ignore[method-assign]
    return llm, steps


def num_unseen(steps: list[StepInput]) -> int:
    return sum(int((step.token_ids < 0).sum()) for step in steps)


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[list[int]]:
    return outputs(run(make_llm(tiny_path, page_size=1, disable_radix_cache=True), PROMPTS))


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("chunk", [7, -1])
def test_tokens_are_those_of_one_step_after_another(tiny_path, expected, page_size, chunk):
    llm, steps = ahead(tiny_path, page_size=page_size, chunked_prefill_size=chunk)
    for _ in range(2):
        assert outputs(run(llm, PROMPTS)) == expected
    # Every token but a request's first is the input of a step that did not wait for it, but the last of all.
    assert num_unseen(steps) > sum(map(len, expected))
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_retraction_forgets_what_is_on_its_way(tiny_path, expected, page_size):
    llm, steps = ahead(tiny_path, page_size=page_size, chunked_prefill_size=48)
    assert outputs(run(llm, PROMPTS, between=force_retractions(llm, every=2))) == expected
    assert llm.stats()["num_retracted_total"] > 5
    assert num_unseen(steps)
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_pool_that_is_far_too_small(tiny_path, expected, page_size, policy):
    llm, steps = ahead(tiny_path, page_size=page_size, max_total_tokens=240, schedule_policy=policy)
    assert outputs(run(llm, PROMPTS)) == expected
    assert num_unseen(steps)
    assert_idle(llm)


def test_choices_logprobs_and_ends_of_all_kinds(tiny_path):
    plain, (llm, steps) = make_llm(tiny_path, page_size=16), ahead(tiny_path, page_size=16)
    want, got = run(plain, PROMPTS, MIXED), run(llm, PROMPTS, MIXED)
    assert outputs(got) == outputs(want)
    assert [request.finish for request in got] == [request.finish for request in want]
    for mine, theirs in zip(got, want, strict=True):
        if theirs.scores is not None:
            assert mine.scores is not None
            assert [s and s.token_id for s in mine.scores.prompt] == [s and s.token_id for s in theirs.scores.prompt]
            logprobs = [[score.logprob for score in request.scores.output] for request in (mine, theirs)]
            assert np.allclose(*logprobs, atol=1e-4)
    assert num_unseen(steps)
    assert_idle(llm)


def test_a_penalty_waits_for_the_token_it_counts(tiny_path):
    params = [replace(GREEDY, frequency_penalty=0.5), replace(SEEDED, repetition_penalty=1.3), GREEDY]
    llm, steps = ahead(tiny_path, page_size=16)
    want = outputs(run(make_llm(tiny_path, page_size=16), PROMPTS[:3], params))
    assert outputs(run(llm, PROMPTS[:3], params)) == want
    assert num_unseen(steps) == 0
    assert_idle(llm)


def test_answers_that_fork(tiny_path):
    params = replace(SEEDED, n=3)
    results = []
    for llm in (make_llm(tiny_path, page_size=16), ahead(tiny_path, page_size=16)[0]):
        first = [add(llm, prompt, params) for prompt in PROMPTS[:4]]
        family = [(request, *request.siblings) for request in first]
        finish_all(llm)
        results.append([outputs(members) for members in family])
        assert_idle(llm)
    assert results[0] == results[1]


def test_turns_of_a_session(tiny_path):
    results = []
    for llm, steps in ((make_llm(tiny_path, page_size=16), []), ahead(tiny_path, page_size=16)):
        llm.core.sessions.open("s")
        said = [run_turn(llm, "s", turn, replace(GREEDY, max_new_tokens=9)) for turn in PROMPTS[:3]]
        results.append(outputs(said))
        assert [request.cached_tokens > 0 for request in said] == [False, True, True]
        assert bool(num_unseen(steps)) is (llm.core.depth == 1)
        assert_idle(llm)
    assert results[0] == results[1]


def test_what_was_launched_beyond_an_end_is_ignored(tiny_path, expected):
    """A stop is seen one step late: the pages of the row that went on are pending until that step is done."""
    llm, steps = ahead(tiny_path, page_size=1, disable_radix_cache=True)
    stop = expected[0][4]
    end = expected[0].index(stop) + 1
    request = add(llm, PROMPTS[0], replace(GREEDY, stop_token_ids=(stop,)))
    other = add(llm, PROMPTS[1])
    while request.finish is None:
        llm.core.step()
    assert request.output_ids == expected[0][:end]
    assert len(steps[-1].rows) == 2, "the stopped request is in the step that was launched before its end was seen"
    assert llm.stats()["pending_pages"] > 0
    finish_all(llm)
    assert other.output_ids == expected[1]
    assert_idle(llm)


def test_an_abort_in_flight_ends_with_the_next_result(tiny_path, expected):
    llm, _ = ahead(tiny_path, page_size=16)
    request, other = add(llm, PROMPTS[0]), add(llm, PROMPTS[1])
    for _ in range(5):
        llm.core.step()
    seen = request.num_output
    assert llm.core.abort(request.id)
    assert request.finish is None
    llm.core.step()
    assert request.finish is not None
    assert request.finish.reason == "abort"
    assert request.num_output == seen
    finish_all(llm)
    assert other.output_ids == expected[1]
    assert_idle(llm)


def test_references_are_resolved_on_the_device():
    nothing = -1
    sampled = torch.tensor([70, 80, 90, nothing])
    token_ids = torch.tensor([5, refer(2), refer(0), 0, refer(3), refer(1)])
    assert resolved(token_ids, sampled).tolist() == [5, 90, 70, 0, 0, 80]
