"""The matrix of ARCHITECTURE 6: whatever serves a request, greedy tokens are the same.

The reference is the plainest engine: no cache, whole prompts, page 1, one request at a time. Every engine is audited
after each half of each step. `pytest --device NAME` runs it on another device than the CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import add, assert_idle, finest_page, force_retractions, make_llm, outputs, prompts_with_shared_heads, run

from engine.request import Request

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("on_device")]

PROMPTS = prompts_with_shared_heads(seed=7, n=13)


def plain_outputs(path: Path) -> list[list[int]]:
    llm = make_llm(path, page_size=finest_page(), disable_radix_cache=True, chunked_prefill_size=-1)
    return [outputs(run(llm, [prompt]))[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(on_device: str, model_path: Path) -> list[list[int]]:
    return plain_outputs(model_path)


@pytest.fixture(scope="module")
def variant_expected(on_device: str, variant_model_path: Path) -> list[list[int]]:
    return plain_outputs(variant_model_path)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("chunk", [7, 64, -1])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_batched_tokens_equal_the_plain_engine(model_path, expected, page_size, chunk, no_cache):
    llm = make_llm(model_path, page_size=page_size, chunked_prefill_size=chunk, disable_radix_cache=no_cache)
    assert outputs(run(llm, PROMPTS)) == expected
    again = run(llm, PROMPTS)
    assert outputs(again) == expected
    assert any(request.cached_tokens for request in again) is not no_cache
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
@pytest.mark.parametrize("every", [1, 3])
def test_forced_retraction_changes_no_token(model_path, expected, page_size, no_cache, every):
    llm = make_llm(model_path, page_size=page_size, chunked_prefill_size=64, disable_radix_cache=no_cache)
    requests = run(llm, PROMPTS, between=force_retractions(llm, every))
    assert outputs(requests) == expected
    assert llm.stats()["num_retracted_total"] > 5
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
@pytest.mark.parametrize("retract", [False, True], ids=["", "retracted"])
def test_windows_and_experts_change_no_rule(variant_model_path, variant_expected, page_size, no_cache, retract):
    llm = make_llm(variant_model_path, page_size=page_size, chunked_prefill_size=48, disable_radix_cache=no_cache)
    between = force_retractions(llm, every=2) if retract else None
    for _ in range(2):  # the second time from the cache
        requests = run(llm, PROMPTS, between=between)
        assert outputs(requests) == variant_expected
    assert any(request.cached_tokens for request in requests) is not no_cache
    assert (llm.stats()["num_retracted_total"] > 5) is retract
    assert_idle(llm)


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 240), (16, 240), (128, 640)])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_pool_that_is_far_too_small_changes_no_token(model_path, expected, page_size, tokens, policy):
    llm = make_llm(model_path, page_size=page_size, max_total_tokens=tokens, schedule_policy=policy)
    requests = run(llm, PROMPTS)
    assert outputs(requests) == expected
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_arrival_order_and_batch_size_change_no_token(model_path, expected, page_size):
    order = np.random.default_rng(3).permutation(len(PROMPTS)).tolist()
    llm = make_llm(model_path, page_size=page_size, max_running_requests=4)
    requests = run(llm, [PROMPTS[i] for i in order])
    assert outputs(requests) == [expected[i] for i in order]
    assert_idle(llm)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_eviction_policy_changes_no_token(model_path, expected, policy):
    llm = make_llm(model_path, page_size=16, max_total_tokens=320, radix_eviction_policy=policy)
    for _ in range(2):
        assert outputs(run(llm, PROMPTS)) == expected
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_plain_torch_changes_no_token(model_path, expected, page_size):
    llm = make_llm(model_path, page_size=page_size, chunked_prefill_size=64, kernels="torch")
    assert outputs(run(llm, PROMPTS)) == expected
    assert_idle(llm)


def test_plain_torch_changes_no_token_of_windows_and_experts(variant_model_path, variant_expected):
    llm = make_llm(variant_model_path, page_size=16, chunked_prefill_size=48, kernels="torch")
    assert outputs(run(llm, PROMPTS, between=force_retractions(llm, every=2))) == variant_expected
    assert_idle(llm)


def test_late_arrivals_change_no_token(model_path, expected):
    llm = make_llm(model_path, page_size=16, chunked_prefill_size=7)
    waiting = list(enumerate(PROMPTS))
    done: dict[int, Request] = {}
    step = 0
    while waiting or llm.core.has_work:
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop(0)
            done[index] = add(llm, prompt)
        llm.core.step()
        step += 1
    assert [done[i].output_ids for i in range(len(PROMPTS))] == expected
    assert_idle(llm)


def test_the_matrix_can_fail(model_path, expected):
    """One wrong page in one row shows as a wrong token."""
    llm = make_llm(model_path, page_size=16)

    def corrupt(step: int, requests: list[Request]) -> None:
        if step == 4:
            tables = llm.core.runner._tables["full"]
            tables[requests[0].kv.row, 0] = tables[requests[1].kv.row, 0]

    assert outputs(run(llm, PROMPTS, between=corrupt)) != expected
