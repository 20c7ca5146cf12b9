"""Sampling where the logits are: the columns of a step go up in one copy, one kernel chooses for all rows."""

from __future__ import annotations

import numpy as np
import torch

from devices.base import Draws
from devices.cuda.upload import Uploader


class TritonSampler:
    """See `devices.base.Sampler`. The same number chooses the token that it chooses on the host."""

    max_top_k: int | None = None

    def __init__(self, uploader: Uploader) -> None:
        from devices.cuda.kernels.sample import log_normaliser, sample

        self._uploader, self._sample, self._log_normaliser = uploader, sample, log_normaliser

    def sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
        bits = [np.ascontiguousarray(column).view(np.int32) for column in columns]
        temperature, top_k, top_p, min_p, uniform = self._uploader.upload(bits).columns
        temperature, top_p, min_p = (part.view(torch.float32) for part in (temperature, top_p, min_p))
        return self._sample(logits, temperature, top_k, top_p, min_p, uniform.view(torch.float64))

    def log_normaliser(self, logits: torch.Tensor) -> torch.Tensor:
        return self._log_normaliser(logits)
