"""What happens to logits beside the choice: penalties and biases before it, logprobs of the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.pages import IntArray
from devices.sampling import AllowedTokens, LogitEdits, Sampler
from engine.step import ScoreColumns, Scores

SCORE_BLOCK = 128
"""Prompt tokens scored at once: a block of logits is as wide as the vocabulary."""

Extras = tuple[torch.Tensor, torch.Tensor]
"""Further tokens that are scored: their row, counted from the part's first, and their id; int64 [extras] each."""


def edited(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Penalties, then biases; a new tensor like `logits`, float32 [rows, vocab_size].

    repetition: divides the logit of a token seen in prompt or output, multiplies it when it is negative
    (CTRL, arXiv:1909.05858). presence, frequency: subtracted once, or for each time, for tokens of the output.
    """
    logits = logits.clone()
    device = logits.device
    if len(edits.row):
        row, token_id = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (edits.row, edits.token_id))
        count = torch.from_numpy(edits.count).to(device)
        repetition, presence, frequency = (
            torch.from_numpy(column).to(device)[row] for column in (edits.repetition, edits.presence, edits.frequency)
        )
        seen = logits[row, token_id]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        logits[row, token_id] = seen - presence * (count > 0) - frequency * count
    if len(edits.bias):
        at = [torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (edits.bias_row, edits.bias_token_id)]
        logits.index_put_(tuple(at), torch.from_numpy(edits.bias).to(device), accumulate=True)
    return logits


def masked(logits: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """-inf for every token that a row may not have; a new tensor like `logits`, float32 [rows, vocab_size].

    A row whose logits are not numbers stays so, also where a forbidden token is the only bad one.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    row = torch.from_numpy(allowed.row.astype(np.int64)).to(device)
    words = torch.from_numpy(allowed.words).to(device)
    bit = torch.arange(32, dtype=torch.int32, device=device)
    is_allowed = ((words[:, :, None] >> bit) & 1).flatten(1)[:, :vocab_size] == 1
    own = logits[row]
    is_number = torch.isfinite(own.amax(-1, keepdim=True))
    kept = torch.where(is_allowed, own, -torch.inf)
    logits = logits.clone()
    logits[row] = torch.where(is_number, kept, torch.nan)
    return logits


@dataclass(frozen=True, slots=True)
class WantedScores:
    """`ScoreColumns` on the device.

    Attributes:
        prompt: by blocks of prompt tokens, the tokens, int64 [block], and `Extras`.
        sampled: rows of scored new tokens, int64 [sampled scores], and `Extras`.
    """

    top_n: int
    prompt: tuple[tuple[torch.Tensor, Extras], ...]
    sampled: tuple[torch.Tensor, Extras]

    @classmethod
    def of(cls, wanted: ScoreColumns, stage: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> WantedScores:
        """`stage`: that of a device."""

        def part(values: IntArray, first: int) -> tuple[torch.Tensor, Extras]:
            inside = (wanted.extra_score >= first) & (wanted.extra_score < first + len(values))
            columns = (values, wanted.extra_score[inside] - first, wanted.extra_token_id[inside])
            staged, row, token_id = (stage(column.astype(np.int64)) for column in columns)
            return staged, (row, token_id)

        blocks = range(0, len(wanted.target), SCORE_BLOCK)
        prompt = tuple(part(wanted.target[first : first + SCORE_BLOCK], first) for first in blocks)
        return cls(wanted.top_n, prompt, part(wanted.sampled_row, len(wanted.target)))


def score(
    logits: torch.Tensor,
    target: torch.Tensor,
    top_n: int,
    extra_row: torch.Tensor,
    extra_token_id: torch.Tensor,
    sampler: Sampler | None = None,
) -> Scores:
    """Logprobs of one token a row, of the best `top_n`, and of further ones.

    Args:
        logits: float32 [rows, vocab_size]; target: int64 [rows]; extra_row, extra_token_id: int64 [extras].
        sampler: the device's own; with it no further matrix as wide as the vocabulary is made.
    """
    if sampler is None:
        logprobs, less = torch.log_softmax(logits, dim=-1), logits.new_zeros(len(logits))
    else:
        logprobs, less = logits, sampler.log_normaliser(logits)
    top, top_ids = torch.topk(logprobs, min(top_n, logits.shape[-1]), dim=-1)
    return Scores(
        chosen=(logprobs.gather(-1, target[:, None])[:, 0] - less).cpu().numpy(),
        top_ids=top_ids.cpu().numpy().astype(np.int32),
        top=(top - less[:, None]).cpu().numpy(),
        extra=(logprobs[extra_row, extra_token_id] - less[extra_row]).cpu().numpy(),
    )


def joined(parts: list[Scores]) -> Scores:
    """Scores one after another."""
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in Scores.__slots__))
