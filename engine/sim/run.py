"""`rung sim`: many seeds, one after another; the first failure is replayed, shrunk and printed as a test."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.sim.failures import SimFailure
from engine.sim.play import HEADING, Sink, play
from engine.sim.profiles import Drawn, draw
from engine.sim.shrink import as_test, shrink


@dataclass(slots=True)
class Totals:
    """What ran clean so far. `marks`: how often each rare thing happened."""

    num_seeds: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    marks: Counter[str] = field(default_factory=Counter)

    def line(self, seconds: float) -> str:
        rate = self.num_steps / max(seconds, 1e-9)
        return (
            f"{self.num_seeds} seeds, {self.num_steps} steps, {self.num_requests} requests, {self.num_tokens} tokens "
            f"clean in {seconds:.1f} s ({rate:.0f} steps/s)"
        )


def run_seed(drawn: Drawn, totals: Totals, sink: Sink | None = None) -> SimFailure | None:
    """Play one script; counts it when it is clean, returns what a checker found otherwise."""
    try:
        report = play(drawn.config, drawn.script, drawn.num_steps, sink)
    except SimFailure as failure:
        return failure
    totals.num_seeds += 1
    totals.num_steps += report.num_steps
    totals.num_requests += report.num_requests
    totals.num_tokens += report.num_tokens
    totals.marks += report.marks
    return None


def simulate(
    *,
    seed: int,
    num_seeds: int,
    num_steps: int,
    profile: str,
    minutes: float,
    is_verbose: bool,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run seeds from `seed` on, and say what happened.

    Args:
        num_seeds: how many, unless `minutes` is above 0: then as many as begin within so many minutes.
        is_verbose: say every step.
    Returns:
        The exit code: 0, or that of the first failure.
    """
    totals, started = Totals(), clock()
    gc.freeze()  # a world is small; what was imported need not be looked at again and again
    for one in _seeds(seed, num_seeds, minutes, started, clock):
        drawn = draw(one, num_steps, profile)
        if is_verbose:
            say(f"seed {one}, profile {profile}: {drawn.config}\n{HEADING}")
        failure = run_seed(drawn, totals, say if is_verbose else None)
        if failure is not None:
            say(_explain(one, profile, drawn, failure))
            return failure.exit_code
    say(totals.line(clock() - started))
    return 0


def _seeds(first: int, num_seeds: int, minutes: float, started: float, clock: Callable[[], float]) -> Iterator[int]:
    if minutes <= 0:
        yield from range(first, first + num_seeds)
        return
    for seed in count(first):
        if clock() - started >= 60 * minutes:
            return
        yield seed


def _explain(seed: int, profile: str, drawn: Drawn, failure: SimFailure) -> str:
    """What failed, the command that replays it, and the smallest script as a test."""
    small = shrink(drawn, failure)
    name = f"seed_{seed}_of_{profile}"
    return (
        f"seed {seed}: {type(failure).__name__} in step {failure.step}\n  {failure}\n"
        f"replay: scripts/sim --profile {profile} --seed {seed} --steps {drawn.num_steps} -v\n"
        f"shrunk from {len(drawn.script)} events to {len(small.best.script)}, as a test:\n\n"
        f"{as_test(small.best, small.failure, name)}"
    )
