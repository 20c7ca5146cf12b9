"""Logprobs of the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.pages import IntArray
from devices.sampling import Sampler
from engine.step import ScoreColumns, Scores

SCORE_BLOCK = 128
"""Prompt tokens scored at once: a block of logits is as wide as the vocabulary."""

Extras = tuple[torch.Tensor, torch.Tensor]
"""Further tokens that are scored: their row, counted from the part's first, and their id; int64 [extras] each."""


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
