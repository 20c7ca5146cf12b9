"""Neighbours of a layer in one call of the CPU's library give the bits that they give one after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from devices.base import Linear
from devices.cpu.kernels.build import KernelsUnavailable, load_kernels
from devices.cpu.kernels.linear import KernelLinear
from devices.cpu.kernels.operators import MAX_KERNEL_ROWS, KernelOperators
from devices.cpu.kernels.packed import KernelPackedWeight
from devices.quantized import quantize
from devices.torch_forms.composed import ComposedOperators

try:
    LIBRARY = load_kernels()
except KernelsUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

HIDDEN, WIDE, EPS = 64, 96, 1e-5
BF16, F32 = torch.bfloat16, torch.float32
OPERATORS = {fast: KernelOperators(LIBRARY, has_fast_bf16=fast) for fast in (False, True)}


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return OPERATORS[False].linear(weight, bias)


def panels(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return OPERATORS[True].linear(weight, bias)


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return KernelPackedWeight(LIBRARY, quantize(weight.float(), 8), weight.dtype).linear(bias)


FORMS: list[tuple[Callable[[torch.Tensor, torch.Tensor | None], Linear], torch.dtype]] = [
    (plain, F32),
    (plain, BF16),
    (panels, BF16),
    (packed, F32),
    (packed, BF16),
]


@pytest.mark.parametrize("rows", [0, 1, 5, MAX_KERNEL_ROWS + 6])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=[f"{form.__name__} {dtype}" for form, dtype in FORMS])
def test_together_is_one_after_another(
    form: Callable[[torch.Tensor, torch.Tensor | None], Linear], dtype: torch.dtype, has_bias: bool, rows: int
) -> None:
    operators = OPERATORS[form is panels]

    def linear(outs: int, ins: int, seed: int) -> Linear:
        bias = draw(outs, dtype=dtype, seed=seed + 100) if has_bias else None
        return form(draw(outs, ins, dtype=dtype, seed=seed), bias)

    qkv, out = linear(WIDE, HIDDEN, 1), linear(HIDDEN, WIDE, 2)
    gate_up, down = linear(2 * WIDE, HIDDEN, 3), linear(HIDDEN, WIDE, 4)
    x, residual = (draw(rows, 2 * HIDDEN, dtype=dtype, seed=seed)[:, :HIDDEN] for seed in (5, 6))
    wide, norm = draw(rows, WIDE + 8, dtype=dtype, seed=7)[:, 8:], draw(HIDDEN, dtype=dtype, seed=8)
    alone = ComposedOperators
    pairs = [
        (operators.norm_linear(x, residual, norm, EPS, qkv), alone.norm_linear(operators, x, residual, norm, EPS, qkv)),
        (
            operators.linear_norm(wide, residual, out, norm, EPS),
            alone.linear_norm(operators, wide, residual, out, norm, EPS),
        ),
        ((operators.gated_mlp(x, gate_up, down),), (alone.gated_mlp(operators, x, gate_up, down),)),
    ]
    for got, want in pairs:
        for one, other in zip(got, want, strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, other)


def test_few_rows_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = panels(draw(HIDDEN, HIDDEN, dtype=BF16, seed=0), None)
    x, norm = draw(2, HIDDEN, dtype=BF16, seed=1), draw(HIDDEN, dtype=BF16, seed=2)
    for owner, name in ((KernelLinear, "__call__"), (KernelOperators, "add_rms_norm"), (KernelOperators, "silu_mul")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a call of its own"))
    OPERATORS[True].norm_linear(x, x, norm, EPS, linear)
    OPERATORS[True].linear_norm(x, x, linear, norm, EPS)
    OPERATORS[True].gated_mlp(x, panels(draw(2 * HIDDEN, HIDDEN, dtype=BF16, seed=3), None), linear)


def test_an_input_of_another_size_is_refused() -> None:
    linear = panels(draw(HIDDEN, HIDDEN, dtype=BF16, seed=0), None)
    x, norm = draw(2, WIDE, dtype=BF16, seed=1), draw(WIDE, dtype=BF16, seed=2)
    with pytest.raises(ValueError, match="does not fit"):
        OPERATORS[True].norm_linear(x, x, norm, EPS, linear)
    with pytest.raises(ValueError, match="does not fit"):
        OPERATORS[True].linear_norm(x, x, linear, norm, EPS)
    with pytest.raises(ValueError, match="does not fit"):
        OPERATORS[True].gated_mlp(x, linear, linear)
