"""Norms, turns and gates against the torch forms, with views, partial blocks and rows that are not numbers."""

import pytest
import torch
import torch.nn.functional as F
from kernels.meter import Meter

from devices.cuda.kernels.gate import gate_mul
from devices.cuda.kernels.norm import rms_norm
from devices.cuda.kernels.rope import rotate
from devices.torch_forms.operators import TorchOperators

# Infinities and NaN are meant here; the interpreter is numpy, which warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ORACLE = TorchOperators()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the last bit of the dtype."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    rtol, atol = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (8e-3, 2e-3)}[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (5, 48), (19, 300), (3, 2050)])
def test_norms_of_rows_and_of_sums(dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual, weight = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype, seed=1), draw(size, dtype=dtype)
    normed, nothing = rms_norm(x, weight, 1e-5)
    assert nothing is None
    assert_near(normed, ORACLE.rms_norm(x, weight, 1e-5))
    for got, want in zip(
        rms_norm(x, weight, 1e-5, residual), ORACLE.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert got is not None
        assert_near(got, want)


@DTYPES
def test_a_norm_of_heads_in_a_wider_row(dtype: torch.dtype) -> None:
    heads = draw(6, 5, 24, dtype=dtype)[:, 1:4]
    weight = draw(24, dtype=dtype, seed=1)
    assert_near(rms_norm(heads, weight, 1e-6)[0], ORACLE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("adds", [False, True])
def test_few_programs_take_all_rows_and_move_few_more_bytes_than_they_must(meter: Meter, adds: bool) -> None:
    rows, size = 64, 512
    x, residual = draw(rows, size, dtype=torch.bfloat16), draw(rows, size, dtype=torch.bfloat16, seed=1)
    weight = draw(size, dtype=torch.bfloat16)
    normed, _ = rms_norm(x, weight, 1e-5, residual if adds else None, programs=3)
    assert_near(normed, ORACLE.rms_norm(x + residual if adds else x, weight, 1e-5))
    ideal = 2 * (rows * size * (4 if adds else 2) + size)
    assert meter.read_bytes + meter.written_bytes <= 1.10 * ideal


@DTYPES
@pytest.mark.parametrize(("dim", "heads"), [(8, 6), (96, 3), (64, 1)])
def test_rotation_of_heads_in_a_wider_row(dtype: torch.dtype, dim: int, heads: int) -> None:
    x = draw(5, (heads + 2) * dim, dtype=dtype)[:, : heads * dim].view(5, heads, dim)
    angles = draw(5, dim // 2, dtype=torch.float32, seed=1)
    assert_near(rotate(x, angles.cos(), angles.sin()), ORACLE.rotate(x, angles.cos(), angles.sin()))


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_part_of_each_head_copies_the_rest(dtype: torch.dtype, interleaved: bool) -> None:
    x = draw(4, 3, 20, dtype=dtype)
    angles = draw(4, 6, dtype=torch.float32, seed=1)
    got = rotate(x, angles.cos(), angles.sin(), interleaved)
    order = torch.arange(12).view(6, 2).T.reshape(-1) if interleaved else torch.arange(12)
    turned = ORACLE.rotate(x[:, :, order], angles.cos(), angles.sin())
    assert_near(got[:, :, order], turned)
    assert torch.equal(got[:, :, 12:], x[:, :, 12:])


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 37), (2, 1500)])
def test_gates(dtype: torch.dtype, rows: int, size: int) -> None:
    x = draw(rows, 2 * size, dtype=dtype) * 3
    gate, up = x.float().chunk(2, dim=-1)
    assert_near(gate_mul(x), (F.silu(gate) * up).to(dtype))
    assert_near(gate_mul(x, "gelu"), (F.gelu(gate) * up).to(dtype))
    assert_near(gate_mul(x, "gelu_tanh"), (F.gelu(gate, approximate="tanh") * up).to(dtype))


def test_sums_of_fp16_rows_near_its_largest_number_are_fp32() -> None:
    """B078: squares and products that fp16 cannot hold, results that it can."""
    x, weight = (draw(5, 96, dtype=torch.float32) * 1e4).half(), draw(96, dtype=torch.float16, seed=1)
    wide = x.double() / x.double().square().mean(-1, keepdim=True).sqrt() * weight.double()
    half = x / 2
    for got in (rms_norm(x, weight, 1e-5)[0], rms_norm(half, weight, 1e-5, half)[0]):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.double(), wide, rtol=2e-3, atol=1e-3)
    gate, up = x, draw(5, 96, dtype=torch.float16, seed=2)
    want = gate.double() * torch.sigmoid(gate.double()) * up.double()
    torch.testing.assert_close(gate_mul(torch.cat([gate, up], 1)).double(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(value: float) -> None:
    x = draw(7, 64, dtype=torch.float32)
    x[3, 9] = value
    normed, total = rms_norm(x, draw(64, dtype=torch.float32), 1e-5, torch.ones_like(x))
    assert total is not None
    for result in (normed, total, gate_mul(x)):
        assert not torch.isfinite(result[3]).all()
        assert torch.isfinite(result[[0, 1, 2, 4, 5, 6]]).all()
