"""The gate of an MLP: `act(gate) * up` of the halves of a row (SwiGLU and GEGLU, arXiv:2002.05202), rounded once."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""`gelu` is the exact one (erf), `gelu_tanh` its approximation (arXiv:1606.08415)."""

BLOCK = 1024


@triton.jit
def gate_kernel(x, out, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """One row and BLOCK of its columns; `x` rows are [gate | up], SIZE each."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3).
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)


def gate_mul(x: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`act(gate) * up` of `x` [rows, 2 * size]: [rows, size]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(size))
        gate_kernel[(rows, triton.cdiv(size, block))](
            x, out, x.stride(0), SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=max(1, min(4, block // 256))
        )
    return out
