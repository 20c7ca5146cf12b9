"""The parts of a decoder layer beside attention, with torch_npu's fused operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from devices.base import Linear
from devices.npu.arguments.layer import add_rms_norm, rms_norm, rotary_mul, swiglu
from devices.torch_forms.composed import ComposedOperators


class NpuOperators(ComposedOperators):
    """See `devices.base.Operators`. Norms and gates are the operators' own precision; cosines and sines are rounded to
    the dtype of what they turn, for the operator takes one dtype."""

    def __init__(self, npu: Any) -> None:
        """`npu`: what has torch_npu's functions."""
        self._npu = npu
        self._turns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if out_dtype is None or out_dtype == weight.dtype:
            return lambda x: F.linear(x, weight, bias)
        return lambda x: F.linear(x, weight, bias).to(out_dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        call = rms_norm(x, weight, eps)
        out: torch.Tensor = self._npu.npu_rms_norm(*call.args, **call.kwargs)[0]
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = add_rms_norm(x, residual, weight, eps)
        normed, _, total = self._npu.npu_add_rms_norm(*call.args, **call.kwargs)
        return normed, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        call = swiglu(gate_up)
        out: torch.Tensor = self._npu.npu_swiglu(*call.args, **call.kwargs)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide_cos, wide_sin = self._wide(cos, sin, x.dtype)
        call = rotary_mul(x.unsqueeze(0), wide_cos, wide_sin)
        out: torch.Tensor = self._npu.npu_rotary_mul(*call.args, **call.kwargs)
        return out[0]

    def _wide(self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Both halves of a head, [1, tokens, 1, dim]; made once a step, for all layers turn by the same tensors."""
        if self._turns is None or self._turns[0] is not cos or self._turns[1].dtype != dtype:
            wide_cos, wide_sin = (torch.cat([part, part], dim=-1).to(dtype)[None, :, None] for part in (cos, sin))
            self._turns = (cos, wide_cos, wide_sin)
        return self._turns[1], self._turns[2]

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.max(logits, dim=-1)
