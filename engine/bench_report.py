"""The arithmetic of `rung bench`: timed spans in, rows and a table out. It runs nothing and imports no torch.

Bytes that a decode step must read:

    weights + KV of the batch  =  weight_bytes  +  kv_token_bytes * mean over steps of sum over requests of context

Activations, logits and what a step writes are left out (under 2 % at these sizes), so the rate is a lower bound of the
traffic. The same number over a bandwidth measured in the same run says how far a step is from the memory's limit; it
exceeds 1 when weights or KV stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from devices.pages import floor_page

MIN_BUSY_SHARE = 0.9
"""A row that got less of its threads than this was disturbed by other programs, or does too little work for them."""


@dataclass(frozen=True, slots=True)
class Span:
    """A timed stretch of work: its tokens, and seconds by the wall clock and of CPU over all threads."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def busy(self) -> float:
        """CPU seconds a second: the number of threads when nobody else wanted the cores."""
        return self.cpu_s / self.wall_s


@dataclass(frozen=True, slots=True)
class Round:
    """One batch in one round.

    Attributes:
        prefill: all prompts to their first token; its tokens are those that were computed.
        decode: steps that give every request one token each.
        num_steps: of decode.
        kv_tokens: tokens of KV that a decode step reads over the batch, mean of its steps.
        host_s: of each decode step, planning, inputs and results.
        prompt_tokens, cached_tokens: of prefill.
    """

    prefill: Span
    decode: Span
    num_steps: int
    kv_tokens: float
    host_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a decode step reads, in bytes: once the weights, and for each token of context its keys and values."""

    weight_bytes: int
    kv_token_bytes: int

    def step_bytes(self, kv_tokens: float) -> float:
        return self.weight_bytes + self.kv_token_bytes * kv_tokens


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second of memory: reading a large tensor, and copying it (bytes read plus bytes written)."""

    read_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Medians over the rounds of one batch size.

    Attributes:
        prefill_busy, decode_busy: CPU seconds a second.
        step_ms, host_ms: a decode step, and the host's part of it.
        step_bytes: what a decode step reads at least; see the module.
        bandwidth_share: its rate over the read bandwidth of the same run.
        hit_rate: cached prompt tokens over prompt tokens, as counted by the scheduler.
        page_1_hit_rate: what it would have been with pages of one token.
        is_disturbed: a busy figure is below `MIN_BUSY_SHARE` of the threads; do not quote the row.
    """

    batch_size: int
    prefill_tokens_per_s: float
    prefill_busy: float
    decode_tokens_per_s: float
    decode_busy: float
    step_ms: float
    host_ms: float
    step_bytes: float
    bytes_per_s: float
    bandwidth_share: float
    cached_tokens: int
    hit_rate: float
    page_1_hit_rate: float
    is_disturbed: bool


def hit_rate(input_len: int, prefix_len: int, page_size: int) -> float:
    """Share of a prompt of `input_len` tokens that comes from the cache when its first `prefix_len` are in the tree.

    `floor_page(min(prefix_len, input_len - 1)) / input_len`: whole pages, and the last token is always computed.
    """
    return floor_page(min(prefix_len, input_len - 1), page_size) / input_len


def mean_kv_tokens(first_step_tokens: int, batch_size: int, num_steps: int) -> float:
    """Mean tokens of KV that a step reads, when the first reads `first_step_tokens` and each adds one a request."""
    return first_step_tokens + batch_size * (num_steps - 1) / 2


def is_disturbed(busy: float, num_threads: int) -> bool:
    return busy < MIN_BUSY_SHARE * num_threads


def median_bandwidth(samples: Sequence[Bandwidth]) -> Bandwidth:
    return Bandwidth(
        median(sample.read_bytes_per_s for sample in samples), median(sample.copy_bytes_per_s for sample in samples)
    )


def row_of(
    rounds: Sequence[Round],
    *,
    batch_size: int,
    traffic: Traffic,
    bandwidth: Bandwidth,
    num_threads: int,
    prefix_len: int,
) -> BenchRow:
    """Medians of the rounds of one batch size, whose prompts share their first `prefix_len` tokens with the tree."""
    step_s = median(one.decode.wall_s / one.num_steps for one in rounds)
    step_bytes = traffic.step_bytes(median(one.kv_tokens for one in rounds))
    prompt_tokens = sum(one.prompt_tokens for one in rounds)
    prefill_busy, decode_busy = median(one.prefill.busy for one in rounds), median(one.decode.busy for one in rounds)
    return BenchRow(
        batch_size=batch_size,
        prefill_tokens_per_s=median(one.prefill.tokens_per_s for one in rounds),
        prefill_busy=prefill_busy,
        decode_tokens_per_s=median(one.decode.tokens_per_s for one in rounds),
        decode_busy=decode_busy,
        step_ms=step_s * 1e3,
        host_ms=median(host_s for one in rounds for host_s in one.host_s) * 1e3,
        step_bytes=step_bytes,
        bytes_per_s=step_bytes / step_s,
        bandwidth_share=step_bytes / step_s / bandwidth.read_bytes_per_s,
        cached_tokens=rounds[0].cached_tokens,
        hit_rate=sum(one.cached_tokens for one in rounds) / prompt_tokens,
        page_1_hit_rate=hit_rate(rounds[0].prompt_tokens // batch_size, prefix_len, 1),
        is_disturbed=is_disturbed(min(prefill_busy, decode_busy), num_threads),
    )


def table_of(rows: Sequence[BenchRow]) -> Table:
    """The rows for people; "busy" is CPU seconds a second, of prefill and of decode."""
    table = Table(box=None, pad_edge=False)
    headings = ("batch", "prefill tok/s", "decode tok/s", "step ms", "host ms", "GB/s", "of read", "cached", "hits")
    for heading in (*headings, "at page 1", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.batch_size),
            f"{row.prefill_tokens_per_s:.0f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.step_ms:.2f}",
            f"{row.host_ms:.2f}",
            f"{row.bytes_per_s / 1e9:.1f}",
            f"{row.bandwidth_share:.0%}",
            str(row.cached_tokens),
            f"{row.hit_rate:.1%}",
            f"{row.page_1_hit_rate:.1%}",
            f"{row.prefill_busy:.2f} {row.decode_busy:.2f}",
            "disturbed" if row.is_disturbed else "",
        )
    return table
