"""From a step's sampling columns to its tokens: by the device's own sampler, or by the plain form: both alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from devices.sampling import AllowedTokens, Draws, LogitEdits, Sampler
from engine.sampling.logits import edited, masked
from engine.sampling.sampler import Sampled, sample, uniforms
from engine.step import SamplingColumns


def chooser(
    columns: SamplingColumns, edits: LogitEdits | None, allowed: AllowedTokens | None, sampler: Sampler | None
) -> Callable[[torch.Tensor], Sampled]:
    """What chooses a token for each row of logits, float32 [rows, vocab_size], which it leaves as they are.

    Args:
        edits, allowed: what happens to a copy of the logits before, in this order.
        sampler: the device's own, whose columns are staged now, so that they go to it with the rest of the step.
    """
    if sampler is not None:
        numbers = uniforms(columns.seed, columns.position)
        draws = Draws(columns.temperature, columns.top_k, columns.top_p, columns.min_p, numbers, edits, allowed)
        choose = sampler.prepare(draws)
        return lambda logits: Sampled(*choose(logits))

    def chosen(logits: torch.Tensor) -> Sampled:
        logits = logits if edits is None else edited(logits, edits)
        logits = logits if allowed is None else masked(logits, allowed)
        return sample(logits, columns)

    return chosen
