"""Kernels of recurrent layers: convolution, gated delta, Mamba2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case import Case, int32, randn
from report import relative_error


def gated_delta(name: str, device: torch.device, rows: int, heads: int, dim: int) -> Case:
    from devices.cuda.kernels.state import gated_delta_decode as kernel
    from devices.torch_forms.state import gated_delta_decode as torch_form

    q, k, v = (randn(device, rows, heads, dim) for _ in "qkv")
    decay, beta = -randn(device, rows, heads, dtype=torch.float32).abs(), torch.rand(rows, heads, device=device)
    states = [randn(device, rows, heads, dim, dim, dtype=torch.float32) for _ in range(2)]
    slots, kept = int32(device, range(rows)), states[0].clone()
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [kernel(q, k, v, decay, beta, states[i], slots, dim**-0.5)]

    def error() -> float:
        states[0].copy_(kept)
        run(0)
        want = torch_form(q, k, v, decay, beta, kept.clone(), slots, dim**-0.5)
        return relative_error(last[0], want)

    num_bytes = 2 * rows * heads * dim * dim * 4 + 2 * rows * heads * (4 * dim + 2)
    return Case(name, run, error, num_bytes, 6 * rows * heads * dim * dim, 0.80, num_sets=2)


def mamba2(name: str, device: torch.device, rows: int, heads: int, dim: int, size: int) -> Case:
    from devices.cuda.kernels.state import mamba2_decode as kernel
    from devices.torch_forms.state import mamba2_decode as torch_form

    x, dt = randn(device, rows, heads, dim), randn(device, rows, heads)
    a, d, bias = (randn(device, heads, dtype=torch.float32) for _ in "adb")
    b, c = (randn(device, rows, 1, size) for _ in "bc")
    states = [randn(device, rows, heads, dim, size, dtype=torch.float32) for _ in range(2)]
    slots, kept = int32(device, range(rows)), states[0].clone()
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [kernel(x, dt, -a.abs(), b, c, d, bias, states[i], slots)]

    def error() -> float:
        states[0].copy_(kept)
        run(0)
        return relative_error(last[0], torch_form(x, dt, -a.abs(), b, c, d, bias, kept.clone(), slots))

    num_bytes = 2 * rows * heads * dim * size * 4 + 4 * rows * heads * dim * 2
    return Case(name, run, error, num_bytes, 5 * rows * heads * dim * size, 0.80, num_sets=2)


def conv_decode(name: str, device: torch.device, rows: int, channels: int, width: int) -> Case:
    from devices.cuda.kernels.state import conv_decode as kernel
    from devices.torch_forms.state import conv_decode as torch_form

    x, weight, bias = randn(device, rows, channels), randn(device, width, channels), randn(device, channels)
    states = [randn(device, rows, width - 1, channels) for _ in range(4)]
    slots, kept = int32(device, range(rows)), states[0].clone()

    def run(i: int) -> None:
        kernel(x, weight, bias, states[i], slots)

    def error() -> float:
        states[0].copy_(kept)
        got = kernel(x, weight, bias, states[0], slots)
        after = kept.clone()
        want = torch_form(x, weight, bias, after, slots)
        return relative_error(got, want) + relative_error(states[0], after)

    return Case(name, run, error, 2 * rows * channels * (2 + 2 * (width - 1)), target=0.6)


def conv_prefill(name: str, device: torch.device, rows: int, tokens: int, channels: int, width: int) -> Case:
    """Rows of `tokens` new tokens and none before."""
    from devices.cuda.kernels.state import conv_prefill as kernel

    xs = [randn(device, rows * tokens, channels) for _ in range(4)]
    weight, bias = randn(device, width, channels), randn(device, channels)
    state = randn(device, rows, width - 1, channels)
    slots, starts = int32(device, range(rows)), int32(device, range(0, rows * tokens + 1, tokens))
    is_continued = torch.zeros(rows, dtype=torch.int8, device=device)
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [kernel(xs[i], weight, bias, state, slots, starts, is_continued, tokens)]

    def error() -> float:
        run(0)
        x = xs[0].view(rows, tokens, channels)
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        total = sum(padded[:, step : step + tokens] * weight[step].float() for step in range(width))
        want = F.silu(total + bias.float()).flatten(0, 1)
        return relative_error(last[0], want) + relative_error(state, x[:, tokens - width + 1 :])

    return Case(name, run, error, 4 * rows * tokens * channels, target=0.6)
