"""Draws a world and its script from a seed. Swarm style: each seed has its own few kinds of events, and their rates.

A script where everything happens all the time never gets deep into anything; one without aborts fills the pool, one
without arrivals drains it. So most kinds are absent from most scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from engine.sim.events import KINDS, Swarm, Timed, sessions
from engine.sim.events.branching import draw_branch
from engine.sim.events.requests import draw_arrival
from engine.sim.events.sessions import draw_turn
from engine.sim.world import WorldConfig

TRAITS = ("n", "sampled", "stop", "priority", "salt", "time limit", "after", "long", "chat", "timeout", "logprobs")
"""Sides of an arrival that a script has or has not; with "chat" most arrivals are turns of sessions."""


AUDITS_HALVES = 4
"""Of so many seeds one is audited after both halves of each step, the others after each step, which is quicker."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A world and what happens in it, in `num_steps` steps."""

    config: WorldConfig
    script: tuple[Timed, ...]
    num_steps: int


def _draw_config(rng: Random) -> WorldConfig:
    page_size = rng.choice((1, 2, 4, 4, 16))
    num_pages = rng.choice((6, 12, 24, 48)) if page_size > 1 else rng.choice((24, 48, 96))
    capacity = page_size * num_pages
    resume_unit = "page" if rng.random() < 0.3 else "token"
    least_chunk = page_size if resume_unit == "page" else 1
    return WorldConfig(
        page_size=page_size,
        num_pages=num_pages,
        num_rows=rng.choice((1, 2, 3, 4, 8)),
        context_len=max(2, rng.choice((capacity // 2, capacity, capacity + 2 * page_size, 2 * capacity))),
        resume_unit="page" if resume_unit == "page" else "token",
        chunk_tokens=None if rng.random() < 0.3 else least_chunk + rng.randrange(0, 4 * page_size + 1),
        policy=rng.choice(("fcfs", "lpm", "priority")),
        eviction=rng.choice(("lru", "lfu", "slru", "priority")),
        conservativeness=rng.choice((0.001, 0.3, 1.0)),
        preemption_threshold=rng.choice((0, 1, 10)),
        caching=rng.random() < 0.9,
        overlap=rng.random() < 0.5,
    )


def _tiny(rng: Random) -> WorldConfig:
    """A pool of a few pages: everything is short all the time."""
    page_size = rng.choice((1, 2, 4))
    num_pages = rng.randrange(2, 9)
    return WorldConfig(
        page_size=page_size,
        num_pages=num_pages,
        num_rows=rng.choice((2, 3, 4)),
        context_len=page_size * num_pages + rng.choice((2, page_size, 3 * page_size + 1)),
        chunk_tokens=None if rng.random() < 0.5 else 1 + rng.randrange(2 * page_size),
        policy=rng.choice(("fcfs", "lpm", "priority")),
        eviction=rng.choice(("lru", "lfu", "slru", "priority")),
        conservativeness=rng.choice((0.001, 0.1, 1.0)),
        caching=rng.random() < 0.85,
        overlap=rng.random() < 0.5,
    )


def _wide(rng: Random) -> WorldConfig:
    """Pages of an NPU, which resumes on their borders only."""
    num_pages = rng.choice((4, 8, 16))
    return WorldConfig(
        page_size=128,
        num_pages=num_pages,
        num_rows=rng.choice((2, 4)),
        context_len=128 * num_pages + rng.choice((0, 1, 130)),
        resume_unit="page",
        chunk_tokens=rng.choice((None, 128, 200, 256)),
        policy=rng.choice(("fcfs", "lpm", "priority")),
        conservativeness=rng.choice((0.001, 1.0)),
        overlap=rng.random() < 0.5,
    )


def _windows(rng: Random) -> WorldConfig:
    """Few rows and short chunks beside many pages: the window's pool is the smaller one, and the tree must let go."""
    page_size = rng.choice((1, 2, 4))
    num_pages = rng.choice((24, 36, 48))
    return WorldConfig(
        page_size=page_size,
        num_pages=num_pages,
        num_rows=rng.choice((1, 1, 2, 3)),
        context_len=page_size * rng.choice((num_pages // 2, num_pages, num_pages + 2)),
        resume_unit=rng.choice(("token", "page")),
        chunk_tokens=page_size * rng.choice((1, 2, 3)),
        window=_window_of(rng, page_size),
        policy=rng.choice(("fcfs", "lpm", "priority")),
        eviction=rng.choice(("lru", "lfu", "slru", "priority")),
        conservativeness=rng.choice((0.001, 0.3, 1.0)),
        overlap=rng.random() < 0.5,
    )


def _window_of(rng: Random, page_size: int) -> int:
    """One to three pages, and in half of the worlds not whole ones; a window of one token would be no attention."""
    whole = page_size * rng.randrange(1, 4)
    return max(2, whole if rng.random() < 0.5 else whole - rng.randrange(page_size))


def _canary(rng: Random) -> WorldConfig:
    """A world whose wrong answer must be noticed: see `WorldConfig.is_canary`."""
    return WorldConfig(is_canary=True, num_pages=rng.choice((24, 48)))


PROFILES: dict[str, Callable[[Random], WorldConfig]] = {
    "mixed": _draw_config,
    "tiny": _tiny,
    "wide": _wide,
    "chat": _draw_config,
    "siblings": _tiny,
    "trouble": _draw_config,
    "branches": _draw_config,
    "windows": _windows,
    "canary": _canary,
}

CLEAN = tuple(name for name in PROFILES if name != "canary")
"""Profiles whose every seed must run clean."""

FOCUS = {
    "chat": frozenset({"chat", "timeout", "abort running", "not finite", "bump"}),
    "siblings": frozenset({"n", "time limit", "logprobs", "abort", "disconnect"}),
    "branches": frozenset({"branch", "abort running"}),
    "trouble": frozenset({"n", "after", "hold fence", "not finite", "bump", "retract"}),
    "windows": frozenset({"after"}),
}
"""Traits and kinds that every script of a profile has: what is rare together meets more often there."""

WINDOWED = 1 / 3
"""Share of the worlds of the other profiles that have layers with a window."""


def draw(seed: int, num_steps: int, profile: str = "mixed") -> Drawn:
    """The script of a seed; the same one whenever and wherever it is drawn."""
    rng = Random(f"rung {profile} {seed}")
    focus = FOCUS.get(profile, frozenset())
    traits = frozenset(trait for trait in TRAITS if rng.random() < 0.5 or trait in focus)
    config = replace(PROFILES[profile](rng), audits_halves=seed % AUDITS_HALVES == 0)
    dice = Random(f"rung window {profile} {seed}")  # its own, so that a world's script is the same with a window
    if config.window is None and not config.is_canary and dice.random() < WINDOWED:
        config = replace(config, window=_window_of(dice, config.page_size))
    swarm = Swarm(rng, config, traits=traits)
    for name, kind in KINDS.items():
        if kind.is_disturbance:
            swarm.weights[name] = rng.expovariate(1) if rng.random() < 0.5 or name in focus else 0.0
    arrivals = rng.uniform(0.05, 0.5)
    disturbances = rng.choice((0.1, 0.3) if focus else (0.02, 0.1, 0.3)) if any(swarm.weights.values()) else 0.0
    script = []
    for step in range(num_steps):
        while rng.random() < arrivals:
            arrival = draw_turn if "chat" in swarm.traits and rng.random() < 0.7 else draw_arrival
            script.append(Timed(step, rng.random() < 0.2, arrival(swarm)))
        if "chat" in swarm.traits and rng.random() < 0.1:
            script.append(Timed(step, rng.random() < 0.4, rng.choice(sessions.BETWEEN_TURNS).draw(swarm)))
        if "branch" in focus and rng.random() < 0.2:
            script.append(Timed(step, rng.random() < 0.3, draw_branch(swarm)))
        if rng.random() < disturbances and swarm.num_keys:
            (name,) = rng.choices(list(swarm.weights), list(swarm.weights.values()))
            script.append(Timed(step, rng.random() < KINDS[name].in_flight, KINDS[name].draw(swarm)))
    return Drawn(swarm.config, tuple(script), num_steps)
