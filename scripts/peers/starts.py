"""How long an engine takes from the start of its process to its first token, and how much memory that takes.

    process starts | imports | weights | warm-up, compilation | prompt of 32 tokens | first token | a long prompt
    |<-                                        start_s                                         ->|
    |<-                                           peak_bytes is taken over                                     ->|

Every start is a fresh process that finds the files and compilation caches of earlier ones; each engine is started once
before the starts that count. A start is work of one thread for long stretches, so it has no "busy" to judge it by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from environments import SetupError
from processes import Launch, Worker
from ratios import turns

FIRST_PROMPT_TOKENS = 32
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """One start; bytes as in `worker.Engine`."""

    engine: str
    start_s: float
    peak_bytes: int
    weight_bytes: int
    kv_bytes: int

    @property
    def other_bytes(self) -> int:
        """Of the peak, what is neither weights nor KV. A pool that is not touched yet makes it too small."""
        return self.peak_bytes - self.weight_bytes - self.kv_bytes


def start_once(launch: Launch, num_tokens: int) -> Start:
    """`num_tokens`: of the prompt that comes behind the first token. Raises SetupError."""
    begun = time.perf_counter()
    worker = Worker(launch)
    try:
        worker.ask({"do": "prefill", "seed": 1, "tokens": FIRST_PROMPT_TOKENS})
        start_s = time.perf_counter() - begun
        worker.ask({"do": "prefill", "seed": 2, "tokens": num_tokens})
        memory = worker.ask({"do": "memory"})
    finally:
        worker.close()
    return Start(launch.name, start_s, *(int(memory[name]) for name in ("peak_bytes", "weight_bytes", "kv_bytes")))


def measure_starts(
    launches: Sequence[Launch],
    skipped: dict[str, str],
    num_starts: int,
    num_tokens: int,
    note: Callable[[str], None],
) -> list[Start]:
    """`num_starts` starts of each engine in turn, after one that is thrown away; `num_tokens` as in `start_once`."""
    by_name, found = {launch.name: launch for launch in launches}, []
    for index in range(-1, num_starts):
        for name in turns(list(by_name), max(index, 0)):
            try:
                one = start_once(by_name[name], num_tokens)
            except SetupError as error:
                skipped[name] = str(error)
                del by_name[name]
                note(f"{name} is skipped: {error}")
                continue
            note(f"start {index + 1:2d}  {name:<14}{one.start_s:8.1f} s  peak {one.peak_bytes / MIB:.0f} MiB")
            if index >= 0:
                found.append(one)
    return found


def start_lines(starts: Sequence[Start]) -> list[str]:
    """A table: medians over the starts of each engine."""
    if not starts:
        return []
    columns = "".join(f"{name:>9}" for name in ("peak", "weights", "KV", "other"))
    lines = ["", f"{'start to first token, MiB':<28}{'s (min - max)':<22}{columns}"]
    for name in dict.fromkeys(start.engine for start in starts):
        own = [start for start in starts if start.engine == name]
        seconds = [start.start_s for start in own]
        spread = f"{median(seconds):.1f} ({min(seconds):.1f} - {max(seconds):.1f})"
        sizes = [median(getattr(start, f"{what}_bytes") for start in own) for what in ("peak", "weight", "kv", "other")]
        lines.append(f"{name:<28}{spread:<22}" + "".join(f"{size / MIB:9.0f}" for size in sizes))
    return lines
