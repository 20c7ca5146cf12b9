"""RMSNorm of rows, alone or of a sum of two addends that is returned too (arXiv:1910.07467).

    |  rows of program 0  |  rows of program 1  | ...        a program keeps the weight in registers for all its rows

Rows of a view are addressed by two strides: `x` is [outer, inner, size] and row `r` is `[r // inner, r % inner]`. So
the heads inside a wider row are normed where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_PROGRAMS = 528
"""Four for each of 132 multiprocessors: enough to hide latency, few enough that the weight is read seldom."""

TILE = 1024
"""Elements that a program holds at least; short rows are taken several at once."""


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total,
    rows, x_outer, x_inner, residual_row, eps,
    SIZE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """out[r] = n(x[r] [+ residual[r]]) * weight; with ADDS the rounded sum goes to `total` and is what is normed."""
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < SIZE
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & in_row
        place = (row // INNER).to(tl.int64) * x_outer + (row % INNER) * x_inner + column
        value = tl.load(x + place, mask=inside, other=0.0)
        if ADDS:
            other = tl.load(residual + row.to(tl.int64) * residual_row + column, mask=inside, other=0.0)
            value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + row.to(tl.int64) * SIZE + column, value, mask=inside)
        value = value.to(tl.float32)
        norm = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
        normed = value * norm[:, None] * scale
        tl.store(out + row.to(tl.int64) * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    programs: int = MAX_PROGRAMS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm of `x` [..., size] (of `x + residual`, [rows, size]), and the sum where there is one.

    Args:
        programs: how many may share the rows at most.
    """
    x = x if x.stride(-1) == 1 and x.dim() < 4 else x.contiguous()
    size = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.numel() // size if size else 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    if rows:
        block = triton.next_power_of_2(size)
        tile = max(1, min(TILE // block, triton.next_power_of_2(rows)))
        residual_row = 0 if residual is None else _row_stride(residual)
        rms_norm_kernel[(min(programs, triton.cdiv(rows, tile)),)](
            x, x if residual is None else residual, weight, out, out if total is None else total,
            rows, x.stride(0), x.stride(1) if inner > 1 else 0, residual_row, eps,
            SIZE=size, INNER=inner, ROWS=tile, BLOCK=block, ADDS=residual is not None,
            num_warps=max(1, min(16, tile * block // 512)),
        )  # fmt: skip
    return out, total


def _row_stride(x: torch.Tensor) -> int:
    if x.stride(-1) != 1:
        raise ValueError(f"a residual of strides {x.stride()}: its rows must be contiguous")
    return x.stride(0)
