"""The equivalence matrix for everything a request may ask of sampling: seeds, penalties, logprobs, n answers.

A request's choices and logprobs depend on its own tokens and seed only, so whatever serves it they are the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import add, assert_idle, force_retractions, make_llm, outputs, prompts_with_shared_heads, run

from engine import LLM, SamplingParams
from engine.request import Request, TokenLogprob

PROMPTS = prompts_with_shared_heads(seed=11, n=9)
COMMON = {"max_new_tokens": 16, "ignore_eos": True}
KINDS = {
    "seeded": [SamplingParams(temperature=0.8, seed=i, **COMMON) for i in range(9)],
    "cut": [
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01 * i, seed=100 + i, **COMMON) for i in range(9)
    ],
    "penalised": [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.7,
            seed=i,
            repetition_penalty=1.0 + 0.1 * i,
            presence_penalty=0.2 * i - 1,
            frequency_penalty=1 - 0.2 * i,
            logit_bias={10 + i: 2.0, 30: -3.0},
            min_new_tokens=i,
            stop_token_ids=list(range(40, 80)),
            max_new_tokens=16,
        )
        for i in range(9)
    ],
    "scored": [
        SamplingParams(
            temperature=0.0,
            return_logprob=True,
            top_logprobs_num=i,
            token_ids_logprob=list(range(i)),
            logprob_start_len=[-1, 0, 1, 15, 16, 17, 33, 99, 500][i],
            **COMMON,
        )
        for i in range(9)
    ],
}


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> dict[str, list[Request]]:
    llm = make_llm(tiny_path, page_size=1, disable_radix_cache=True, chunked_prefill_size=-1)
    alone = {}
    for kind, params in KINDS.items():
        alone[kind] = [run(llm, [prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    return alone


def same_scores(got: list[TokenLogprob | None], want: list[TokenLogprob | None]) -> bool:
    """Equal up to rounding; two best tokens that lie as close as that may change places."""

    def numbers(score: TokenLogprob) -> list[float]:
        return [score.logprob, *(value for _, value in (*score.top, *score.extra))]

    if len(got) != len(want):
        return False
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.token_id != b.token_id or not np.allclose(numbers(a), numbers(b), atol=1e-4):
            return False
    return True


def assert_same(requests: list[Request], expected: list[Request]) -> None:
    assert outputs(requests) == outputs(expected)
    for got, want in zip(requests, expected, strict=True):
        if want.scores is None:
            assert got.scores is None
            continue
        assert got.scores is not None
        assert len(got.scores.output) == got.num_output * got.params.return_logprob
        assert same_scores(got.scores.prompt, want.scores.prompt)
        assert same_scores(got.scores.output, want.scores.output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 64), (16, -1), (128, 7)])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_choices_and_logprobs_are_a_requests_own(tiny_path, expected, kind, page_size, chunk, no_cache):
    llm = make_llm(tiny_path, page_size=page_size, chunked_prefill_size=chunk, disable_radix_cache=no_cache)
    for _ in range(2):  # the second time from the cache
        assert_same(run(llm, PROMPTS, KINDS[kind]), expected[kind])
    assert_idle(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_retraction_changes_no_choice_and_no_logprob(tiny_path, expected, kind):
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=16)
    assert_same(run(llm, PROMPTS, KINDS[kind], between=force_retractions(llm, 2)), expected[kind])
    assert llm.stats()["num_retracted_total"] > 5
    assert_idle(llm)


def answers(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    result = llm.generate(prompt, params)
    return [one.token_ids for one in (result, *result.alternatives)]


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 128, 129])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_n_answers_equal_n_requests(tiny_path, page_size, length, no_cache):
    llm = make_llm(tiny_path, page_size=page_size, disable_radix_cache=no_cache, chunked_prefill_size=64)
    prompt = np.random.default_rng(length).integers(3, 300, length).tolist()
    together = answers(llm, prompt, SamplingParams(n=4, temperature=1.0, seed=5, **COMMON))
    alone = [llm.generate(prompt, SamplingParams(temperature=1.0, seed=5 + i, **COMMON)).token_ids for i in range(4)]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == 4
    assert_idle(llm)


def test_answers_share_the_pages_of_their_prompt(tiny_path):
    llm = make_llm(tiny_path, page_size=16)
    first = add(llm, list(range(3, 103)), SamplingParams(n=6, temperature=1.0, seed=1, **COMMON))
    members = [first, *first.siblings]
    llm.core.step()
    llm.core.step()
    stats = llm.stats()
    # 6 whole pages once, in the tree; a last page of its own for each, with the token 100 places in.
    assert (stats["tree_protected_pages"], stats["request_pages"]) == (6, 6)
    assert all(member.kv.cache_protected_len == 96 for member in members)
    assert [member.cached_tokens for member in members] == [0, *[99] * 5]
    while llm.core.has_work:
        llm.core.step()
    assert_idle(llm)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("pool", [144, 4096])
def test_answers_that_find_no_room_wait_and_are_the_same(tiny_path, rows, pool):
    llm = make_llm(tiny_path, page_size=16, max_running_requests=rows, max_total_tokens=pool)
    prompt = list(range(3, 80))
    params = SamplingParams(n=5, temperature=1.0, seed=9, **COMMON)
    assert answers(llm, prompt, params) == answers(make_llm(tiny_path), prompt, params)
    assert_idle(llm)


@pytest.mark.parametrize("when", ["waiting", "mid prompt", "launched", "decoding"])
def test_aborting_the_first_answer(tiny_path, when):
    """Before the prompt is computed it takes the others with it; afterwards they are on their own."""
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=16)
    first = add(llm, list(range(3, 60)), SamplingParams(n=3, temperature=1.0, seed=1, **COMMON))
    others = first.siblings
    for _ in range({"waiting": 0, "mid prompt": 2, "launched": 1, "decoding": 6}[when]):
        llm.core.step()
    if when == "launched":
        llm.core.launch()
    assert llm.core.abort(first.id)
    llm.core.collect()
    while llm.core.has_work:
        llm.core.step()
    assert first.finish is not None
    assert first.finish.reason == "abort"
    reasons = [other.finish.reason for other in others if other.finish is not None]
    assert reasons == (["length"] * 2 if when == "decoding" else ["abort"] * 2)
    assert_idle(llm)


@pytest.mark.parametrize("num_steps", [0, 2, 6])
def test_aborting_another_answer_leaves_the_first(tiny_path, num_steps):
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=16)
    first = add(llm, list(range(3, 60)), SamplingParams(n=3, temperature=1.0, seed=1, **COMMON))
    second, third = first.siblings
    for _ in range(num_steps):
        llm.core.step()
    assert llm.core.abort(second.id)
    while llm.core.has_work:
        llm.core.step()
    finishes = [request.finish for request in (first, second, third)]
    assert [finish.reason for finish in finishes if finish] == ["length", "abort", "length"]
    assert_idle(llm)


def test_logprobs_are_those_of_the_models_own_logits(tiny_path):
    """Whatever changes the choice changes no logprob; every reported distribution sums to at most one."""
    llm = make_llm(tiny_path)
    prompt = PROMPTS[0]
    plain = SamplingParams(temperature=0.0, return_logprob=True, top_logprobs_num=128, **COMMON)
    first = llm.generate(prompt, plain).logprobs
    assert first is not None
    for score in first:
        total = np.exp([value for _, value in score.top]).sum()
        assert 0.5 < total <= 1 + 1e-5
        assert (score.token_id, score.logprob) == score.top[0]
        assert list(score.top) == sorted(score.top, key=lambda pair: -pair[1])
    hot = SamplingParams(
        temperature=5.0, seed=3, logit_bias={7: 100.0}, return_logprob=True, top_logprobs_num=3, **COMMON
    )
    biased = llm.generate(prompt, hot)
    assert biased.token_ids == [7] * 16
    assert biased.logprobs is not None
    assert biased.logprobs[0].logprob < -1
    assert np.allclose([v for _, v in biased.logprobs[0].top], [v for _, v in first[0].top[:3]], atol=1e-4)
