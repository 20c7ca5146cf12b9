"""`rung bench-serve`: what clients of a running server get, under a load of a stated shape.

    closed loop   as many clients as `concurrency`, each sends its next request when the last one has ended
    open loop     requests arrive by a Poisson process of `rate` a second, whether the server keeps up or not

Workloads: "random" prompts; "shared-prefix", whose first `prefix_len` tokens are the same; "sessions", conversations of
`turns` turns whose prompts are what is new; "trace", lines of JSON with `timestamp_ms`, `input_length`, `output_length`
and maybe `hash_ids`: equal ids are equal blocks of 512 tokens, as in published traces.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from engine.errors import BadRequest

Workload = Literal["random", "shared-prefix", "sessions", "trace"]
WORKLOADS: tuple[Workload, ...] = ("random", "shared-prefix", "sessions", "trace")
TRACE_BLOCK = 512
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send. Lengths are tokens.

    Attributes:
        rate: requests a second; None is the closed loop.
        ttft_bound_ms, tpot_bound_ms: a request that keeps both counts for the goodput.
    """

    workload: Workload = "random"
    num_requests: int = 64
    concurrency: int = 8
    rate: float | None = None
    input_len: int = 128
    output_len: int = 32
    prefix_len: int = 64
    turns: int = 4
    trace: Path | None = None
    ttft_bound_ms: float = 2000.0
    tpot_bound_ms: float = 200.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises BadRequest that names the flag and its range."""
        counts = ("num_requests", "concurrency", "input_len", "output_len", "turns")
        for name in counts:
            if getattr(self, name) < 1:
                raise BadRequest(name, getattr(self, name), "must be at least 1")
        if self.workload not in WORKLOADS:
            raise BadRequest("workload", self.workload, f"must be one of {', '.join(WORKLOADS)}")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise BadRequest("rate", self.rate, "must be above 0 requests a second")
        if not 0 <= self.prefix_len < self.input_len and self.workload == "shared-prefix":
            raise BadRequest("prefix_len", self.prefix_len, f"must be 0 to less than input_len, {self.input_len}")
        if (self.workload == "trace") is (self.trace is None):
            raise BadRequest("trace", self.trace, 'names the file of workload "trace", and of no other')


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt ids, how many tokens to generate, and when it arrives in an open loop (None: by `rate`)."""

    ids: list[int]
    output_len: int
    arrival_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """What a client saw. Times are seconds from sending."""

    error: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.completion_tokens - 1)


def conversations(plan: LoadPlan, vocab_size: int) -> list[list[Ask]]:
    """The requests, those of one conversation one after another; all but sessions have one each."""
    rng = np.random.default_rng(plan.seed)

    def tokens(n: int) -> list[int]:
        ids: list[int] = rng.integers(0, vocab_size, n).tolist()
        return ids

    if plan.workload == "trace":
        assert plan.trace is not None
        return [[ask] for ask in read_trace(plan.trace, vocab_size)[: plan.num_requests]]
    if plan.workload == "sessions":
        count = -(-plan.num_requests // plan.turns)
        return [[Ask(tokens(plan.input_len), plan.output_len) for _ in range(plan.turns)] for _ in range(count)]
    prefix = tokens(plan.prefix_len) if plan.workload == "shared-prefix" else []
    own = plan.input_len - len(prefix)
    return [[Ask([*prefix, *tokens(own)], plan.output_len)] for _ in range(plan.num_requests)]


def read_trace(path: Path, vocab_size: int) -> list[Ask]:
    """Raises BadRequest that says which line is wrong."""
    asks = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadRequest("trace", str(path), f"cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            length, output_len = int(entry["input_length"]), int(entry["output_length"])
            arrival_s = float(entry["timestamp_ms" if "timestamp_ms" in entry else "timestamp"]) / 1e3
            blocks = [int(block) for block in entry.get("hash_ids", ())] or [-number]
        except (ValueError, KeyError, TypeError) as error:
            rule = f"line {number} needs timestamp_ms, input_length and output_length: {error!r}"
            raise BadRequest("trace", str(path), rule) from error
        ids: list[int] = []
        for block in blocks:
            ids += np.random.default_rng(abs(block)).integers(0, vocab_size, TRACE_BLOCK).tolist()
        asks.append(Ask((ids * (length // len(ids) + 1))[:length], max(1, output_len), arrival_s))
    return asks


async def run_load(
    url: str, plan: LoadPlan, *, api_key: str | None = None, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Send everything and report.

    Raises:
        BadRequest: there is no server at `url`.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        try:
            models = (await client.get("/v1/models")).json()
            probe = await client.post("/tokenize", json={"prompt": "a b c"})
            probe.raise_for_status()
        except (httpx.HTTPError, ValueError) as error:
            raise BadRequest("url", url, f"no Rung server answers there: {error!r}") from error
        vocab_size = max(*probe.json()["tokens"], 2)
        talks = conversations(plan, vocab_size)
        started = time.perf_counter()
        outcomes = await _all_of(client, plan, talks, say)
        seconds = time.perf_counter() - started
    return {"model": models["data"][0]["id"], "plan": _plain(plan), **report(outcomes, plan, seconds)}


async def _all_of(
    client: httpx.AsyncClient, plan: LoadPlan, talks: Sequence[Sequence[Ask]], say: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    total = sum(len(talk) for talk in talks)

    async def talk_through(talk: Sequence[Ask]) -> None:
        async for outcome in _talk(client, talk, in_session=plan.workload == "sessions"):
            outcomes.append(outcome)
            say(f"{len(outcomes)} of {total}")

    if plan.rate is None and plan.workload != "trace":
        waiting = iter(talks)

        async def one_client() -> None:
            for talk in waiting:
                await talk_through(talk)

        await asyncio.gather(*(one_client() for _ in range(plan.concurrency)))
        return outcomes
    rng = np.random.default_rng(plan.seed + 1)
    started, due, tasks = time.perf_counter(), 0.0, []
    for talk in talks:
        arrival = talk[0].arrival_s
        due = due + rng.exponential(1 / (plan.rate or 1.0)) if arrival is None else arrival
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(talk_through(talk)))
    await asyncio.gather(*tasks)
    return outcomes


async def _talk(client: httpx.AsyncClient, talk: Sequence[Ask], *, in_session: bool) -> AsyncIterator[Outcome]:
    where: dict[str, Any] = {}
    if in_session:
        opened = await client.post("/open_session", json={"streaming": True})
        where = {"session_params": {"id": opened.json()}}
    for ask in talk:
        yield await _ask(client, ask, where)
    if in_session:
        await client.post("/close_session", json={"session_id": where["session_params"]["id"]})


async def _ask(client: httpx.AsyncClient, ask: Ask, where: dict[str, Any]) -> Outcome:
    params = {"max_new_tokens": ask.output_len, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ask.ids, "sampling_params": params, "stream": True, **where}
    outcome, started = Outcome(), time.perf_counter()
    previous = started
    try:
        async with client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                return Outcome(error=(await answer.aread()).decode(errors="replace")[:200])
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if outcome.ttft_s:
                    outcome.gaps_s.append(now - previous)
                else:
                    outcome.ttft_s = now - started
                previous = now
                last = line
        event = json.loads(last.removeprefix("data: "))
        if "error" in event:
            return Outcome(error=event["error"]["message"])
        meta = event["meta_info"]
        outcome.prompt_tokens, outcome.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        outcome.completion_tokens = meta["completion_tokens"]
    except (httpx.HTTPError, KeyError, UnboundLocalError) as error:
        return Outcome(error=repr(error))
    outcome.total_s = time.perf_counter() - started
    return outcome


def report(outcomes: Sequence[Outcome], plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """Counts, rates, percentiles in milliseconds, and the goodput: requests a second that kept both bounds."""
    good = [one for one in outcomes if not one.error]
    kept = [one for one in good if one.ttft_s * 1e3 <= plan.ttft_bound_ms and one.tpot_s * 1e3 <= plan.tpot_bound_ms]
    prompt = sum(one.prompt_tokens for one in good)
    completion = sum(one.completion_tokens for one in good)
    return {
        "seconds": seconds,
        "num_ok": len(good),
        "num_failed": len(outcomes) - len(good),
        "first_errors": [one.error for one in outcomes if one.error][:3],
        "requests_per_s": len(good) / seconds,
        "goodput_per_s": len(kept) / seconds,
        "output_tokens_per_s": completion / seconds,
        "hit_rate": sum(one.cached_tokens for one in good) / max(1, prompt),
        "ttft_ms": _percentiles([one.ttft_s for one in good]),
        "inter_token_ms": _percentiles([gap for one in good for gap in one.gaps_s]),
        "end_to_end_ms": _percentiles([one.total_s for one in good]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 for p in PERCENTILES}


def _plain(plan: LoadPlan) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in LoadPlan.__slots__}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def lines_of(result: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"{result['model']}: {result['num_ok']} answers, {result['num_failed']} failed, in {result['seconds']:.1f} s",
        f"{result['requests_per_s']:.2f} requests/s, {result['goodput_per_s']:.2f} within the bounds, "
        f"{result['output_tokens_per_s']:.1f} tokens/s, {result['hit_rate']:.1%} of the prompts cached",
        f"{'ms':<16}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES),
    ]
    for name in ("ttft_ms", "inter_token_ms", "end_to_end_ms"):
        values = "".join(f"{value:10.1f}" for value in result[name].values())
        lines.append(f"{name.removesuffix('_ms').replace('_', ' '):<16}{values}")
    return [*lines, *(f"failed: {error}" for error in result["first_errors"])]
