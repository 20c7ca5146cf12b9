"""`devices.base.Operators` with the Triton kernels; products are cuBLAS's, through torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from devices.base import Linear
from devices.torch_forms.composed import ComposedOperators


class TritonOperators(ComposedOperators):
    """See `devices.base.Operators`; sums, gates and turns are computed in fp32 and rounded once."""

    def __init__(self) -> None:
        from devices.cuda.kernels.gate import gate_mul
        from devices.cuda.kernels.norm import rms_norm
        from devices.cuda.kernels.rope import rotate

        self._gate_mul, self._rms_norm, self._rotate = gate_mul, rms_norm, rotate

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if out_dtype in (None, weight.dtype):
            return lambda x: F.linear(x, weight, bias)
        if weight.is_cuda and bias is None:  # the product is summed in fp32 and need not be rounded on its way out
            return lambda x: torch.mm(x, weight.T, out_dtype=out_dtype)
        return lambda x: F.linear(x, weight, bias).to(out_dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rms_norm(x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._rms_norm(x, weight, eps, residual)
        assert total is not None
        return normed, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate_mul(gate_up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._rotate(x, cos, sin)

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.max(logits, dim=-1)
