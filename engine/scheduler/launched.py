"""A step on its way, as the scheduler remembers it until the result is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from devices.page_pool import Fence
from engine.request import Request
from engine.scheduler.columns import Chunk, Score
from engine.step import StepInput


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What was launched, and the fences that keep its requests' pages.

    Attributes:
        sampled: whom it samples, in order; scored: what its scores will be of.
        unwanted: its requests that ended or were retracted since: nobody wants their part of the result.
    """

    step: StepInput
    chunks: Sequence[Chunk]
    sampled: tuple[Request, ...]
    scored: list[Score]
    fences: dict[str, Fence]
    unwanted: set[Request] = field(default_factory=set)

    def awaits(self, request: Request) -> bool:
        """Whether the request waits for its part of the result."""
        return request not in self.unwanted and any(other is request for other, _, _, _ in self.chunks)

    def first_tokens(self, num_tokens: list[int], token_ids: list[int]) -> dict[Request, int]:
        """The first new token of each request that has one; `num_tokens` of each request, then all of them."""
        firsts, first = {}, 0
        for (request, _, _, _), n in zip(self.chunks, num_tokens, strict=True):
            if n:
                firsts[request] = token_ids[first]
            first += n
        return firsts
