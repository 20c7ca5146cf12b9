"""A fixed set of seeds runs clean, and everything that can happen does happen in them."""

from __future__ import annotations

from functools import cache

import pytest

from engine.sim.profiles import draw
from engine.sim.run import run_seed
from engine.sim.soak import Totals

BLOCK = 10
"""Seeds of one test."""

BLOCKS = {"mixed": 2, "tiny": 2, "wide": 1, "chat": 1, "siblings": 1, "trouble": 1, "branches": 1, "windows": 1}
NUM_STEPS = 150

MUST_HAPPEN = {
    *(f"abort {state}" for state in ("waiting", "retracted", "forking", "prefill", "prefill-in-flight")),
    *(f"abort {state}" for state in ("decode", "decode-in-flight")),
    *(f"end {reason}" for reason in ("stop", "length", "abort", "timeout", "capacity", "error")),
    *("arrive", "refused", "hit", "hit owed", "fork", "retracted", "retract forced", "not finite"),
    *("allocation fails", "fence held", "flush", "bump"),
    *("turn", "turn refused", "turn resumes", "rewind", "session fork with a row", "close", "close in a turn"),
    *("session timeout", "disconnect in flight", "branch", "branch continues", "branch refused", "branch cut"),
    *("branch forgets", "branch replaces a running one", "scored", "scored prompt", "turn owed", "row gave way"),
    *("window slid", "window evicted", "window shortens a hit", "hit behind a lost window"),
}


@cache
def run_block(profile: str, block: int) -> Totals:
    totals = Totals()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        failure = run_seed(draw(seed, NUM_STEPS, profile), totals)
        if failure is not None:
            pytest.fail(f"{failure}\nscripts/sim --profile {profile} --seed {seed} --steps {NUM_STEPS}")
    return totals


@pytest.mark.parametrize(("profile", "block"), [(name, i) for name, n in BLOCKS.items() for i in range(n)])
def test_seeds_run_clean(profile: str, block: int) -> None:
    assert run_block(profile, block).num_steps > 400


def test_everything_that_can_happen_happens() -> None:
    marks = {mark for name, n in BLOCKS.items() for i in range(n) for mark in +run_block(name, i).marks}
    assert marks >= MUST_HAPPEN, f"never: {MUST_HAPPEN - marks}"
