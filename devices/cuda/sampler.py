"""Sampling where the logits are: the columns of a step go up in one copy, one kernel chooses for all rows."""

from __future__ import annotations

import numpy as np
import torch

from devices.base import Draws
from devices.cuda.kernels.sample import log_normaliser, sample
from devices.cuda.upload import Uploader


class TritonSampler:
    """See `devices.base.Sampler`."""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader

    def sample(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        columns = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
        bits = [np.ascontiguousarray(column).view(np.int32) for column in columns]
        temperature, top_k, top_p, min_p, uniform = self._uploader.upload(bits).columns
        as_float = (part.view(torch.float32) for part in (temperature, top_p, min_p))
        temperature, top_p, min_p = as_float
        return sample(logits, temperature, top_k, top_p, min_p, uniform.view(torch.float64))

    def log_normaliser(self, logits: torch.Tensor) -> torch.Tensor:
        return log_normaliser(logits)
