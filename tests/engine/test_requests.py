"""One request's life: what ends it, what it shows, what it reuses, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, add, assert_idle, make_llm, outputs, prompts_with_shared_heads, run

from devices.pages import floor_page, page_count
from engine import LLM, SamplingParams
from engine.errors import BadRequest
from engine.request import Request, RequestStatus
from engine.text.detokenizer import IncrementalDetokenizer

SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=4, max_new_tokens=24, ignore_eos=True)


def ids(seed: int, n: int) -> list[int]:
    """A random prompt of `n` tokens."""
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


PROMPT = ids(0, 40)
NEIGHBOURS = [PROMPT[:20] + ids(seed, 1 + 9 * seed) for seed in range(5)]


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def llm(request: pytest.FixtureRequest, tiny_path: Path) -> LLM:
    return make_llm(tiny_path, page_size=request.param, max_total_tokens=320)


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Callable[..., list[int]]:
    """Greedy tokens of a prompt alone in an engine without a cache."""
    engine = make_llm(tiny_path, page_size=1, disable_radix_cache=True, chunked_prefill_size=-1, max_total_tokens=256)

    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in known:
            known[tuple(prompt)] = outputs(run(engine, [prompt]))[0]
        return list(known[tuple(prompt)])

    return tokens


def one(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY, **kwargs: Any) -> Request:
    """Run one request to its end."""
    request = add(llm, prompt, params, **kwargs)
    while llm.core.has_work:
        llm.core.step()
    return request


def finish_of(request: Request) -> tuple[str, str | int | None]:
    assert request.finish is not None
    return request.finish.reason, request.finish.matched


def tree_pages(llm: LLM) -> int:
    stats = llm.stats()
    return stats["tree_evictable_pages"] + stats["tree_protected_pages"]


def first_seen(tokens: list[int], at: int) -> int:
    """A token of the run that appears at `at` for the first time."""
    assert tokens.index(tokens[at]) == at, "choose another prompt"
    return tokens[at]


# What ends a request.


@pytest.mark.parametrize("at", [0, 11, 23], ids=["first", "middle", "last"])
def test_an_eos_ends_the_request_with_that_token(llm, plain, at):
    free = plain(PROMPT)
    eos = first_seen(free, at)
    llm.core.eos_token_ids = frozenset({2, eos})
    request = one(llm, PROMPT, replace(GREEDY, ignore_eos=False))
    assert finish_of(request) == ("stop", eos)
    assert request.output_ids == free[: at + 1]
    # The last token's KV was never computed; everything before it, as far as it fills pages, is cached.
    assert tree_pages(llm) == floor_page(len(PROMPT) + at, llm.config.memory.page_size) // llm.config.memory.page_size
    assert_idle(llm)
    assert one(llm, PROMPT).output_ids == free, "ignore_eos goes on after it"


@pytest.mark.parametrize("at", [0, 11, 23], ids=["first", "middle", "last"])
def test_a_stop_id_ends_the_request_even_when_eos_is_ignored(llm, plain, at):
    free = plain(PROMPT)
    stop_id = first_seen(free, at)
    request = one(llm, PROMPT, replace(GREEDY, stop_token_ids=[299, stop_id]))
    assert finish_of(request) == ("stop", stop_id)
    assert request.output_ids == free[: at + 1]
    assert_idle(llm)


def test_the_first_of_several_stop_ids_ends_the_request(llm, plain):
    free = plain(PROMPT)
    request = one(llm, PROMPT, replace(GREEDY, stop_token_ids=[free[9], free[4], free[17]]))
    assert request.output_ids == free[: free.index(request.finish.matched) + 1]
    assert request.num_output <= 5


def shown(llm: LLM, tokens: list[int]) -> str:
    """Text that is certain after `tokens`."""
    return IncrementalDetokenizer(llm.tokenizer).push(tokens)


def test_a_stop_string_cuts_the_text_before_it_and_keeps_the_completing_token(llm, plain):
    free = plain(PROMPT)
    text = shown(llm, free)
    over_borders = 0
    for start in range(0, len(text) - 3, 2):
        for length in (1, 3):
            stop = text[start : start + length]
            cut = text.index(stop)
            completed = next(n for n in range(1, 25) if len(shown(llm, free[:n])) >= cut + len(stop))
            result = llm.generate(PROMPT, replace(GREEDY, stop=[stop, "never to be seen"]))
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            assert result.text == text[:cut]
            assert result.token_ids == free[:completed]
            over_borders += len(shown(llm, free[: completed - 1])) > cut
    assert over_borders >= 5, "no stop string lay across a token border"
    assert_idle(llm)


def test_a_stop_string_that_ends_inside_a_token_cuts_inside_it(llm, plain):
    prompt = next(p for p in (ids(seed, 30) for seed in count()) if any(t >= 259 for t in plain(p)[1:]))
    free = plain(prompt)
    at = next(i for i, token in enumerate(free) if token >= 259 and i)  # a merged token: several bytes
    before, through = shown(llm, free[:at]), shown(llm, free[: at + 1])
    stop = through[len(before)]
    if stop in before:
        stop = before[-3:] + stop
    result = llm.generate(prompt, replace(GREEDY, stop=stop))
    assert len(through) > len(before) + 1
    assert result.text == through[: through.index(stop)]
    assert result.token_ids == free[: at + 1]


def test_what_looks_like_the_beginning_of_a_stop_is_shown_when_it_was_none(llm, plain):
    text = llm.generate(PROMPT, GREEDY).text
    result = llm.generate(PROMPT, replace(GREEDY, stop=text[-3:] + "and no more"))
    assert (result.finish_reason, result.text) == ("length", text)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 24])
def test_a_request_ends_at_its_own_length(llm, plain, n):
    request = one(llm, PROMPT, replace(GREEDY, max_new_tokens=n))
    assert finish_of(request) == ("length", None)
    assert request.output_ids == plain(PROMPT)[:n]
    assert_idle(llm)


@pytest.mark.parametrize("room", [1, 2, 8])
def test_a_request_ends_with_the_context(tiny_path, plain, room):
    llm = make_llm(tiny_path, context_length=len(PROMPT) + room)
    request = one(llm, PROMPT)
    assert finish_of(request) == ("length", None)
    assert request.output_ids == plain(PROMPT)[:room]
    assert_idle(llm)


def test_a_stop_goes_before_the_length_and_a_stop_id_before_a_stop_string(llm, plain):
    free = plain(PROMPT)
    n = next(n for n in range(8, 24) if free.index(free[n - 1]) == n - 1 and shown(llm, free[n - 1 : n]))
    last, through = free[n - 1], shown(llm, free[:n])
    stop = through[-3:]
    assert through.index(stop) == len(through) - len(stop)
    limited = replace(GREEDY, max_new_tokens=n)
    by_text = llm.generate(PROMPT, replace(limited, stop=stop))
    by_id = llm.generate(PROMPT, replace(limited, stop_token_ids=[last]))
    both = llm.generate(PROMPT, replace(limited, stop=stop, stop_token_ids=[last]))
    assert [r.finish_reason for r in (by_text, by_id, both)] == ["stop"] * 3
    assert [r.stop_reason for r in (by_text, by_id, both)] == [stop, last, last]
    assert by_text.text == through[: -len(stop)]
    assert by_id.text == both.text == llm.tokenizer.decode(free[: n - 1])
    assert by_text.token_ids == by_id.token_ids == both.token_ids == free[:n]


# Numbers of a finished request.


def test_usage_counts_prompt_output_and_cached_tokens(llm, plain):
    first = llm.generate(PROMPT, GREEDY)
    second = llm.generate(PROMPT, replace(GREEDY, max_new_tokens=3))
    hit = floor_page(len(PROMPT) - 1, llm.config.memory.page_size)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.cached_tokens) == (40, 24, 0)
    assert (second.usage.prompt_tokens, second.usage.completion_tokens, second.usage.cached_tokens) == (40, 3, hit)
    assert first.token_ids == plain(PROMPT)
    assert (first.stop_reason, first.message) == (None, "")


def test_timings_are_ordered_and_the_first_token_is_in_them(llm):
    result = llm.generate(PROMPT, GREEDY)
    timings = result.timings
    assert 0 <= timings.queue_s <= timings.time_to_first_token_s <= timings.total_s
    assert timings.decode_tokens_per_s == pytest.approx(
        23 / (timings.total_s - timings.time_to_first_token_s), rel=1e-6
    )
    assert llm.generate(PROMPT, replace(GREEDY, max_new_tokens=1)).timings.decode_tokens_per_s == 0.0


def test_timings_keep_the_first_admission_and_the_first_token_through_a_retraction(llm):
    ticks = count(1)
    llm.core.scheduler.clock = lambda: float(next(ticks))
    request = add(llm, PROMPT)
    for _ in range(5):
        llm.core.step()
    before = replace(request.timings)
    llm.core.scheduler.retract(request)
    while llm.core.has_work:
        llm.core.step()
    timings = request.timings
    assert (timings.arrival_s, timings.scheduled_s, timings.first_token_s) == (1.0, 2.0, 3.0)
    assert (before.scheduled_s, before.first_token_s) == (2.0, 3.0)
    assert timings.finished_s > 3.0
    assert request.num_retractions == 1
    assert request.cached_tokens == 0, "what it reused of itself is no cached prompt"


# What a request reuses.


@pytest.mark.parametrize("n", [16, 64, 65, 63, 128])
def test_a_whole_prompt_in_the_cache_leaves_one_token_to_compute(tiny_path, plain, n):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=256)
    cold = plain(ids(n, n))
    sent = [one(llm, ids(n, n)) for _ in range(3)]
    assert [request.cached_tokens for request in sent] == [0, floor_page(n - 1, 16), floor_page(n - 1, 16)]
    assert outputs(sent) == [cold] * 3
    assert_idle(llm)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_at_page_one_everything_but_the_last_token_is_reused(tiny_path, plain, n):
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=128)
    sent = [one(llm, ids(n, n)) for _ in range(3)]
    assert [request.cached_tokens for request in sent] == [0, n - 1, n - 1]
    assert outputs(sent) == [plain(ids(n, n))] * 3


def test_a_longer_prompt_reuses_the_answer_before_it(llm, plain):
    first = one(llm, PROMPT)
    longer = PROMPT + first.output_ids + ids(5, 7)
    request = one(llm, longer)
    # The last token of the first answer was never computed.
    assert request.cached_tokens == floor_page(len(PROMPT) + 23, llm.config.memory.page_size)
    assert request.output_ids == plain(longer)


def test_without_a_cache_nothing_is_reused(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=1, disable_radix_cache=True, max_total_tokens=128)
    assert [one(llm, PROMPT).cached_tokens for _ in range(2)] == [0, 0]
    assert tree_pages(llm) == 0
    assert_idle(llm)


NAMESPACES: list[dict[str, str]] = [
    {},
    {"extra_key": "x"},
    {"cache_salt": "x"},
    {"extra_key": "x", "cache_salt": "x"},
    {"extra_key": "y"},
    {"extra_key": ""},
    {"cache_salt": ""},
]


def test_prefixes_are_shared_within_a_namespace_and_never_across(llm, plain):
    few = replace(GREEDY, max_new_tokens=3)
    expected, hit = plain(PROMPT)[:3], floor_page(len(PROMPT) - 1, llm.config.memory.page_size)
    first = [one(llm, PROMPT, few, **namespace) for namespace in NAMESPACES]
    second = [one(llm, PROMPT, few, **namespace) for namespace in NAMESPACES]
    assert [request.cached_tokens for request in first] == [0] * len(NAMESPACES)
    assert [request.cached_tokens for request in second] == [hit] * len(NAMESPACES)
    assert outputs(first + second) == [expected] * (2 * len(NAMESPACES))
    assert_idle(llm)


def change_weights(llm: LLM) -> None:
    with torch.inference_mode():
        llm.core.runner.model.norm.mul_(-0.5)
    llm.core.bump_weights_version()


def test_new_weights_reuse_no_old_kv_not_even_of_a_request_that_was_running(tiny_path):
    llm, fresh = (make_llm(tiny_path, page_size=16, max_total_tokens=256) for _ in range(2))
    before = one(llm, PROMPT)
    running = add(llm, PROMPT)
    for _ in range(5):
        llm.core.step()
    change_weights(llm)
    change_weights(fresh)
    while llm.core.has_work:
        llm.core.step()
    assert running.cached_tokens == 32
    after = [one(llm, PROMPT) for _ in range(2)]
    assert [request.cached_tokens for request in after] == [0, 32]
    assert outputs(after) == [one(fresh, PROMPT).output_ids] * 2
    assert after[0].output_ids != before.output_ids
    assert_idle(llm)


# A request that outgrows the pool.


@pytest.mark.parametrize("page_size", [1, 16])
def test_alone_in_a_full_pool_a_request_ends_by_capacity_with_what_it_has(tiny_path, plain, page_size):
    llm = make_llm(tiny_path, page_size=page_size, max_total_tokens=64)
    prompt = ids(7, 60)
    request = one(llm, prompt, replace(GREEDY, max_new_tokens=30))
    assert finish_of(request) == ("capacity", None)
    assert request.output_ids == plain(prompt)[:5], "64 tokens are computed, and the one after them is known"
    assert request.finish.message == f"the pool of {64 // page_size} pages of {page_size} tokens is full"
    assert_idle(llm)
    assert one(llm, PROMPT, replace(GREEDY, max_new_tokens=20)).output_ids == plain(PROMPT)[:20]


def test_a_request_that_fills_the_pool_to_its_last_token_completes(tiny_path, plain):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=64)
    request = one(llm, PROMPT, replace(GREEDY, max_new_tokens=25))
    assert finish_of(request) == ("length", None)
    assert request.output_ids[:24] == plain(PROMPT)


# Aborts, in every place a request can be.


def test_a_waiting_request_is_aborted_at_once(llm):
    request, other = add(llm, PROMPT), add(llm, PROMPT)
    assert llm.core.abort(request.id)
    assert finish_of(request) == ("abort", None)
    assert request.output_ids == []
    assert not llm.core.abort(request.id)
    while llm.core.has_work:
        assert request not in llm.core.step()
    assert other.num_output == 24
    assert_idle(llm)


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_abort_before_chunk_k_leaves_only_computed_whole_pages(tiny_path, plain, page_size, k):
    llm = make_llm(tiny_path, page_size=page_size, chunked_prefill_size=8, max_total_tokens=128)
    prompt = ids(9, 64)
    request = add(llm, prompt)
    for _ in range(k):
        llm.core.step()
    assert llm.core.abort(request.id)
    assert finish_of(request) == ("abort", None)
    assert request.output_ids == plain(prompt)[: int(k == 8)]
    assert tree_pages(llm) == floor_page(8 * k, page_size) // page_size
    assert not llm.core.has_work
    assert_idle(llm)
    again = one(llm, prompt, replace(GREEDY, max_new_tokens=4))
    assert again.cached_tokens == floor_page(min(8 * k, 63), page_size)
    assert again.output_ids == plain(prompt)[:4]


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_abort_between_launch_and_result_shows_no_token_of_that_step(tiny_path, plain, page_size, k):
    """k = 7 is the final chunk, whose token was sampled while the abort was pending; k = 8 is the first decode."""
    llm = make_llm(tiny_path, page_size=page_size, chunked_prefill_size=8, max_total_tokens=128)
    prompt = ids(9, 64)
    request = add(llm, prompt)
    for _ in range(k):
        llm.core.step()
    assert llm.core.launch() == []
    assert llm.core.abort(request.id)
    assert request.finish is None, "its pages may still be written"
    assert llm.core.abort(request.id), "asking twice is no error"
    assert llm.core.collect() == [request], "one terminal event"
    assert finish_of(request) == ("abort", None)
    assert request.output_ids == plain(prompt)[: int(k == 8)]
    assert not llm.core.abort(request.id)
    assert tree_pages(llm) == floor_page(min(8 * (k + 1), 65), page_size) // page_size
    assert_idle(llm)
    assert one(llm, prompt, replace(GREEDY, max_new_tokens=4)).output_ids == plain(prompt)[:4]


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_while_decoding_keeps_the_tokens_before_it(llm, plain, in_flight):
    request = add(llm, PROMPT)
    for _ in range(6):
        llm.core.step()
    if in_flight:
        llm.core.launch()
    llm.core.abort(request.id)
    llm.core.collect()
    assert finish_of(request) == ("abort", None)
    assert request.output_ids == plain(PROMPT)[:6]
    assert_idle(llm)


def test_a_retracted_request_is_aborted_where_it_waits(llm, plain):
    request = add(llm, PROMPT)
    for _ in range(6):
        llm.core.step()
    llm.core.scheduler.retract(request)
    assert request.status is RequestStatus.WAITING
    assert llm.core.abort(request.id)
    assert finish_of(request) == ("abort", None)
    assert request.output_ids == plain(PROMPT)[:6]
    assert not llm.core.has_work
    assert_idle(llm)


def test_a_finished_or_unknown_request_cannot_be_aborted(llm):
    request = one(llm, PROMPT)
    assert not llm.core.abort(request.id)
    assert not llm.core.abort("nobody")
    assert finish_of(request) == ("length", None)
    assert_idle(llm)


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_disturbs_no_neighbour(llm, plain, in_flight):
    requests = [add(llm, prompt) for prompt in NEIGHBOURS]
    for step in range(400):
        if not llm.core.has_work:
            break
        llm.core.launch()
        if in_flight and step == 9:
            llm.core.abort(requests[2].id)
        llm.core.collect()
        if not in_flight and step == 9:
            llm.core.abort(requests[2].id)
    kept = [0, 1, 3, 4]
    assert [requests[i].output_ids for i in kept] == [plain(NEIGHBOURS[i]) for i in kept]
    assert finish_of(requests[2]) == ("abort", None)
    assert_idle(llm)


@pytest.mark.parametrize("in_flight", [False, True])
def test_all_requests_are_aborted_at_any_step(tiny_path, in_flight):
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=208, chunked_prefill_size=24)
    prompts = prompts_with_shared_heads(seed=4, n=4, max_len=150)
    for step in range(0, 30, 2):
        requests = [add(llm, prompt) for prompt in prompts]
        for _ in range(step):
            llm.core.step()
        if in_flight:
            llm.core.launch()
        for request in requests:
            llm.core.abort(request.id)
        llm.core.collect()
        assert all(request.finish is not None for request in requests)
        assert not llm.core.has_work
        assert_idle(llm)


# Ids.


def test_a_request_id_is_taken_until_its_request_has_ended(llm):
    request = add(llm, PROMPT, request_id="mine")
    with pytest.raises(BadRequest, match="request_id='mine'"):
        add(llm, PROMPT, request_id="mine")
    while llm.core.has_work:
        llm.core.step()
    assert request.num_output == 24
    assert one(llm, PROMPT, request_id="mine").num_output == 24
    assert_idle(llm)


# Logits that are not numbers.


def spoil(llm: LLM, at_step: int, change: Callable[[torch.Tensor], None]) -> None:
    """Change the logits of the step `at_step` (counted from now) before they are sampled."""
    forward, steps = llm.core.runner.model.logits, count()

    def spoiled(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        if next(steps) == at_step:
            change(logits)
        return logits

    llm.core.runner.model.logits = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("lane", [slice(None), 17], ids=["row", "lane"])
def test_one_request_with_logits_that_are_no_numbers_ends_alone(llm, params, value, lane):
    prompts = [ids(seed, n) for seed, n in ((1, 20), (2, 33), (3, 40))]
    clean = outputs(run(llm, prompts, params))
    llm.flush_cache()

    def change(logits: torch.Tensor) -> None:
        assert len(logits) == 3
        logits[1, lane] = value

    spoil(llm, 5, change)
    requests = run(llm, prompts, params)
    assert finish_of(requests[1]) == ("error", None)
    assert "not finite" in requests[1].finish.message
    assert requests[1].output_ids == clean[1][:5]
    assert [requests[i].output_ids for i in (0, 2)] == [clean[0], clean[2]]
    assert [requests[i].finish.reason for i in (0, 2)] == ["length", "length"]
    assert_idle(llm)


def test_a_request_of_nothing_but_a_bad_prompt_shows_no_token(llm, plain):
    spoil(llm, 0, lambda logits: logits.fill_(np.nan))
    request = one(llm, PROMPT)
    assert finish_of(request) == ("error", None)
    assert request.output_ids == []
    assert tree_pages(llm) == 0, "its KV was not cached"
    assert_idle(llm)
    assert one(llm, PROMPT).output_ids == plain(PROMPT)


def test_what_a_failed_request_decoded_is_not_cached(llm, plain):
    page_size = llm.config.memory.page_size
    spoil(llm, 20, lambda logits: logits.fill_(np.nan))
    request = one(llm, PROMPT)
    assert finish_of(request) == ("error", None)
    assert request.output_ids == plain(PROMPT)[:20]
    assert tree_pages(llm) == floor_page(len(PROMPT), page_size) // page_size, "the prompt's pages, cached before it"
    assert_idle(llm)


def fill_with_nan(llm: LLM, pages: np.ndarray) -> None:
    for layer in llm.core.runner.kv.layers:
        layer.k[pages.tolist()] = np.nan
        layer.v[pages.tolist()] = np.nan


def test_pages_that_hold_nan_harm_no_later_owner(llm, plain):
    """A forward that failed leaves NaN in its own pages; whoever gets them next must not read it."""
    request = add(llm, PROMPT)
    for _ in range(6):
        llm.core.step()
    kv, rows = request.kv, llm.core.allocator.rows
    dirty = rows.pages("full", kv.row, kv.cache_protected_len, kv.kv_allocated_len)
    fill_with_nan(llm, dirty)
    while llm.core.has_work:
        llm.core.step()
    assert finish_of(request) == ("error", None), "the NaN is real"
    assert_idle(llm)

    fill_with_nan(llm, llm.core.allocator.families.pools["full"].free_pages())
    prompts = [ids(seed, n) for seed, n in ((14, 2), (11, 17), (12, 1), (13, 35))]
    later = [add(llm, prompt) for prompt in prompts]
    llm.core.step()
    reused = {page for other in later for page in rows.pages("full", other.kv.row, 0, other.kv.kv_allocated_len)}
    assert set(dirty.tolist()) <= reused
    while llm.core.has_work:
        llm.core.step()
    assert outputs(later) == [plain(prompt) for prompt in prompts]
    assert one(llm, PROMPT).output_ids == plain(PROMPT)


def test_nan_in_the_padding_page_reaches_nobody(llm, plain):
    fill_with_nan(llm, np.array([0]))
    assert outputs(run(llm, NEIGHBOURS)) == [plain(prompt) for prompt in NEIGHBOURS]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_token_that_the_model_forbids_is_no_error(llm, params):
    clean = one(llm, PROMPT, params).output_ids
    unused = next(token for token in range(300) if token not in clean)
    spoil(llm, 3, lambda logits: logits[:, unused].fill_(-np.inf))
    assert one(llm, PROMPT, params).output_ids == clean


# A model with more outputs than the tokenizer has tokens.


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=-1, top_p=1.0)], ids=["greedy", "filtered", "plain"]
)
@pytest.mark.parametrize("value", [1e4, np.nan, np.inf])
def test_padded_ids_of_the_vocabulary_are_never_chosen(llm, params, value):
    assert llm.core.vocab_size == llm.tokenizer.vocab_size == 300
    clean = one(llm, PROMPT, params).output_ids
    forward = llm.core.runner.model.logits

    def loud(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        assert logits.shape[-1] == 304
        logits[:, 300:] = value
        return logits

    llm.core.runner.model.logits = loud
    request = one(llm, PROMPT, params)
    assert finish_of(request) == ("length", None)
    assert request.output_ids == clean
    assert max(request.output_ids) < 300


def test_padded_ids_are_no_prompt_and_no_stop(llm):
    for bad in ([300], [303], [5, 304]):
        with pytest.raises(BadRequest, match="prompt="):
            add(llm, bad)
    with pytest.raises(BadRequest, match="stop_token_ids=300"):
        add(llm, PROMPT, replace(GREEDY, stop_token_ids=[300]))
    assert one(llm, [299]).num_output == 24
    assert_idle(llm)


def test_page_counts_follow_the_tokens(llm):
    """A running request names exactly the pages that its tokens fill, step by step."""
    page_size, rows = llm.config.memory.page_size, llm.core.allocator.rows
    request = add(llm, PROMPT)
    while llm.core.has_work:
        llm.core.launch()
        kv = request.kv
        pages = rows.pages("full", kv.row, 0, kv.kv_allocated_len)
        assert len(set(pages.tolist())) == page_count(kv.kv_scheduled_len, page_size)
        assert 0 not in pages
        llm.core.collect()


@pytest.mark.parametrize("page_size", [1, 16])
def test_nan_in_an_early_chunk_ends_the_request_before_its_kv_is_cached(tiny_path, page_size):
    """No logits are computed in the middle of a prompt; a poisoned page must not reach the tree all the same."""
    llm = make_llm(tiny_path, page_size=page_size, chunked_prefill_size=32)
    prompt = list(range(3, 103))
    clean = outputs(run(make_llm(tiny_path), [prompt]))
    forward, steps = llm.core.runner.model.forward, count()

    def spoiled(*args):
        hidden = forward(*args)
        if next(steps) == 0:
            llm.core.runner.kv.layers[0].k[1:3] = float("nan")
            hidden[-1] = float("nan")
        return hidden

    llm.core.runner.model.forward = spoiled  # type: ignore[method-assign]
    [failed] = run(llm, [prompt])
    assert failed.finish is not None
    assert failed.finish.reason == "error"
    again = run(llm, [prompt])
    assert again[0].cached_tokens == 0
    assert outputs(again) == clean
    assert_idle(llm)
