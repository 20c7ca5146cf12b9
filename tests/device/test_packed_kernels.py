"""Products with weights of few bits, on every path that this processor has, against arithmetic in float64.

The oracle rounds activations as the kernel says it does and multiplies the dequantised weight with them; what is left
is the rounding of fp32 sums. A second bound holds without it: a half step of each activation.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_paths import PATHS, compiled

from devices.cpu.kernels import build
from devices.cpu.kernels.packed import KernelPackedWeight
from devices.quantized import QuantizedWeight, quantize

if shutil.which(build.COMPILER) is None:
    pytest.skip(f"there is no {build.COMPILER}", allow_module_level=True)

FORMS = ["Q8_0", "Q4_0", "Q4_1"]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (3, 32), (16, 33), (37, 100), (50, 576), (130, 64), (5, 1500)]


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("plain", tmp_path_factory.mktemp("plain"), ["packed"])


@pytest.fixture(scope="module", params=PATHS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(request.param, tmp_path_factory.mktemp("packed"), ["packed"])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def weight_of(form: str, outs: int, ins: int) -> QuantizedWeight:
    """A random weight; that of a form without minima is one with them taken away."""
    made = quantize(draw(outs, ins, seed=outs), 8 if form == "Q8_0" else 4)
    return made if form != "Q4_0" else QuantizedWeight(made.shape, 4, made.quants, made.scales)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of activations, and half of its steps; both float64 [rows, in]."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % 32)).reshape(x.shape[0], -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    quants = torch.where(step > 0, blocks / step, 0).round()
    both = (quants.double() * step, (step / 2).expand_as(blocks).double())
    return tuple(side.flatten(1)[:, : x.shape[1]] for side in both)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_every_shape(library: ctypes.CDLL, form: str, dtype: torch.dtype) -> None:
    for outs, ins in SHAPES:
        weight = weight_of(form, outs, ins)
        bias = draw(outs, seed=2, dtype=dtype) if outs % 2 else None
        linear = KernelPackedWeight(library, weight, dtype).linear(bias, torch.float32)
        dense = weight.dequantized(torch.float32).double()
        assert linear(draw(0, ins, dtype=dtype)).shape == (0, outs)
        for rows in (1, 2, 3, 7, 8, 33, 70):
            x = draw(rows, ins, seed=rows, dtype=dtype)
            seen, half_step = rounded(x)
            got = linear(x).double() - (0 if bias is None else bias.double())
            if dtype == torch.float32:  # many of bf16's quotients are ties, which fp32 and float64 break as they like
                assert (got - seen @ dense.T).norm() <= 1e-3 * (seen @ dense.T).norm() + 1e-9
            assert ((got - x.double() @ dense.T).abs() <= half_step @ dense.abs().T * 1.001 + 1e-4).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(library: ctypes.CDLL, form: str, dtype: torch.dtype) -> None:
    linear = KernelPackedWeight(library, weight_of(form, 67, 611), dtype).linear()
    x = draw(600, 611, seed=1, dtype=dtype)
    whole = linear(x)
    torch.set_num_threads(1)
    for rows in (1, 2, 3, 4, 7, 15, 32, 33, 44, 500):  # tiles of every size
        assert torch.equal(linear(x[5 : 5 + rows]), whole[5 : 5 + rows])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding(library: ctypes.CDLL, form: str) -> None:
    weight = weight_of(form, 37, 100)
    ids = torch.tensor([36, 0, 5, 5, 17])
    for dtype in DTYPES:
        held = KernelPackedWeight(library, weight, dtype)
        torch.testing.assert_close(held.rows(ids), weight.dequantized(dtype)[ids], rtol=1e-2, atol=1e-6)
        assert held.rows(ids[:0]).shape == (0, 100)
        for wrong in (-1, 37):
            with pytest.raises(IndexError, match="of a weight with 37"):
                held.rows(torch.tensor([0, wrong]))
    exact = KernelPackedWeight(library, weight, torch.float32).rows(ids)
    torch.testing.assert_close(exact, weight.dequantized(torch.float32)[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_every_size_are_read_right(library: ctypes.CDLL, form: str) -> None:
    weight = weight_of(form, 16, 64)
    sizes = torch.tensor([2.0**-24, 3e-6, 6.1e-5, 6.2e-5, -1e-3, 1.0, 1024.0, 65504.0]).half().repeat(2)
    weight.scales.copy_(sizes[:, None].expand(16, 2))
    held = KernelPackedWeight(library, weight, torch.float32)
    want = weight.dequantized(torch.float32)
    torch.testing.assert_close(held.rows(torch.arange(16)), want, rtol=1e-6, atol=0)
    one = torch.eye(64)[:3]  # a single element is rounded to itself
    torch.testing.assert_close(held.linear()(one), one @ want.T, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_in_its_row(library: ctypes.CDLL, value: float) -> None:
    x = draw(7, 64)
    x[3, 9] = value
    for form in FORMS:
        got = KernelPackedWeight(library, weight_of(form, 33, 64), torch.float32).linear()(x)
        assert not torch.isfinite(got[3]).any()
        assert torch.isfinite(got[[0, 1, 2, 4, 5, 6]]).all()


def test_rows_of_nothing_and_of_almost_nothing(library: ctypes.CDLL) -> None:
    sizes = torch.tensor([0.0, 1e-38, 1e-20])
    for form in FORMS:
        weight = weight_of(form, 33, 64)
        got = KernelPackedWeight(library, weight, torch.float32).linear()(sizes[:, None].expand(3, 64).contiguous())
        want = weight.dequantized(torch.float32).sum(1)
        assert not got[0].any()
        assert (got[1].abs() <= 1e-30).all()
        torch.testing.assert_close(got[2] * 1e20, want, rtol=1e-4, atol=1e-3)


def test_views_are_taken_and_what_does_not_fit_is_refused(library: ctypes.CDLL) -> None:
    linear = KernelPackedWeight(library, weight_of("Q4_1", 12, 40), torch.float32).linear()
    x = draw(9, 120)
    for view in (x[:, 40:80], x[::2, 3:43], draw(40, 9).T):
        assert torch.equal(linear(view), linear(view.clone(memory_format=torch.contiguous_format)))
    for wrong in (draw(2, 40, dtype=torch.bfloat16), draw(2, 39)):
        with pytest.raises(ValueError, match="does not fit"):
            linear(wrong)


def test_every_path_computes_the_same(library: ctypes.CDLL, plain: ctypes.CDLL) -> None:
    x = draw(19, 200)
    for form in FORMS:
        weight = weight_of(form, 70, 200)
        got, want = (KernelPackedWeight(one, weight, torch.float32).linear()(x) for one in (library, plain))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
