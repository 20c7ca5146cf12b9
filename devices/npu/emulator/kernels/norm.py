"""RMS norms, SwiGLU and the format cast."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from devices.npu.emulator.rules import DOCS, require, strictness

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ND = 2
"""ACL_FORMAT_ND: plain strided memory, the only format that the emulator has."""


def check_floats(operator: str, *tensors: torch.Tensor) -> None:
    """One floating type for all, of those that the operator has."""
    if strictness().dtypes:
        dtypes = {tensor.dtype for tensor in tensors}
        require(
            len(dtypes) == 1 and dtypes <= set(FLOATS),
            "dtypes",
            operator,
            f"tensors are {', '.join(sorted(map(str, dtypes)))}; it takes one of float16, bfloat16, float32 for all "
            f"({DOCS})",
        )


def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`input / rms(input) * gamma` over gamma's dimensions, and 1 / rms in fp32 with those dimensions 1."""
    check_floats("npu_rms_norm", input, gamma)
    _check_norm("npu_rms_norm", input, gamma)
    return _rms_norm(input, gamma, epsilon)


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of `x1 + x2` (of the rounded sum, which is the third result), and 1 / rms."""
    operator = "npu_add_rms_norm"
    check_floats(operator, x1, x2, gamma)
    _check_norm(operator, x1, gamma)
    if strictness().shapes:
        require(
            x1.shape == x2.shape, "shapes", operator, f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} differ ({DOCS})"
        )
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _check_norm(operator: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    if strictness().shapes:
        require(
            1 <= gamma.dim() <= x.dim() <= 8 and x.shape[x.dim() - gamma.dim() :] == gamma.shape,
            "shapes",
            operator,
            f"gamma {tuple(gamma.shape)} is not the last dimensions of {tuple(x.shape)} ({DOCS})",
        )


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    rstd = wide.square().mean(dim=tuple(range(-gamma.dim(), 0)), keepdim=True).add_(epsilon).rsqrt_()
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def swiglu(input: torch.Tensor, dim: int) -> torch.Tensor:
    """`silu(a) * b` of the halves a, b of `input` along `dim`."""
    check_floats("npu_swiglu", input)
    if strictness().shapes:
        require(
            1 <= input.dim() <= 8 and input.shape[dim] % 2 == 0,
            "shapes",
            "npu_swiglu",
            f"dimension {dim} of {tuple(input.shape)} has no halves, or there are more than 8 dimensions ({DOCS})",
        )
    gate, up = input.float().chunk(2, dim=dim)
    return (F.silu(gate) * up).to(input.dtype)


def format_cast(
    input: torch.Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None
) -> torch.Tensor:
    """The tensor itself: the emulator's memory is always ND."""
    require(
        acl_format == ND,
        "nd-only",
        "npu_format_cast",
        f"acl_format={acl_format}; the emulator has plain memory only (ACL_FORMAT_ND = {ND})",
    )
    return input
