"""`rung bench`: how fast an engine prefills and decodes in its own process, and how near that is to its memory's limit.

Every round measures each batch size, then the memory, so that all figures of a run saw the same machine:

    flush, cache the prefix | add B prompts, 1 token each | add them again | B x (output_len - 1) tokens | abort
                            |<-        prefill          ->| (from the tree) |<-        decode         ->|

Prefill never mixes with decode, and every decode step computes all B requests and nothing else. What the numbers mean
is in `engine.bench_report`, how to read them in docs/benchmarks.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from devices.pages import IntArray, ceil_page
from engine.bench_report import Bandwidth, BenchRow, Round, Span, Traffic, mean_kv_tokens, median_bandwidth, row_of
from engine.errors import BadRequest
from engine.sampling.params import SamplingParams
from mem_cache.sizing import attention_token_bytes

if TYPE_CHECKING:
    from devices.base import Device
    from engine.core import EngineCore
    from engine.llm import LLM
    from engine.models.config import ModelConfig
    from engine.runner import ModelRunner

BANDWIDTH_BYTES = 512 << 20
"""Of the tensor that is read and copied: several times the largest cache of a processor."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. Lengths are tokens of one request; `input_len` includes the shared `prefix_len`."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    input_len: int = 512
    output_len: int = 33
    prefix_len: int = 0
    rounds: int = 3
    bandwidth_bytes: int = BANDWIDTH_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises BadRequest that names the flag and its range."""
        if not self.batch_sizes:
            raise BadRequest("batch_sizes", self.batch_sizes, "needs at least one size")
        sizes = [("batch_sizes", size, 1) for size in self.batch_sizes]
        lengths = [("input_len", self.input_len, 1), ("output_len", self.output_len, 2)]
        counts = [("rounds", self.rounds, 1), ("bandwidth_bytes", self.bandwidth_bytes, 1 << 10)]
        for name, value, least in (*sizes, *lengths, *counts):
            if value < least:
                raise BadRequest(name, value, f"must be at least {least}")
        if not 0 <= self.prefix_len <= self.input_len:
            raise BadRequest("prefix_len", self.prefix_len, f"must be 0 to input_len, {self.input_len}")

    def check(self, core: EngineCore) -> None:
        """Raises BadRequest when the engine cannot hold the largest batch."""
        length = self.input_len + self.output_len
        if length > core.context_len:
            raise BadRequest("input_len", self.input_len, f"and output_len exceed the context of {core.context_len}")
        page_size = core.allocator.geometry.page_size
        needed = (max(self.batch_sizes) + 1) * ceil_page(length + page_size, page_size)
        capacity = core.allocator.num_pages * page_size
        rows = core.allocator.rows.num_rows
        if needed > capacity or max(self.batch_sizes) > rows:
            rule = (
                f"needs {needed} tokens of KV and as many rows; the pool has {capacity} and {rows}: raise "
                "--max-total-tokens or --max-running-requests"
            )
            raise BadRequest("batch_sizes", max(self.batch_sizes), rule)


def parse_sizes(text: str) -> tuple[int, ...]:
    """ "1,8,32" -> (1, 8, 32), without repeats. Raises BadRequest."""
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise BadRequest("batch_sizes", text, "must be whole numbers with commas between, for example 1,8,32") from None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole run: what was measured, where, and a row for each batch size. `dtype` is the weights', with KV's."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    num_threads: int
    plan: BenchPlan
    traffic: Traffic
    bandwidth: Bandwidth
    rows: tuple[BenchRow, ...]

    def summary(self) -> str:
        """One line above the table."""
        read, copy = (rate / 1e9 for rate in (self.bandwidth.read_bytes_per_s, self.bandwidth.copy_bytes_per_s))
        plan = self.plan
        return (
            f"{self.model}, {self.dtype}, KV {self.kv_dtype}, page {self.page_size}, {self.num_threads} threads; "
            f"input {plan.input_len}, prefix {plan.prefix_len}, output {plan.output_len}, {plan.rounds} rounds; "
            f"memory: read {read:.1f}, copy {copy:.1f} GB/s; weights {self.traffic.weight_bytes / 1e6:.0f} MB a step, "
            f"KV {self.traffic.kv_token_bytes} bytes a token"
        )


class Stopwatch:
    """Wall clock and CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.perf_counter()

    def span(self, num_tokens: int) -> Span:
        wall_s = time.perf_counter() - self._wall_s
        return Span(num_tokens, wall_s, time.process_time() - self._cpu_s)


class MemoryProbe:
    """Two large float32 tensors on the device: one to read, one to copy it to."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._source = torch.ones(num_bytes // 4, device=device.torch_device)
        self._target = torch.zeros_like(self._source)

    def measure(self, repeats: int = 3) -> Bandwidth:
        """The best of some repeats: what the memory can do, not what was left of it for a moment."""
        num_bytes = self._source.nbytes
        return Bandwidth(
            num_bytes / min(self._seconds(self._source.sum) for _ in range(repeats)),
            2 * num_bytes / min(self._seconds(lambda: self._target.copy_(self._source)) for _ in range(repeats)),
        )

    def _seconds(self, act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        self._device.synchronize()
        return time.perf_counter() - start


def make_prompts(
    rng: np.random.Generator, vocab_size: int, *, batch_size: int, input_len: int, prefix_len: int = 0
) -> IntArray:
    """Random prompts, int32 [batch_size, input_len], that are equal for `prefix_len` tokens and differ in the next.

    The next token differs as long as the vocabulary has so many: with any page size, the tree matches the prefix only.
    """
    prompts: IntArray = rng.integers(vocab_size, size=(batch_size, input_len), dtype=np.int32)
    prompts[:, :prefix_len] = prompts[0, :prefix_len]
    if prefix_len < input_len:
        prompts[:, prefix_len] = (prompts[0, prefix_len] + np.arange(batch_size)) % vocab_size
    return prompts


def prefill(core: EngineCore, prompts: Sequence[IntArray]) -> Span:
    """Compute prompts together to their first token and end; the span counts the tokens that the cache did not have.

    `core.timings` holds exactly its steps.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    core.timings.clear()
    watch = Stopwatch()
    requests = [request for prompt in prompts for request in core.add(prompt, params)]
    while core.has_work:
        core.step()
    return watch.span(sum(request.prompt_len - (request.cached_tokens or 0) for request in requests))


def decode(core: EngineCore, prompts: Sequence[IntArray], num_steps: int, spare: int) -> tuple[Span, float]:
    """`num_steps` steps of greedy decoding, each with all requests; the prompts are computed before, if need be.

    Args:
        spare: most steps that the first request may decode while prompts of others are still computed.
    Returns:
        The steps' span, and the mean over them of KV tokens read. `core.timings` holds exactly these steps.
    Raises:
        BadRequest: the engine could not keep all requests running at once.
    """
    batch_size = len(prompts)
    params = SamplingParams(temperature=0.0, max_new_tokens=num_steps + 1 + spare, ignore_eos=True)
    requests = [request for prompt in prompts for request in core.add(prompt, params)]
    try:
        while any(request.num_output == 0 for request in requests):
            core.step()
        kv_tokens = mean_kv_tokens(sum(request.num_known for request in requests), batch_size, num_steps)
        core.timings.clear()
        watch = Stopwatch()
        for _ in range(num_steps):
            core.step()
        span = watch.span(batch_size * num_steps)
    finally:
        for request in requests:
            core.abort(request.id)
    if any(timing.num_tokens != batch_size or timing.num_requests != batch_size for timing in core.timings):
        raise BadRequest("batch_sizes", batch_size, "requests cannot all run at once; raise --max-total-tokens")
    return span, kv_tokens


def run_bench(llm: LLM, plan: BenchPlan, progress: Callable[[str], object] = lambda _: None) -> BenchReport:
    """Measure an idle engine.

    Args:
        progress: told what is measured next.
    Raises:
        BadRequest: the engine cannot hold a batch, or runs other requests; says what to change.
    """
    core = llm.core
    plan.check(core)
    probe = MemoryProbe(llm.device, plan.bandwidth_bytes)
    rng = np.random.default_rng(plan.seed)
    measured: dict[int, list[Round]] = {size: [] for size in plan.batch_sizes}
    bandwidths = []
    progress("warming up")
    _run_round(core, plan, rng, batch_size=1)
    for index in range(plan.rounds):
        for batch_size, rounds in measured.items():
            progress(f"round {index + 1} of {plan.rounds}, batch {batch_size}")
            rounds.append(_run_round(core, plan, rng, batch_size))
        bandwidths.append(probe.measure())
    core.flush_cache()
    return _report(llm, plan, measured, median_bandwidth(bandwidths))


def _run_round(core: EngineCore, plan: BenchPlan, rng: np.random.Generator, batch_size: int) -> Round:
    lengths: dict[str, Any] = {"input_len": plan.input_len, "prefix_len": plan.prefix_len}
    prompts = list(make_prompts(rng, core.vocab_size, batch_size=batch_size, **lengths))
    core.flush_cache()
    if plan.prefix_len:
        prefill(core, [prompts[0][: plan.prefix_len]])
    before = core.stats()
    prefilled = prefill(core, prompts)
    after = core.stats()
    num_steps = plan.output_len - 1
    decoded, kv_tokens = decode(core, prompts, num_steps, spare=len(core.timings))
    return Round(
        prefill=prefilled,
        decode=decoded,
        num_steps=num_steps,
        kv_tokens=kv_tokens,
        host_s=tuple(timing.host_s + timing.prepare_s for timing in core.timings),
        prompt_tokens=after["prompt_tokens_total"] - before["prompt_tokens_total"],
        cached_tokens=after["cached_tokens_total"] - before["cached_tokens_total"],
    )


def _report(llm: LLM, plan: BenchPlan, measured: dict[int, list[Round]], bandwidth: Bandwidth) -> BenchReport:
    from engine.runner import ModelRunner

    runner, num_threads = llm.core.runner, torch.get_num_threads()
    assert isinstance(runner, ModelRunner)
    kv_dtype = runner.kv.layers[0].k.dtype
    traffic = traffic_of(runner, llm.model_config, kv_dtype)
    context: dict[str, Any] = {
        "traffic": traffic,
        "bandwidth": bandwidth,
        "num_threads": num_threads,
        "prefix_len": plan.prefix_len,
    }
    return BenchReport(
        model=llm.config.model.model,
        device=llm.device.description,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        page_size=llm.core.allocator.geometry.page_size,
        num_threads=num_threads,
        plan=plan,
        traffic=traffic,
        bandwidth=bandwidth,
        rows=tuple(row_of(rounds, batch_size=size, **context) for size, rounds in measured.items()),
    )


def traffic_of(runner: ModelRunner, config: ModelConfig, kv_dtype: torch.dtype) -> Traffic:
    """What a decode step reads; experts and windows are counted whole: an upper bound for models that have them."""
    token_bytes = attention_token_bytes(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype.itemsize)
    return Traffic(runner.model.step_bytes, token_bytes)
