"""What an event and a kind of event are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from engine.sim.world import World, WorldConfig


class Event(Protocol):
    """Something that happens between two halves of a step."""

    def apply(self, world: World) -> str:
        """Do it and check what it promises; returns one word for the trace.

        Raises:
            BrokenPromise: it did not have the result that it must have.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timed:
    """An event in a script: before `step`, or while that step is in flight."""

    step: int
    in_flight: bool
    event: Event


@dataclass(slots=True)
class Swarm:
    """What the drawing of a script knows: the dice, the world it is for, and which arrivals it made.

    Attributes:
        num_keys: arrivals so far; their keys are `0 .. num_keys - 1`.
        weights: of each kind of event, 0 for those that do not exist in this script.
        last_prompt: of the latest arrival: people ask again.
        branch_keys: arrivals of the branching session.
        traits: which sides of an arrival exist in this script ("stop", "n", "sampled", ...).
    """

    rng: Random
    config: WorldConfig
    weights: dict[str, float] = field(default_factory=dict)
    traits: frozenset[str] = frozenset()
    num_keys: int = 0
    last_prompt: object = None
    branch_keys: list[int] = field(default_factory=list)

    def recent_key(self) -> int:
        """An arrival, late ones more often: most of the early ones are finished."""
        return max(0, self.num_keys - 1 - int(self.rng.expovariate(0.2)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event.

    Attributes:
        draw: makes one; None when the world it is drawn for cannot have it.
        in_flight: share of the events that happen while a step is in flight.
        is_disturbance: drawn beside the arrivals, in swarms that have it; arrivals are in every swarm.
    """

    name: str
    draw: Callable[[Swarm], Event]
    is_disturbance: bool = True
    in_flight: float = 0.4
