"""Layers with a sliding window give their pages back behind it, and no token changes; masking everything is the oracle.

Two of the tiny model's three layers have a window of 40 tokens, or both layers of another tiny model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import GREEDY, assert_idle, force_retractions, make_llm, outputs, prompts_with_shared_heads, run, run_turn
from tiny_models import save_tiny_model

from engine import LLM, SamplingParams
from engine.request import Request

WINDOW = 40
ROW_PAGES = 12
"""Window pages of 16 that a row with chunks of 16 can need: two windows of three, two chunks, four that are begun."""
PROMPTS = prompts_with_shared_heads(seed=11, n=8, max_len=220)
LONG = SamplingParams(temperature=0.0, max_new_tokens=70, ignore_eos=True)


@pytest.fixture(scope="module")
def all_windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-all-windows")
    save_tiny_model(path, "mistral", seed=4, sliding_window=WINDOW)
    return path


@pytest.fixture(scope="module", params=["some_windowed_path", "all_windowed_path"])
def windowed_path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def masked(windowed_path: Path) -> list[list[int]]:
    llm = make_llm(windowed_path, page_size=16, disable_hybrid_swa_memory=True)
    assert set(llm.core.allocator.families.pools) == {"full"}
    return outputs(run(llm, PROMPTS, LONG))


class Peaks:
    """Most pages of each family that requests or the tree had at once."""

    def __init__(self, llm: LLM) -> None:
        self.pools = llm.core.allocator.families.pools
        self.used = dict.fromkeys(self.pools, 0)

    def __call__(self, step: int, requests: list[Request]) -> None:
        for name, pool in self.pools.items():
            self.used[name] = max(self.used[name], pool.num_pages - pool.num_free)


def assert_window_idle(llm: LLM) -> None:
    assert_idle(llm)
    tree, pool = llm.core.allocator.tree, llm.core.allocator.families.pools["window"]
    assert pool.num_free + tree.num_evictable_of("window") == pool.num_pages
    tree.flush()
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
def test_a_freed_window_gives_the_tokens_of_a_masked_one(windowed_path, masked, page_size, no_cache):
    llm = make_llm(windowed_path, page_size=page_size, chunked_prefill_size=48, disable_radix_cache=no_cache)
    peaks = Peaks(llm)
    for _ in range(2):  # the second time from the cache
        requests = run(llm, PROMPTS, LONG, between=peaks)
        assert outputs(requests) == masked
    assert any(request.cached_tokens for request in requests) is not no_cache
    assert peaks.used["window"] < peaks.used["full"]
    pool, stats = peaks.pools["window"], llm.stats()
    pages = {owner: stats[f"family_pages_{owner}_window"] for owner in ("free", "pending", "used")}
    assert pages == {"free": pool.num_free, "pending": 0, "used": pool.num_pages - pool.num_free}
    assert not any(name.endswith("_full") for name in stats)
    assert_window_idle(llm)


def test_without_a_cache_a_row_holds_its_window_and_its_chunk(windowed_path, masked):
    llm = make_llm(windowed_path, page_size=16, chunked_prefill_size=48, disable_radix_cache=True)
    for prompt, expected in zip(PROMPTS[:4], masked[:4], strict=True):
        peaks = Peaks(llm)
        assert outputs(run(llm, [prompt], LONG, between=peaks)) == [expected]
        assert peaks.used["window"] <= 3 + 3 + 3 + 1  # the window, two chunks in flight, a page begun


@pytest.mark.parametrize("max_running", [2, 4])
def test_a_small_window_pool_delays_nobody_and_changes_no_token(windowed_path, all_windowed_path, masked, max_running):
    """The pool is a fraction of the full one; what is cached of windows gives way, requests do not."""
    scarce = {"max_total_tokens": max_running * ROW_PAGES * 16} if windowed_path == all_windowed_path else {}
    llm = make_llm(windowed_path, page_size=16, chunked_prefill_size=16, max_running_requests=max_running, **scarce)
    window, full = (llm.core.allocator.families.pools[name] for name in ("window", "full"))
    assert window.num_pages < full.num_pages / 2
    for _ in range(2):
        requests = run(llm, PROMPTS, LONG, between=force_retractions(llm, every=9, limit=8))
        assert outputs(requests) == masked
    assert any(request.cached_tokens for request in requests)
    assert_window_idle(llm)


def test_a_pool_that_is_far_too_small_changes_no_token(windowed_path, masked):
    llm = make_llm(windowed_path, page_size=1, max_total_tokens=400, chunked_prefill_size=32, max_running_requests=4)
    assert outputs(run(llm, PROMPTS, LONG)) == masked
    assert llm.stats()["num_retracted_total"] > 0
    assert_window_idle(llm)


def test_where_every_layer_has_a_window_rows_are_longer_than_the_memory(all_windowed_path: Path) -> None:
    """Two requests of up to 290 tokens in the memory of 384; masked, one of them has to give way."""
    said, retracted = [], []
    for mask in (False, True):
        llm = make_llm(
            all_windowed_path,
            page_size=16,
            chunked_prefill_size=16,
            max_running_requests=2,
            max_total_tokens=2 * ROW_PAGES * 16,
            disable_hybrid_swa_memory=mask,
        )
        assert llm.core.runner.kv.num_bytes == 2 * 2 * (2 * ROW_PAGES + 1) * 16 * 2 * 8 * 4
        said.append(outputs(run(llm, PROMPTS, LONG)))
        retracted.append(llm.stats()["num_retracted_total"])
    assert said[0] == said[1]
    assert retracted[0] == 0
    assert retracted[1] > 0


def test_answers_that_share_a_prompt_share_its_window(windowed_path):
    params = SamplingParams(temperature=0.8, max_new_tokens=30, n=3, seed=5, ignore_eos=True)
    runs = []
    for keep in (True, False):
        llm = make_llm(windowed_path, page_size=16, chunked_prefill_size=32, disable_hybrid_swa_memory=keep)
        results = llm.generate([PROMPTS[0], PROMPTS[3]], params)
        runs.append([answer.token_ids for result in results for answer in (result, *result.alternatives)])
        assert_idle(llm)
    assert len({tuple(tokens) for tokens in runs[0]}) == 6
    assert runs[0] == runs[1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_turns_forks_and_rewinds_of_a_session_have_their_window(windowed_path, page_size):
    """A turn that cannot be continued where its window is gone is computed again; either way it says the same."""
    said = []
    for keep in (True, False):
        llm = make_llm(windowed_path, page_size=page_size, chunked_prefill_size=32, disable_hybrid_swa_memory=keep)
        session = llm.core.sessions.open()
        outs = [run_turn(llm, session.id, PROMPTS[i], GREEDY).output_ids for i in (1, 2)]
        other = llm.core.sessions.fork(session.id)
        outs += [run_turn(llm, session.id, PROMPTS[5][:9], GREEDY).output_ids]
        outs += [run_turn(llm, other.id, PROMPTS[6][:20], GREEDY).output_ids]
        llm.core.sessions.rewind(session.id, len(PROMPTS[1]) + 20)
        outs += [run_turn(llm, session.id, PROMPTS[7][:5], GREEDY).output_ids]
        said.append(outs)
        assert_idle(llm)
    assert said[0] == said[1]
