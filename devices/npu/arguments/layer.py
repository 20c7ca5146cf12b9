"""Arguments of the operators of a decoder layer beside attention: norms, rotation, the gate of an MLP."""

from __future__ import annotations

import torch

from devices.npu.arguments.contract import (
    FLOAT_DTYPES,
    Call,
    ContractViolation,
    check_dtype,
    check_not_empty,
    check_one_device,
    check_same_dtype,
)

MAX_ROTATED_HEADS = 1000
MAX_ROTATED_DIM = 896


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> Call:
    """`npu_rms_norm`: x [..., size], gamma [size]."""
    operator = "npu_rms_norm"
    _check_norm(operator, x, gamma)
    return Call((x, gamma), {"epsilon": eps})


def add_rms_norm(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, eps: float) -> Call:
    """`npu_add_rms_norm`: the norm of `x1 + x2`, both [..., size]; gives (norm, 1 / rms, sum)."""
    operator = "npu_add_rms_norm"
    _check_norm(operator, x1, gamma)
    check_same_dtype(operator, x1=x1, x2=x2)
    check_one_device(operator, x1=x1, x2=x2)
    if x1.shape != x2.shape:
        rule = "x1 and x2 have one shape; they are not broadcast"
        raise ContractViolation(operator, rule, f"{tuple(x1.shape)} and {tuple(x2.shape)}")
    return Call((x1, x2, gamma), {"epsilon": eps})


def _check_norm(operator: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    check_same_dtype(operator, x=x, gamma=gamma)
    check_one_device(operator, x=x, gamma=gamma)
    check_not_empty(operator, x=x)
    if not 2 <= x.dim() <= 8:
        raise ContractViolation(operator, "x has 2 to 8 dimensions", f"shape {tuple(x.shape)}")
    if gamma.shape != x.shape[-1:]:
        rule = f"gamma is the last dimension of x, [{x.shape[-1]}]"
        raise ContractViolation(operator, rule, f"shape {tuple(gamma.shape)}")


def rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Call:
    """`npu_rotary_mul`, mode half, layout BSND: x [1, tokens, heads, dim]; cos, sin [1, tokens, 1, dim]."""
    operator = "npu_rotary_mul"
    check_dtype(operator, "x", x, FLOAT_DTYPES)
    check_same_dtype(operator, x=x, cos=cos, sin=sin)
    check_one_device(operator, x=x, cos=cos, sin=sin)
    if x.dim() != 4:
        raise ContractViolation(operator, "x has 4 dimensions", f"shape {tuple(x.shape)}")
    if x.shape[-1] % 2 or x.shape[-1] >= MAX_ROTATED_DIM:
        raise ContractViolation(operator, f"the head size is even and below {MAX_ROTATED_DIM}", x.shape[-1])
    if x.shape[0] >= MAX_ROTATED_HEADS or x.shape[2] >= MAX_ROTATED_HEADS:
        rule = f"batch and heads are below {MAX_ROTATED_HEADS}"
        raise ContractViolation(operator, rule, f"{x.shape[0]} and {x.shape[2]}")
    want = (x.shape[0], x.shape[1], 1, x.shape[3])
    if tuple(cos.shape) != want or tuple(sin.shape) != want:
        rule = f"cosines and sines are [batch, tokens, 1, dim] = {list(want)}"
        raise ContractViolation(operator, rule, f"{tuple(cos.shape)} and {tuple(sin.shape)}")
    return Call((x, cos, sin), {"rotary_mode": "half"})


def swiglu(gate_up: torch.Tensor) -> Call:
    """`npu_swiglu`: gate_up [..., 2 * size]; the first half is the gate."""
    operator = "npu_swiglu"
    check_dtype(operator, "x", gate_up, FLOAT_DTYPES)
    if not 1 <= gate_up.dim() <= 8 or gate_up.shape[-1] % 2:
        raise ContractViolation(operator, "x has 1 to 8 dimensions, the last even", f"shape {tuple(gate_up.shape)}")
    return Call((gate_up,), {"dim": -1})
