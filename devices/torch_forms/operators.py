"""The parts of a decoder layer in plain torch: what every device can run, and what faster forms are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from devices.base import Linear


class TorchOperators:
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
