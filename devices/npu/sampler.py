"""Draws tokens on an NPU: `npu_top_k_top_p` cuts, plain torch does the rest, and the host waits for nothing.

    logits - best, / temperature  ->  cut to -inf by the operator  ->  exp  ->  min-p  ->  the token at the row's number

What may be drawn, and how probable it is, is what `engine.sampling.sampler` says; the draw goes through the vocabulary
in its order, also where that one goes best first, because the operator leaves the tokens where they are. So the same
number chooses another token of the same distribution there, and of logits that are equal at the end of a cut others
may stay. Everything is float32, since the vector cores have no 64-bit floats: weights are summed by spans first, so
that a sum over a large vocabulary rounds little, and a share of mass below 2**-24 is not told from none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from devices.npu.arguments.sampling import MAX_TOP_K, TopKTopP
from devices.sampling import Draws
from devices.torch_forms.logits import changed

SPAN = 256
"""Tokens whose weights are summed before the cumulative sum: only the span that is hit is summed token by token."""

LARGEST_UNIFORM = 1.0 - 2.0**-23
"""Of any sum in float32 this share is less than the sum."""

SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""A smaller number is 0 for vector cores, and the best token would be 0 / 0."""


class NpuSampler:
    """See `devices.sampling.Sampler`."""

    max_top_k: int | None = MAX_TOP_K

    def __init__(self, npu: Any) -> None:
        """`npu`: what has torch_npu's functions."""
        self._npu = npu

    def prepare(self, draws: Draws) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return lambda logits: self._sample(changed(logits, draws.edits, draws.allowed), draws)

    def _sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        vocab_size = logits.shape[-1]
        best, tokens = logits.max(dim=-1)
        is_finite = torch.isfinite(best)
        is_drawn = (draws.temperature > 0) & (draws.top_k != 1)
        by_k = is_drawn & (draws.top_k != -1) & (draws.top_k < vocab_size)
        by_p = is_drawn & ~by_k & (draws.top_p < 1)
        for members in (by_k, by_p, is_drawn & ~by_k & ~by_p):
            rows = np.flatnonzero(members)
            if len(rows):
                places = torch.from_numpy(rows).to(logits.device)
                scaled = logits.index_select(0, places).sub_(best.index_select(0, places)[:, None])
                # A row that is not numbers has no distribution, and the operator does not say what it does with NaN.
                number = is_finite.index_select(0, places)[:, None]
                drawn = self._draw(scaled, number, draws.of(rows), bool(by_k[rows[0]]))
                tokens.index_copy_(0, places, drawn)
        return tokens, is_finite

    def log_normaliser(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(logits, dim=-1)

    def _draw(self, scaled: torch.Tensor, is_finite: torch.Tensor, draws: Draws, cuts_top_k: bool) -> torch.Tensor:
        """int64 [rows]; `scaled` [rows, vocab_size] is overwritten, is_finite: [rows, 1]."""
        temperature, top_p, min_p, uniform = self._columns(draws, scaled.device)
        scaled = torch.where(is_finite, scaled.div_(temperature[:, None]), 0.0)
        cuts_top_p = bool((draws.top_p < 1).any())
        if cuts_top_k or cuts_top_p:
            cut = TopKTopP(draws.top_k if cuts_top_k else None, draws.top_p if cuts_top_p else None)
            top_k = torch.from_numpy(draws.top_k).to(scaled.device) if cuts_top_k else None
            call = cut.of(scaled, top_p if cuts_top_p else None, top_k)
            scaled = self._npu.npu_top_k_top_p(*call.args, **call.kwargs)
        weights = scaled.exp()
        if draws.min_p.any():
            weights = torch.where(weights >= min_p[:, None], weights, 0.0)  # the best one's is 1
        return _invert(weights, uniform)

    def _columns(self, draws: Draws, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Temperature, top-p, min-p and the row's number, float32 [rows] each, in one copy."""
        host = np.stack(
            [
                np.maximum(draws.temperature, SMALLEST_TEMPERATURE),
                draws.top_p,
                draws.min_p,
                _as_float32(draws.uniform),
            ]
        ).astype(np.float32)
        return torch.from_numpy(host).to(device).unbind()


def _as_float32(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return np.minimum(uniform.astype(np.float32), np.float32(LARGEST_UNIFORM))


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative weight above `uniform * total`; weights [rows, n], result int64 [rows].

    |  span  |  span  |  the one that is hit: token by token  |  span  |

    A place without weight is never given, also where a parallel sum is not quite monotone.
    """
    n = weights.shape[-1]
    spans = (F.pad(weights, (0, -n % SPAN)) if n % SPAN else weights).view(len(weights), -1, SPAN)
    sums = spans.sum(-1)
    until = sums.cumsum(-1)
    target = uniform[:, None] * until[:, -1:]
    span = _first_above(until, sums, target)
    before = (until - sums).gather(-1, span)
    inside = spans.gather(1, span[:, :, None].expand(-1, -1, SPAN))[:, 0]
    place = _first_above(inside.cumsum(-1), inside, target - before)
    return (span * SPAN + place)[:, 0]


def _first_above(until: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [rows, 1]: the first place with weight where `until` is above the target, else the last one with weight."""
    n = until.shape[-1]
    lane = torch.arange(n, dtype=torch.int32, device=until.device)
    first = torch.where((until > target) & (weights > 0), lane, n).amin(-1, keepdim=True)
    last = torch.where(weights > 0, lane, 0).amax(-1, keepdim=True)
    return torch.where(first == n, last, first).long()
