"""A guess of how much of their allowed output running requests will really use.

Admitting for the worst case leaves the pool idle, admitting for none retracts all the time. The share starts high,
falls a little with every step that needed no retraction, and is set from the facts when one was needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

INITIAL_SHARE = 0.7
MINIMUM_OF_INITIAL = 0.14
STEPS_TO_MINIMUM = 600
OUTPUT_CAP = 4096
"""Output tokens a request is counted with at most: a limit of a million is not a plan."""

RETRACTION_HEADROOM = 20
"""Tokens for each survivor that a retraction makes room for, so that it does not happen again at once."""


class HasOutput(Protocol):
    """What the estimate reads of a request."""

    prompt_len: int
    max_tokens: int

    @property
    def num_output(self) -> int: ...


@dataclass(slots=True)
class OutputEstimate:
    """`share` of a request's remaining allowance is expected to be used.

    Attributes:
        conservativeness: scales the initial share; larger admits less.
    """

    conservativeness: float = 1.0
    share: float = 0.0
    _initial: float = field(init=False)
    _least: float = field(init=False)

    def __post_init__(self) -> None:
        self._initial = min(1.0, INITIAL_SHARE * self.conservativeness)
        self._least = self._initial * MINIMUM_OF_INITIAL
        self.reset()

    def reset(self) -> None:
        """Nothing runs: forget what the last load taught."""
        self.share = self._initial

    def expected_len(self, request: HasOutput) -> int:
        """Tokens, prompt included, that the request will probably have when it ends."""
        known = request.prompt_len + request.num_output
        return known + int(min(request.max_tokens - known, OUTPUT_CAP) * self.share)

    def step_passed(self) -> None:
        """A step needed no retraction."""
        self.share = max(self._least, self.share - (self._initial - self._least) / STEPS_TO_MINIMUM)

    def retracted(self, survivors: list[HasOutput]) -> None:
        """A retraction was needed; the survivors' outputs say what the share should have been."""
        written = sum(request.num_output for request in survivors) + RETRACTION_HEADROOM * len(survivors)
        allowed = sum(request.max_tokens - request.prompt_len for request in survivors)
        self.share = max(self.share, min(1.0, written / (allowed + 1)))
