"""The judge itself: the interpreter computes bf16 and fp8 as torch does, and the meter sees what it must see."""

import pytest
import torch
import triton
import triton.language as tl
from kernels.meter import Meter

LOW = [torch.bfloat16, torch.float8_e4m3fn]


@triton.jit
def arithmetic(a, b, total, product, largest, back, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(total + i, x + y)
    tl.store(product + i, x * y)
    tl.store(largest, tl.max(x, 0))
    tl.store(back + i, x.to(tl.float32).to(x.dtype))


@triton.jit
def round_down_and_multiply(wide, low, a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(low + i, tl.load(wide + i).to(low.dtype.element_ty))
    square = i[:, None] * N + i[None, :]
    tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square)))


@triton.jit
def write_everywhere(x, y, SHIFT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + tl.program_id(0) * N + i + SHIFT, tl.load(x + i))


@triton.jit
def pass_on(x):
    program = tl.program_id(0)
    tl.store(x + program, tl.load(x + program + 1))


@triton.jit
def write_one(x):
    tl.store(x, tl.program_id(0).to(tl.float32))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_arithmetic_of_low_floats_is_torchs(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, generator=draw).to(dtype) for _ in "ab")
    total, product, back = (torch.empty(64, dtype=dtype) for _ in range(3))
    largest = torch.empty(1, dtype=dtype)
    arithmetic[(1,)](a, b, total, product, largest, back, N=64)
    assert torch.equal(total.float(), (a.float() + b.float()).to(dtype).float())
    assert torch.equal(product.float(), (a.float() * b.float()).to(dtype).float())
    assert torch.equal(largest.float(), a.float().max()[None])
    assert torch.equal(back.view(torch.uint8), a.view(torch.uint8))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_casts_round_to_nearest_even_and_dots_multiply_values(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(32, generator=draw)
    wide[:4] = torch.tensor([1.99999, 1.001953125, 1.005859375, -0.0])  # a carry, two ties, a sign
    a, b = (torch.randn(32, 32, generator=draw).to(dtype) for _ in "ab")
    low, c = torch.empty(32, dtype=dtype), torch.empty(32, 32)
    round_down_and_multiply[(1,)](wide, low, a, b, c, N=32)
    assert torch.equal(low.view(torch.uint8), wide.to(dtype).view(torch.uint8))
    torch.testing.assert_close(c, a.float() @ b.float())


def test_an_access_outside_every_argument_is_an_error() -> None:
    x = torch.zeros(16)
    with pytest.raises(Exception, match=r"OutOfBounds.*store of 4 bytes"):
        write_everywhere[(1,)](x, torch.zeros(16), SHIFT=1, N=16)


def test_a_program_that_writes_where_another_reads_or_writes_is_an_error() -> None:
    with pytest.raises(Exception, match=r"Race.*program 1: store"):
        pass_on[(2,)](torch.zeros(4))
    with pytest.raises(Exception, match=r"Race.*program 1: store"):
        write_one[(2,)](torch.zeros(4))


def test_bytes_are_counted_through_masks(meter: Meter) -> None:
    write_everywhere[(3,)](torch.zeros(16), torch.zeros(48), SHIFT=0, N=16)
    assert (meter.read_bytes, meter.written_bytes, meter.launches) == (3 * 64, 3 * 64, 1)
