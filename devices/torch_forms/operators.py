"""The parts of a decoder layer in plain torch: what every device can run, and what faster forms are tested against."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from devices.base import Linear
from devices.torch_forms.composed import ComposedOperators


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `devices.base.Operators.largest`.

    On a CPU numpy's search is 4 to 10 times as fast as torch's. Row by row, because rows that do not lie one behind
    another would be copied as a whole.
    """
    if not logits.is_cpu:
        return torch.max(logits, dim=-1)
    places = np.fromiter(map(np.ndarray.argmax, logits.numpy()), dtype=np.int64, count=len(logits))
    ids = torch.from_numpy(places)
    return logits.gather(-1, ids[:, None])[:, 0], ids


class TorchOperators(ComposedOperators):
    """See `devices.base.Operators`; sums and rotations are computed in fp32 and rounded once."""

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        return lambda x: F.linear(x, weight, bias).to(out_dtype or weight.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return largest(logits)
