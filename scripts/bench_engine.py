"""Measures the engine's own costs on a real model; prints medians, never asserts.

    python scripts/bench_engine.py [--model M] [--soak-minutes N | --host] [--json FILE]

decode      host, preparation and device time of a decode step at batch 1, 8 and 32; "busy" is CPU seconds a second:
            below 1.8 on two threads another program took the cores, and the row should not be quoted
prefix hit  time to first token of a 2,048-token prompt, cold and with its first 2,000 tokens cached
host        with --host: milliseconds of the engine thread's CPU time in a decode step at batch 32 and 256 outside the
            model and its logits, and what they are spent on. CPU time, so that a busy machine changes little.
            "choice" reads every logit where the model left it (the arg max of greedy rows): work of the device, which
            other devices do in a kernel; "books" is all the rest of "host"
soak        a mixed load (shared prefixes, aborts, a pool too small for all) for some minutes: memory before and after
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import engine.runner
from engine import LLM, SamplingParams
from engine.runner import ModelRunner
from engine.sampling.choice import chooser

Result = dict[str, Any]
PARTS = ("host", "prepare", "device")
"""Scheduling and results; page tables and the attention's plan; model and sampler."""


def decode_steps(llm: LLM, batch: int, context: int = 256, num_steps: int = 64) -> Result:
    """Medians of one decode step with `batch` requests of about `context` tokens."""
    params = SamplingParams(temperature=0.0, max_new_tokens=num_steps + 8, ignore_eos=True)
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        llm.core.add(rng.integers(100, 40_000, context).astype(np.int32) % llm.core.vocab_size, params)
    llm.core.timings.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    while llm.core.has_work:
        llm.core.step()
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    steps = [timing for timing in llm.core.timings if timing.num_tokens == timing.num_requests == batch]
    parts = {f"{name}_ms": statistics.median(getattr(s, f"{name}_s") for s in steps) * 1e3 for name in PARTS}
    return {
        "what": f"decode batch {batch}",
        **parts,
        "tokens_per_s": batch / sum(parts.values()) * 1e3,
        "busy": busy,
        "num_steps": len(steps),
    }


class ThreadTimes:
    """CPU seconds of this thread in some calls of an engine's step, by name; a call inside another counts in both."""

    def __init__(self, llm: LLM) -> None:
        core, runner = llm.core, llm.core.runner
        assert isinstance(runner, ModelRunner)
        self.spent: dict[str, float] = defaultdict(float)
        calls = (
            ("plan", core.scheduler, "launch"),
            ("inputs", runner, "_prepare"),
            ("runner", runner, "launch"),
            ("model", runner.model, "forward"),
            ("logits", runner.model, "logits"),
            ("results", core.scheduler, "process"),
        )
        for name, owner, method in calls:
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        setattr(engine.runner, "chooser", lambda *args: self._timed("choice", chooser(*args)))  # noqa: B010

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                self.spent[name] += time.thread_time() - start

        return timed

    def take(self, total: float) -> Result:
        """Milliseconds since the last call, of which `total` seconds were a whole step's; parts that do not overlap."""
        spent, self.spent = self.spent, defaultdict(float)
        host = total - spent["model"] - spent["logits"]
        launch = spent["runner"] - spent["inputs"] - spent["model"] - spent["logits"] - spent["choice"]
        named = {name: spent[name] for name in ("choice", "plan", "inputs", "results")} | {"launch": launch}
        parts = {"host": host, "books": host - spent["choice"], **named, "rest": host - sum(named.values())}
        return {f"{name}_ms": seconds * 1e3 for name, seconds in parts.items()}


def host_steps(llm: LLM, times: ThreadTimes, batch: int, context: int, num_steps: int) -> Result:
    """Medians of what a greedy decode step of `batch` requests costs outside the model."""
    params = SamplingParams(temperature=0.0, max_new_tokens=2 * batch + num_steps, ignore_eos=True)
    rng = np.random.default_rng(batch)
    prompts = rng.integers(100, 40_000, (batch, context)).astype(np.int32) % llm.core.vocab_size
    requests = [request for prompt in prompts for request in llm.core.add(prompt, params)]
    while any(request.num_output == 0 for request in requests):
        llm.core.step()
    steps = []
    times.take(0.0)
    for _ in range(num_steps):
        start = time.thread_time()
        llm.core.step()
        steps.append(times.take(time.thread_time() - start))
    for request in requests:
        llm.core.abort(request.id)
    return {"what": f"host batch {batch}"} | {name: statistics.median(s[name] for s in steps) for name in steps[0]}


def prefix_hit(llm: LLM, rounds: int = 5, length: int = 2048, cached: int = 2000) -> Result:
    """Time to first token with and without a cached prefix; medians of paired rounds."""
    one = SamplingParams(temperature=0.0, max_new_tokens=1)
    rng = np.random.default_rng(0)
    cold, warm = [], []
    for _ in range(rounds):
        llm.flush_cache()
        head, tail, other = (rng.integers(100, 40_000, n).tolist() for n in (cached, length - cached, length - cached))
        cold.append(llm.generate([*head, *tail], one).timings.time_to_first_token_s)
        result = llm.generate([*head, *other], one)
        warm.append(result.timings.time_to_first_token_s)
    return {
        "what": f"prefix hit of {result.usage.cached_tokens} in {length} tokens",
        "cold_ms": statistics.median(cold) * 1e3,
        "warm_ms": statistics.median(warm) * 1e3,
        "ratio": statistics.median(c / w for c, w in zip(cold, warm, strict=True)),
    }


def soak(llm: LLM, minutes: float) -> Result:
    """A mixed load for some minutes; resident memory is sampled after a warm-up of a tenth of it."""
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    for layer in runner.kv.layers:  # touch the pool first: what grows afterwards is the engine's own
        layer.k.zero_()
        layer.v.zero_()
    rng = np.random.default_rng(1)
    heads = [rng.integers(100, 40_000, n).tolist() for n in (20, 100, 300, 700)]
    start = time.monotonic()
    end, warm = start + minutes * 60, start + minutes * 6
    before = peak = count = aborted = 0
    live: list[str] = []
    while time.monotonic() < end or llm.core.has_work:
        if len(live) < 24 and time.monotonic() < end:
            head = heads[rng.integers(len(heads))]
            prompt = [*head, *rng.integers(100, 40_000, rng.integers(1, 200)).tolist()]
            params = SamplingParams(max_new_tokens=int(rng.integers(1, 120)), temperature=float(rng.random() < 0.5))
            live.append(llm.core.add(np.array(prompt, dtype=np.int32), params)[0].id)
            count += 1
        if live and rng.random() < 0.02:
            aborted += llm.core.abort(live[rng.integers(len(live))])
        llm.core.step()
        live = [request_id for request_id in live if request_id in llm.core._requests]
        if time.monotonic() > warm:
            before = before or resident_bytes()
            peak = max(peak, resident_bytes())
    assert llm.audit() == [], llm.audit()
    return {
        "what": f"soak {minutes} min",
        "requests": count,
        "aborted": aborted,
        "retracted": llm.stats()["num_retracted_total"],
        "resident_mb_after_warm_up": before / 1e6,
        "peak_mb": peak / 1e6,
        "end_mb": resident_bytes() / 1e6,
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--host", action="store_true", help="only what a decode step costs outside the model")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of --host")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of --host")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    if args.host:
        sizes = (32, 256)
        tokens = max(sizes) * (args.context + args.steps + 2 * max(sizes) + 32)
        llm = LLM(args.model, max_total_tokens=tokens, max_running_requests=max(sizes))
        times = ThreadTimes(llm)
        results += [host_steps(llm, times, size, args.context, args.steps) for size in sizes]
    elif args.soak_minutes:
        results.append(soak(LLM(args.model, max_total_tokens=4096), args.soak_minutes))
    else:
        llm = LLM(args.model, max_total_tokens=32768)
        results += [decode_steps(llm, batch) for batch in (1, 8, 32)]
        results.append(prefix_hit(llm))
    for result in results:
        numbers = "  ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items() if k != "what"
        )
        print(f"{result['what']:<34} {numbers}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
