"""Any script of arrivals, aborts and retractions on a real engine with a tiny pool: the right tokens, and clean books.

A script is drawn, the engine plays it and is audited after each half of each step. Whoever was not aborted must have
exactly the tokens of the plainest engine (no cache, whole prompts, alone), as far as the pool can hold them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies as domain
from harness import GREEDY, add, assert_idle, make_llm, outputs, run
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny_llama

from devices.pages import page_count
from engine import LLM, SamplingParams
from engine.request import Request

MAX_PROMPT = 40
MAX_NEW = 10
MAX_STEPS = 600


def random_ids(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


def prompts() -> list[list[int]]:
    """Some alone, most with a head in common that ends inside a page, on its border, or is the whole prompt."""
    long, short = random_ids(0, 33), random_ids(1, 17)
    tails = [[], random_ids(2, 1), random_ids(3, 7)]
    heads = [long[:n] for n in (15, 16, 17, 32, 33)] + [short[:16], short]
    return [head + tail for head in heads for tail in tails] + [random_ids(4, 1), random_ids(5, 5), random_ids(6, 40)]


PROMPTS = prompts()
assert max(map(len, PROMPTS)) == MAX_PROMPT


@dataclass(frozen=True)
class Ask:
    """One request: its prompt, how it samples, and how many steps after the one before it arrives."""

    prompt: int
    max_new: int
    sampled: bool
    priority: int
    gap: int

    @property
    def params(self) -> SamplingParams:
        if self.sampled:
            return SamplingParams(
                temperature=1.0, top_k=40, seed=self.prompt, max_new_tokens=self.max_new, ignore_eos=True
            )
        return replace(GREEDY, max_new_tokens=self.max_new)


@dataclass(frozen=True)
class Script:
    """What happens when.

    Attributes:
        aborts: (step, number of the request, whether the step is in flight then).
        retractions: (step, place among the running requests).
    """

    asks: list[Ask]
    aborts: list[tuple[int, int, bool]] = field(default_factory=list)
    retractions: list[tuple[int, int]] = field(default_factory=list)


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    max_new=st.integers(1, MAX_NEW),
    sampled=st.booleans(),
    priority=domain.priorities,
    gap=st.sampled_from([0, 0, 0, 1, 2, 5]),
)
steps = st.integers(0, 40)
scripts = st.builds(
    Script,
    asks=st.lists(asks, min_size=3, max_size=8),
    aborts=st.lists(st.tuples(steps, st.integers(0, 7), st.booleans()), max_size=3),
    retractions=st.lists(st.tuples(steps, st.integers(0, 7)), max_size=3),
)

ENGINES: dict[str, dict[str, Any]] = {
    "page 1, fcfs": {"page_size": 1, "max_total_tokens": 52, "chunked_prefill_size": 5},
    "page 1, lpm, three rows": {
        "page_size": 1,
        "max_total_tokens": 45,
        "chunked_prefill_size": -1,
        "schedule_policy": "lpm",
        "max_running_requests": 3,
        "radix_eviction_policy": "lfu",
    },
    "page 16, priority": {
        "page_size": 16,
        "max_total_tokens": 80,
        "chunked_prefill_size": 16,
        "schedule_policy": "priority",
        "radix_eviction_policy": "priority",
    },
    "page 16, lpm": {
        "page_size": 16,
        "max_total_tokens": 64,
        "chunked_prefill_size": 7,
        "schedule_policy": "lpm",
        "radix_eviction_policy": "slru",
    },
    "page 16, no tree": {
        "page_size": 16,
        "max_total_tokens": 96,
        "chunked_prefill_size": 12,
        "disable_radix_cache": True,
    },
    "page 16, smallest": {"page_size": 16, "max_total_tokens": 48, "chunked_prefill_size": -1},
}
EAGER = 0.001
"""Conservativeness that thinks of no output: pools run short, requests are retracted."""


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Callable[[Ask], list[int]]:
    """Tokens that a request has when nothing disturbs it."""
    engine = make_llm(tiny_path, page_size=1, disable_radix_cache=True, chunked_prefill_size=-1, max_total_tokens=64)
    known: dict[tuple[int, bool], list[int]] = {}

    def tokens(ask: Ask) -> list[int]:
        key = (ask.prompt, ask.sampled)
        if key not in known:
            known[key] = outputs(run(engine, [PROMPTS[ask.prompt]], replace(ask, max_new=MAX_NEW).params))[0]
        return known[key][: ask.max_new]

    return tokens


@pytest.fixture(scope="module")
def engine_for(tiny_path: Path) -> Callable[[str, float], LLM]:
    """One engine for each set of options, idle and with an empty cache; one that was left in the middle is replaced."""
    built: dict[tuple[str, float], LLM] = {}

    def get(name: str, conservativeness: float) -> LLM:
        key = (name, conservativeness)
        if key not in built or built[key].core.has_work:
            built[key] = make_llm(tiny_path, schedule_conservativeness=conservativeness, **ENGINES[name])
        built[key].flush_cache()
        return built[key]

    return get


def play(llm: LLM, script: Script) -> tuple[list[Request], Counter[str]]:
    """Run a script to its end; also counts how often the engine named each request as ended."""
    requests: list[Request] = []
    ended: Counter[str] = Counter()
    waiting = list(script.asks)
    due = waiting[0].gap

    def abort_due(step: int, in_flight: bool) -> None:
        for at, number, when in script.aborts:
            if at == step and when is in_flight and number < len(requests):
                llm.core.abort(requests[number].id)

    for step in range(MAX_STEPS):
        while waiting and step >= due:
            ask = waiting.pop(0)
            requests.append(add(llm, PROMPTS[ask.prompt], ask.params, priority=ask.priority))
            due = step + waiting[0].gap if waiting else 0
        known = [request.num_output for request in requests]
        abort_due(step, False)
        for at, place in script.retractions:
            running = llm.core.scheduler.running
            # A request that knows more tokens than the pool can hold is about to end; it never comes back from a queue.
            if at == step and place < len(running) and fits(llm, running[place]):
                llm.core.scheduler.retract(running[place])
        changed = llm.core.launch()
        abort_due(step, True)
        changed += llm.core.collect()
        gained = [request.num_output - n for request, n in zip(requests, known, strict=True)]
        assert set(gained) <= {0, 1}, "a step gives a token or none, and takes none away"
        ended.update(request.id for request in changed if request.finish is not None)
        if not waiting and not llm.core.has_work:
            return requests, ended
    raise AssertionError("no progress")


def fits(llm: LLM, request: Request) -> bool:
    return page_count(request.num_known, llm.config.memory.page_size) <= llm.stats()["num_pages"]


def expected_end(llm: LLM, ask: Ask, tokens: list[int]) -> tuple[str, list[int]]:
    """The last token's KV is not needed; when what is needed outgrows the pool, the request ends alone."""
    room = llm.stats()["num_pages"] * llm.config.memory.page_size + 1 - len(PROMPTS[ask.prompt])
    return ("length", tokens) if ask.max_new <= room else ("capacity", tokens[:room])


@pytest.mark.parametrize("name", ENGINES)
@given(script=scripts, conservativeness=st.sampled_from([EAGER, 1.0]))
@settings(max_examples=40)
def test_any_script_gives_every_request_its_own_tokens(
    engine_for: Callable[[str, float], LLM],
    reference: Callable[[Ask], list[int]],
    name: str,
    script: Script,
    conservativeness: float,
) -> None:
    llm = engine_for(name, conservativeness)
    before = llm.stats()["num_retracted_total"]
    requests, ended = play(llm, script)
    for ask, request in zip(script.asks, requests, strict=True):
        assert request.finish is not None
        event(request.finish.reason)
        if request.finish.reason == "abort":
            assert request.output_ids == reference(ask)[: request.num_output]
        else:
            assert (request.finish.reason, request.output_ids) == expected_end(llm, ask, reference(ask))
        assert ended[request.id] == 1 or (request.finish.reason == "abort" and ended[request.id] == 0)
        assert request.kv.req_pool_idx is None
    if llm.stats()["num_retracted_total"] > before + len(script.retractions):
        event("retracted for lack of pages")
    assert_idle(llm)


def test_scripts_reach_every_end(engine_for: Callable[[str, float], LLM]) -> None:
    """What the scripts are made of does happen: capacity, aborts in flight, retractions for lack of pages, hits."""
    llm = engine_for("page 16, smallest", EAGER)
    long, medium = len(PROMPTS) - 1, 0
    script = Script(
        [
            Ask(long, 10, False, 0, 0),
            Ask(medium, 10, False, 0, 0),
            Ask(medium, 10, True, 0, 1),
            Ask(long, 4, True, 0, 0),
        ],
        aborts=[(2, 2, False), (40, 1, True)],
    )
    requests, _ = play(llm, script)
    assert [request.finish.reason for request in requests] == ["capacity", "length", "abort", "length"]
    assert requests[3].cached_tokens > 0
    crowded = engine_for("page 1, fcfs", EAGER)
    crowded.core.step()  # nothing runs: what other scripts taught the estimate is forgotten
    before = crowded.stats()["num_retracted_total"]
    play(crowded, Script([Ask(prompt, MAX_NEW, False, 0, 0) for prompt in range(4)]))
    assert crowded.stats()["num_retracted_total"] > before
