"""Kernels of recurrent layers against the torch forms: results, states, padding, states of the tokens before."""

import pytest
import torch
from kernels.meter import Meter

from devices.cuda.kernels import state as kernel
from devices.torch_forms import state as torch_form

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-2)}[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.parametrize("width", [2, 4])
def test_a_token_through_the_convolution(dtype: torch.dtype, width: int) -> None:
    x, weight, bias = draw(3, 40, dtype=dtype), draw(width, 40, dtype=dtype, seed=1), draw(40, dtype=dtype, seed=2)
    states = [draw(5, width - 1, 40, dtype=dtype, seed=3) for _ in range(2)]
    slots = int32(4, -1, 1)
    got, want = (
        form.conv_decode(x, weight, bias, s, slots) for form, s in zip((kernel, torch_form), states, strict=True)
    )
    assert_near(got, want)
    assert torch.equal(states[0], states[1])
    assert not got[1].any()


@DTYPES
def test_prompts_through_the_convolution_go_on_from_a_state_or_from_nothing(dtype: torch.dtype) -> None:
    """B039: rows of 1 token, of fewer and of more than the window, with and without tokens before."""
    lengths = [1, 2, 40, 0, 33, 3]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    x, weight, bias = (
        draw(sum(lengths), 70, dtype=dtype),
        draw(4, 70, dtype=dtype, seed=1),
        draw(70, dtype=dtype, seed=2),
    )
    states = [draw(8, 3, 70, dtype=dtype, seed=3) for _ in range(2)]
    for s in states:
        s[6] = torch.nan  # a former owner's, of a row that begins
    slots, is_continued = int32(0, 5, 6, 2, 7, -1), torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.int8)
    got = kernel.conv_prefill(x, weight, bias, states[0], slots, starts, is_continued, longest=40)
    want = torch_form.conv_prefill(x, weight, bias, states[1], slots, starts, is_continued)
    assert_near(got, want)
    assert torch.equal(states[0], states[1])
    assert torch.isfinite(got).all()


@DTYPES
def test_the_gated_delta_rule(dtype: torch.dtype, meter: Meter) -> None:
    rows, key_heads, heads, key_dim, value_dim = 3, 2, 4, 16, 64
    q, k = (draw(rows, key_heads, key_dim, dtype=dtype, seed=i) for i in (1, 2))
    v = draw(rows, heads, value_dim, dtype=dtype, seed=3)
    decay, beta = -draw(rows, heads, seed=4).abs(), torch.sigmoid(draw(rows, heads, seed=5))
    states = [draw(4, heads, key_dim, value_dim, seed=6) for _ in range(2)]
    slots = int32(2, -1, 0)
    got = kernel.gated_delta_decode(q, k, v, decay, beta, states[0], slots, 0.25)
    want = torch_form.gated_delta_decode(q, k, v, decay, beta, states[1], slots, 0.25)
    assert_near(got, want)
    assert_near(states[0], states[1])
    ideal = 2 * (2 * heads * key_dim * value_dim * 4)  # two live rows, read and written
    assert meter.read_bytes + meter.written_bytes <= 1.10 * ideal


@DTYPES
def test_a_step_of_mamba2(dtype: torch.dtype, meter: Meter) -> None:
    rows, heads, groups, dim, size = 3, 4, 2, 64, 16
    x, dt = draw(rows, heads, dim, dtype=dtype), draw(rows, heads, dtype=dtype, seed=1)
    dt[0, 0] = 30.0  # where a softplus is its argument
    a, d, dt_bias = -draw(heads, seed=2).abs(), draw(heads, seed=3), draw(heads, seed=4)
    b, c = (draw(rows, groups, size, dtype=dtype, seed=i) for i in (5, 6))
    states = [draw(4, heads, dim, size, seed=7) for _ in range(2)]
    slots = int32(3, -1, 1)
    got = kernel.mamba2_decode(x, dt, a, b, c, d, dt_bias, states[0], slots)
    want = torch_form.mamba2_decode(x, dt, a, b, c, d, dt_bias, states[1], slots)
    assert_near(got, want)
    assert_near(states[0], states[1])
    ideal = 2 * (2 * heads * dim * size * 4)
    assert meter.read_bytes + meter.written_bytes <= 1.15 * ideal
