"""`rung sim`: many seeds, one after another; the first failure is replayed, shrunk and printed as a test."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from engine.sim.failures import SimFailure
from engine.sim.play import HEADING, Sink, play
from engine.sim.profiles import CLEAN, Drawn, draw
from engine.sim.shrink import as_test, shrink
from engine.sim.soak import Soak, Totals

ALL = "all"
"""Stands for every profile that must run clean."""

SEEDS_OF_A_WRITE = 16
"""Seeds after which a soak's file is written."""


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
    summary: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Run seeds from `seed` on, and say what happened.

    Args:
        num_seeds: how many, unless `minutes` is above 0: then as many as begin within so many minutes.
        profile: which worlds; `ALL` takes each profile in turn, each with seeds of its own.
        is_verbose: say every step.
        summary: a file that adds up what ran, run after run; a run with it goes on behind the seeds that it names.
    Returns:
        The exit code: 0, or that of the first failure.
    """
    totals, started = Totals(), clock()
    names = CLEAN if profile == ALL else (profile,)
    soak = Soak.read(summary, num_steps)
    first = {name: soak.next_seed(name, seed) for name in names}
    gc.freeze()  # a world is small; what was imported need not be looked at again and again
    for turn in count():
        one, name = first[names[turn % len(names)]] + turn // len(names), names[turn % len(names)]
        began = clock()
        if (turn >= num_seeds) if minutes <= 0 else (began - started >= 60 * minutes):
            break
        drawn = draw(one, num_steps, name)
        if is_verbose:
            say(f"seed {one}, profile {name}: {drawn.config}\n{HEADING}")
        before = replace(totals, marks=totals.marks.copy())
        failure = run_seed(drawn, totals, say if is_verbose else None)
        soak.count(name, one, totals.since(before), clock() - began, failure)
        if failure is not None:
            soak.write(summary)
            say(_explain(one, name, drawn, failure))
            return failure.exit_code
        if turn % SEEDS_OF_A_WRITE == 0:
            soak.write(summary)
    soak.write(summary)
    say(totals.line(clock() - started))
    return 0


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
