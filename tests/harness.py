"""Drives real engines in tests: every step is audited, and a script may act between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import LLM, SamplingParams
from engine.request import Request, RequestStatus

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def make_llm(path: Path, **kwargs: Any) -> LLM:
    """A CPU engine in fp32 with a small pool, whose every step is followed by an audit."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "random_seed": 0}
    llm = LLM(str(path), **(defaults | kwargs))
    plain_launch, plain_collect = llm.core.launch, llm.core.collect

    def launch() -> list[Request]:
        ended = plain_launch()
        assert llm.audit() == []
        return ended

    def collect() -> list[Request]:
        changed = plain_collect()
        assert llm.audit() == []
        return changed

    llm.core.launch, llm.core.collect = launch, collect  # type: ignore[method-assign]
    return llm


def add(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, **kwargs: Any) -> Request:
    """Queue a prompt; the first of its requests (with n > 1 the others are its siblings)."""
    return llm.core.add(np.array(prompt, dtype=np.int32), params, **kwargs)[0]


def start_turn(llm: LLM, session_id: str, new_ids: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    """Queue a turn of a session."""
    return llm.core.add_turn(session_id, np.array(new_ids, dtype=np.int32), params)


def finish_all(llm: LLM, max_steps: int = 5000) -> None:
    """Step until nothing is left to do."""
    for _ in range(max_steps):
        if not llm.core.has_work:
            return
        llm.core.step()
    raise AssertionError("no progress")


def run_turn(llm: LLM, session_id: str, new_ids: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    """A turn of a session, to its end."""
    request = start_turn(llm, session_id, new_ids, params)
    finish_all(llm)
    assert request.finish is not None
    return request


def run(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    between: Callable[[int, list[Request]], None] | None = None,
    max_steps: int = 5000,
) -> list[Request]:
    """Run prompts together to their end; `between(step, requests)` acts before each step."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [add(llm, prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    for step in range(max_steps):
        if not llm.core.has_work:
            break
        if between is not None:
            between(step, requests)
        llm.core.step()
    assert all(request.finish is not None for request in requests), "no progress"
    return requests


def force_retractions(llm: LLM, every: int, limit: int = 40) -> Callable[[int, list[Request]], None]:
    """Send a random running request back every few steps, `limit` times."""
    rng = np.random.default_rng(0)

    def between(step: int, requests: list[Request]) -> None:
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        if running and step % every == 0 and llm.stats()["num_retracted_total"] < limit:
            llm.core.scheduler.retract(running[rng.integers(len(running))])

    return between


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_ids for request in requests]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, the books are right, no session holds a row, and every page is free or the tree's."""
    llm.core.sessions.demote_all()
    stats = llm.stats()
    assert llm.audit() == []
    assert (stats["num_running"], stats["num_waiting"], stats["request_pages"]) == (0, 0, 0)
    assert stats["free_rows"] == stats["num_rows"]
    assert stats["tree_protected_pages"] == 0
    assert stats["free_pages"] + stats["tree_evictable_pages"] == stats["num_pages"]


def prompts_with_shared_heads(seed: int, n: int, vocab_size: int = 300, max_len: int = 180) -> list[list[int]]:
    """Random prompts of which many share their first 5 to 140 tokens."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(3, vocab_size, size).tolist() for size in (5, 16, 33, 140)]
    prompts = []
    for _ in range(n):
        head = heads[rng.integers(len(heads))] if rng.random() < 0.7 else []
        tail = rng.integers(3, vocab_size, rng.integers(1, max_len - len(head) + 1)).tolist()
        prompts.append(head + tail)
    return prompts
