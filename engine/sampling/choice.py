"""From a step's sampling columns to its tokens: by the device's own sampler, or by the plain form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from devices.sampling import AllowedTokens, Draws, LogitEdits, Sampler
from devices.torch_forms.logits import changed
from devices.torch_forms.operators import largest
from engine.sampling.sampler import Largest, Sampled, draw_on_host, sample, uniforms
from engine.step import SamplingColumns

Choice = Callable[[torch.Tensor], Sampled]
"""Chooses a token for each row of logits, float32 [rows, vocab_size], which it leaves as they are."""


def chooser(
    columns: SamplingColumns,
    edits: LogitEdits | None,
    allowed: AllowedTokens | None,
    sampler: Sampler | None,
    vocab_size: int,
    find: Largest = largest,
) -> Choice:
    """Args beside the columns:

    edits, allowed: what happens to a copy of the logits before, in this order.
    find: the device's `Operators.largest`, for the plain form.
    sampler: the device's own, whose columns are staged now, so that they go to it with the rest of the step.
    """
    if sampler is None:
        return lambda logits: sample(changed(logits, edits, allowed), columns, find)
    numbers = uniforms(columns.seed, columns.position)
    draws = Draws(columns.temperature, columns.top_k, columns.top_p, columns.min_p, numbers, edits, allowed)
    most = vocab_size if sampler.max_top_k is None else sampler.max_top_k
    is_beyond = (draws.temperature > 0) & (draws.top_k > most) & (draws.top_k < vocab_size)
    if not is_beyond.any():
        choose = sampler.prepare(draws)
        return lambda logits: Sampled(*choose(logits))
    # Which way a row goes is its own affair: the device is given these rows as greedy ones.
    rest = sampler.prepare(replace(draws, temperature=np.where(is_beyond, np.float32(0.0), draws.temperature)))
    rows = np.flatnonzero(is_beyond)

    def choose_both(logits: torch.Tensor) -> Sampled:
        tokens, is_finite = rest(logits)
        draw_on_host(changed(logits, edits, allowed), columns, rows, tokens)
        return Sampled(tokens, is_finite, {"top_k": len(rows)})

    return choose_both
