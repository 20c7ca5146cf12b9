"""Drives real engines in tests: every step is audited, and a script may act between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.base import Device
from devices.registry import DEVICE_NAMES, try_open
from engine import LLM, SamplingParams
from engine.request import Request, RequestStatus

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


class Target:
    """The device of engines that do not say another; tests that use the fixture `on_device` set it."""

    name = "cpu"


def finest_page() -> int:
    """The smallest page of the target."""
    return min(opened(Target.name).capabilities.page_sizes)


def opened(name: str) -> Device:
    device = try_open(name)
    assert not isinstance(device, str), device
    return device


def fitted(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a device: the most exact dtype that it has, and chunks that end where it resumes.

    Skips the test when it is about a page size or a resume unit that the device does not have.
    """
    device = try_open(name) if name in DEVICE_NAMES else "unknown"
    if isinstance(device, str):
        return kwargs  # the engine says why
    capabilities = device.capabilities
    exact = "float32" if "float32" in capabilities.dtypes else "float16"
    values: dict[str, Any] = {"device": name, "dtype": exact, "max_total_tokens": 4096, "random_seed": 0} | kwargs
    page_size = values.get("page_size", capabilities.default_page_size)
    if page_size not in capabilities.page_sizes and name != "cpu":
        pytest.skip(f"{name} has no pages of {page_size}")
    if capabilities.resume_unit == "page":
        if values.get("resume_unit") == "token":
            pytest.skip(f"{name} resumes at page borders only")
        if 0 < (values.get("chunked_prefill_size") or 0) < page_size:
            values["chunked_prefill_size"] = page_size
    return values


def make_llm(path: Path, **kwargs: Any) -> LLM:
    """An engine with a small pool on the target, whose every step is followed by an audit; the CPU's computes fp32."""
    llm = LLM(str(path), **fitted(kwargs.get("device", Target.name), kwargs))
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
