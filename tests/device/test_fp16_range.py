"""Layers of a model in fp16 near its largest number, 65,504: sums are fp32, as those of any other dtype are.

Activations of a model that was trained in bf16 grow that far (CASES B078): the square of one is beyond fp16, and so is
the sum of a few. What a layer gives is within fp16 again.
"""

from __future__ import annotations

import pytest
import torch
from harness import opened

from devices.base import Operators
from devices.torch_forms.operators import TorchOperators

pytestmark = pytest.mark.devices("cpu", "npu-sim")

LARGE = 6e4


@pytest.fixture
def operators(device_name: str) -> Operators:
    """The device's own; the CPU's are plain torch, for it does not compute in fp16."""
    return TorchOperators() if device_name == "cpu" else opened(device_name).operators


def on(device_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(opened(device_name).torch_device)


def draw(*shape: int, largest: float, seed: int = 0) -> torch.Tensor:
    """fp16, evenly from `-largest` to `largest`."""
    even = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return ((even * 2 - 1) * largest).half()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.cpu().double(), want, rtol=2e-3, atol=1e-3)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight.double()


def test_norms(operators: Operators, device_name: str) -> None:
    x, weight = draw(5, 96, largest=LARGE), draw(96, largest=2, seed=1)
    there = on(device_name, weight)
    assert_near(operators.rms_norm(on(device_name, x), there, 1e-5), normed(x, weight))
    half = x / 2
    got, total = operators.add_rms_norm(on(device_name, half), on(device_name, half), there, 1e-5)
    assert_near(got, normed(x, weight))
    assert_near(total, (half.double() * 2))


def test_the_gate_of_an_mlp(operators: Operators, device_name: str) -> None:
    x = torch.cat([draw(5, 32, largest=LARGE), draw(5, 32, largest=1, seed=1)], dim=-1)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(operators.silu_mul(on(device_name, x)), gate * torch.sigmoid(gate) * up)


def test_rotation(operators: Operators, device_name: str) -> None:
    x, angles = draw(5, 3, 64, largest=LARGE / 2), torch.rand(5, 32, generator=torch.Generator().manual_seed(2)) * 6
    cos, sin = angles.cos().half().float(), angles.sin().half().float()  # an NPU turns by fp16
    got = operators.rotate(on(device_name, x), on(device_name, cos), on(device_name, sin)).cpu().double()
    pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos, sin)[:, None].to(torch.complex128)
    want = torch.cat([pairs.real, pairs.imag], dim=-1)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * LARGE)


def test_products(operators: Operators, device_name: str) -> None:
    """Sums that leave fp16 on their way and come back."""
    x = torch.full((3, 64), 200.0).half()
    weight = torch.full((8, 64), 30.0).half()
    weight[:, 32:] *= -1
    weight[:, 0] += 1
    got = operators.linear(on(device_name, weight))(on(device_name, x))
    assert_near(got, torch.full((3, 8), 200.0, dtype=torch.float64))
