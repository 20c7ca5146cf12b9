"""Chooses one token for each row of a batch of logits.

A choice needs one uniform number, and that number is a pure function of the request's seed and the token's position.
So a request's choices do not depend on what else is in the batch, on chunking, or on a retraction in between.
Order of the transforms: temperature, top-k, top-p over what top-k left, min-p, then the inverse of the cumulative sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from devices.torch_forms.operators import largest
from engine.step import SamplingColumns

Largest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

CANDIDATES = 64
"""Best tokens looked at first for top-k and top-p, enough for most rows."""

MORE = 16
"""A row that needs more candidates gets so many times as many."""

SPAN = 256
"""Tokens whose weights are summed before the cumulative sum: only the span that is hit is summed token by token."""

BLOCKS = (64, 16)
"""Tokens of a block, by whose maxima the best tokens are narrowed down; the first size with blocks to spare is used."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which tokens of each row may be drawn: int32, float32, float32, all [rows]."""

    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]

    def limit(self, vocab_size: int) -> torch.Tensor:
        """Tokens that top-k leaves, int64 [rows]."""
        limits = np.where(self.top_k == -1, vocab_size, np.minimum(self.top_k, vocab_size))
        return torch.from_numpy(limits.astype(np.int64))

    def without_improbable(self, weights: torch.Tensor) -> torch.Tensor:
        """`weights` [rows, n] with those below min-p times the row's largest set to 0."""
        if not self.min_p.any():
            return weights
        least = torch.from_numpy(self.min_p.astype(np.float64))[:, None] * weights.amax(-1, keepdim=True)
        return torch.where(weights >= least, weights, 0.0)

    def of(self, rows: npt.NDArray[np.int64]) -> Cuts:
        return Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen.

    Attributes:
        token_ids: one a row, int64 [rows]; is_finite: whether the row's logits were numbers, bool [rows].
        on_host: rows that were brought to the host from a device, by cause: it has no sampler ("no_sampler"), or that
            sampler does not go as far as the row's top-k ("top_k").
    """

    token_ids: torch.Tensor
    is_finite: torch.Tensor
    on_host: Mapping[str, int] = field(default_factory=dict)


def sample(logits: torch.Tensor, columns: SamplingColumns, find: Largest = largest) -> Sampled:
    """Choose a token for each row of `logits`, float32 [rows, vocab_size]; `find` is a device's `Operators.largest`.

    Greedy rows stay on the device. Rows to draw from are brought to the host: a choice takes double precision, and how
    many candidates it takes shows on the way.
    """
    best, greedy = find(logits)
    is_finite = torch.isfinite(best)
    drawn = np.flatnonzero((columns.temperature > 0) & (columns.top_k != 1))
    if len(drawn) and not logits.is_cpu:
        draw_on_host(logits, columns, drawn, greedy)
        return Sampled(greedy, is_finite, {"no_sampler": len(drawn)})
    token_ids = greedy
    if len(drawn):
        uniform = torch.from_numpy(uniforms(columns.seed[drawn], columns.position[drawn]))
        is_cut = (columns.top_k[drawn] != -1) | (columns.top_p[drawn] < 1)
        for members, choose in ((drawn[~is_cut], _draw), (drawn[is_cut], _draw_filtered)):
            if len(members):
                rows = torch.from_numpy(members) if len(members) < len(logits) else slice(None)
                number = uniform[torch.from_numpy(np.searchsorted(drawn, members))]
                cuts = Cuts(columns.top_k[members], columns.top_p[members], columns.min_p[members])
                # Less the best: a distribution stays the same, and no temperature makes its best token infinite.
                # In place: a fresh matrix as wide as the vocabulary costs more in page faults than in arithmetic.
                scaled = (logits[rows] - best[rows][:, None]).div_(
                    torch.from_numpy(columns.temperature[members])[:, None]
                )
                # A row that is not finite has no distribution; any will do, its token is not used.
                if not is_finite.all():
                    scaled[~is_finite[rows]] = 0.0
                token_ids[rows] = choose(scaled, number, cuts)
    return Sampled(token_ids, is_finite)


def draw_on_host(
    logits: torch.Tensor, columns: SamplingColumns, rows: npt.NDArray[np.int64], into: torch.Tensor
) -> None:
    """Choose for some rows on the host, which waits for their logits, and write the tokens into `into` [all rows]."""
    places = torch.from_numpy(rows).to(logits.device)
    chosen = sample(logits[places].cpu(), columns.of(rows))
    into.index_copy_(0, places, chosen.token_ids.to(logits.device))


def uniforms(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): two rounds of SplitMix64 (Steele et al. 2014), top 53 bits."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seed) ^ position.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw(scaled: torch.Tensor, uniform: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """From the whole distribution, in vocabulary order. Overwrites `scaled`."""
    return _invert(cuts.without_improbable(scaled.exp_()), uniform)


def _draw_filtered(
    scaled: torch.Tensor, uniform: torch.Tensor, cuts: Cuts, num_candidates: int = CANDIDATES
) -> torch.Tensor:
    """From the best tokens, best first. A row is drawn from all of its tokens when it needs more than the candidates,
    and no row because another one does."""
    vocab_size = scaled.shape[-1]
    num_candidates = min(num_candidates, vocab_size)
    limit = cuts.limit(vocab_size)
    # Never empty, also where the request's number is too small for its float32 column.
    nucleus = torch.from_numpy(np.maximum(cuts.top_p.astype(np.float64), 1e-300))[:, None]
    # The best token's logit is 0: no exponential overflows, and float32 is as exact as the logits are.
    whole = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    if num_candidates < vocab_size:
        values, ids = _best(scaled, num_candidates)
    else:
        values, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    in_top_k = torch.arange(num_candidates)[None, :] < limit[:, None]
    mass = torch.where(in_top_k, (values.double() - whole).exp(), 0.0)
    found = mass.sum(-1, keepdim=True)
    # What top-p is measured against: the mass that top-k leaves, or all of it.
    kept = torch.where((limit >= vocab_size)[:, None], 1.0, found)
    share = mass / kept
    # A token belongs to the nucleus while those before it have not reached top-p: the first always does.
    before = share.cumsum(-1) - share
    weights = torch.where(before < nucleus, mass, 0.0)
    chosen = ids.gather(-1, _invert(cuts.without_improbable(weights), uniform)[:, None])[:, 0]
    # Beyond the candidates: the mass of a top-k, or the end of a nucleus of all tokens.
    is_wider = (limit < vocab_size) | ((found < nucleus) | (nucleus >= 1))[:, 0]
    short = torch.nonzero((limit > num_candidates) & is_wider)[:, 0]
    if len(short):
        chosen[short] = _draw_filtered(scaled[short], uniform[short], cuts.of(short.numpy()), MORE * num_candidates)
    return chosen


def _best(scaled: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest of each row, best first, and their ids; [rows, k] each.

    The best k tokens lie in the k blocks with the largest maxima, so that a wide vocabulary is read once only.
    """
    rows, vocab_size = scaled.shape
    block = next((size for size in BLOCKS if 2 * k * size <= vocab_size), None)
    if block is None:
        return torch.topk(scaled, k, dim=-1)
    whole = vocab_size - vocab_size % block
    maxima = scaled[:, :whole].reshape(rows, -1, block).amax(-1)
    chosen = torch.topk(maxima, k, dim=-1).indices
    ids = (chosen[:, :, None] * block + torch.arange(block)).view(rows, -1)
    if whole < vocab_size:
        ids = torch.cat([ids, torch.arange(whole, vocab_size).expand(rows, -1)], dim=-1)
    values, places = torch.topk(scaled.gather(-1, ids), k, dim=-1)
    return values, ids.gather(-1, places)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative weight above `uniform * total`; weights [rows, n], result int64 [rows].

    |  span  |  span  |  the one that is hit: token by token  |  span  |
    """
    rows, n = weights.shape
    spans = (F.pad(weights, (0, -n % SPAN)) if n % SPAN else weights).view(rows, -1, SPAN)
    until = spans.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * until[:, -1:]
    span = torch.searchsorted(until, target, right=True).clamp_(max=until.shape[-1] - 1)
    before = torch.where(span > 0, until.gather(-1, (span - 1).clamp_(min=0)), 0.0)
    inside = spans[torch.arange(rows), span[:, 0]]
    place = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), target - before, right=True)
    token = (span * SPAN + place)[:, 0]
    # Rounding may put the target on the very end of its span: take the last weight up to there that is not zero.
    for row in torch.nonzero((place == SPAN)[:, 0] | (token >= n))[:, 0]:
        token[row] = torch.nonzero(weights[row, : int(span[row, 0] + 1) * SPAN])[-1, 0]
    return token
