"""Sampling where the logits are: the rows' settings go up with the step, one kernel changes logits, one chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from devices.cuda.upload import Uploader
from devices.pages import IntArray
from devices.sampling import AllowedTokens, Draws, LogitEdits

Choice = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TritonSampler:
    """See `devices.sampling.Sampler`. The same number chooses the token that it chooses on the host."""

    max_top_k: int | None = None

    def __init__(self, uploader: Uploader) -> None:
        from devices.cuda.kernels.sample import log_normaliser, sample

        self._uploader, self._sample, self._log_normaliser = uploader, sample, log_normaliser

    def prepare(self, draws: Draws) -> Choice:
        stage = self._uploader.stage
        temperature, top_k = stage(draws.temperature), stage(draws.top_k)
        top_p, min_p, uniform = stage(draws.top_p), stage(draws.min_p), stage(draws.uniform)
        edit = stage_edits(self._uploader, len(draws.top_k), draws.edits, draws.allowed)

        def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = logits if edit is None else edit(logits)
            return self._sample(logits, temperature, top_k, top_p, min_p, uniform)

        return choose

    def log_normaliser(self, logits: torch.Tensor) -> torch.Tensor:
        return self._log_normaliser(logits)


def stage_edits(
    uploader: Uploader, num_rows: int, edits: LogitEdits | None, allowed: AllowedTokens | None
) -> partial[torch.Tensor] | None:
    """What makes a changed copy of the logits of `num_rows` rows once its columns were sent; None changes nothing."""
    if edits is None and allowed is None:
        return None
    from devices.cuda.kernels.edit import Biases, Masks, Penalties, edit_logits

    stage, penalties, biases, masks = uploader.stage, None, None, None
    if edits is not None and len(edits.row):
        starts = _starts(edits.row, num_rows)
        columns = (starts, edits.token_id, edits.count, edits.repetition, edits.presence, edits.frequency)
        penalties = Penalties(*map(stage, columns))
    if edits is not None and len(edits.bias):
        # A token may have a bias and be forbidden as well; the kernel adds one number to it.
        places = edits.bias_row.astype(np.int64) << 32 | edits.bias_token_id
        places, index = np.unique(places, return_inverse=True)
        values = np.bincount(index, weights=edits.bias).astype(np.float32)
        starts = _starts((places >> 32).astype(np.int32), num_rows)
        biases = Biases(stage(starts), stage((places & 0xFFFFFFFF).astype(np.int32)), stage(values))
    if allowed is not None:
        rows = np.full(num_rows, -1, dtype=np.int32)
        rows[allowed.row] = np.arange(len(allowed.row))
        masks = Masks(stage(rows), stage(allowed.words))
    return partial(edit_logits, penalties=penalties, biases=biases, masks=masks)


def _starts(rows: IntArray, num_rows: int) -> IntArray:
    """Where each row's entries begin among those of ascending `rows`, and where the last one's end; int32."""
    return np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.int32)
