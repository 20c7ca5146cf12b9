"""The parts a decoder layer is made of: fused linears, a dense MLP, a mixture of experts.

Each part allocates its weights uninitialised and lists, under the names that model files use, the views that have to
be filled. Weights are [out, in]. Once they are filled they are the device's, which may keep them in a form of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from devices.base import Device, Linear, Operators
from engine.models.config import MoeConfig

Named = dict[str, torch.Tensor]


class FusedLinear:
    """Several projections of the same input in one product: `y = x W^T + b`, the parts side by side in `y`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]) -> None:
        self._weight, self._bias, self._sizes = weight, bias, list(sizes)
        self._product: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)

    def prepare(self, operators: Operators) -> None:
        """Give the filled weights to the device; `destinations` has nothing to list any more."""
        self._product = operators.linear(self._weight, self._bias)
        del self._weight, self._bias

    def destinations(self, names: Sequence[str]) -> Named:
        """`names`: one for each part, without ".weight" and ".bias"."""
        parts = zip(names, torch.split(self._weight, self._sizes), strict=True)
        named = {f"{name}.weight": part for name, part in parts}
        if self._bias is not None:
            biases = zip(names, torch.split(self._bias, self._sizes), strict=True)
            named |= {f"{name}.bias": part for name, part in biases}
        return named


class Parts:
    """Allocates the weights of a model on its device, and remembers the linears among them.

    Attributes:
        num_bytes: of all weights so far.
    """

    def __init__(self, dtype: torch.dtype, device: Device) -> None:
        self.operators, self.dtype = device.operators, dtype
        self.num_bytes = 0
        self._device = device.torch_device
        self._linears: list[FusedLinear] = []

    def tensor(self, *shape: int) -> torch.Tensor:
        """An uninitialised weight."""
        weight = torch.empty(shape, dtype=self.dtype, device=self._device)
        self.num_bytes += weight.nbytes
        return weight

    def linear(self, in_size: int, out_sizes: Sequence[int], bias: bool) -> FusedLinear:
        size = sum(out_sizes)
        self._linears.append(FusedLinear(self.tensor(size, in_size), self.tensor(size) if bias else None, out_sizes))
        return self._linears[-1]

    def prepare(self) -> None:
        """Make every linear ready to run, once all weights are filled."""
        for linear in self._linears:
            linear.prepare(self.operators)


class Mlp(Protocol):
    """What follows attention in a layer; maps [tokens, hidden_size] to the same."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def destinations(self, prefix: str) -> Named: ...


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, parts: Parts, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self._gate_up = parts.linear(hidden_size, (intermediate_size, intermediate_size), bias)
        self._down = parts.linear(intermediate_size, (hidden_size,), bias)
        self._activate = parts.operators.silu_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._gate_up(x)))

    def destinations(self, prefix: str) -> Named:
        gate_up = self._gate_up.destinations([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        return gate_up | self._down.destinations([f"{prefix}.down_proj"])


class MoeMlp:
    """Each token goes through the `num_experts_per_token` gated MLPs that its router scores highest.

    The scores are a softmax over all experts in fp32; with `normalise_top_k` those of the chosen ones sum to 1
    (Qwen3-MoE). The experts are computed one after another, each for the tokens that chose it.
    """

    def __init__(self, parts: Parts, hidden_size: int, moe: MoeConfig) -> None:
        self._moe = moe
        self._router = parts.linear(hidden_size, (moe.num_experts,), bias=False)
        size = moe.intermediate_size
        self._experts = [GatedMlp(parts, hidden_size, size, bias=False) for _ in range(moe.num_experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        shares, chosen = torch.topk(scores, self._moe.num_experts_per_token, dim=-1)
        if self._moe.normalise_top_k:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        shares = shares.to(x.dtype)
        out = torch.zeros_like(x)
        shares, chosen = shares.to(x.dtype).flatten(), chosen.flatten()
        by_expert = torch.argsort(chosen, stable=True)  # places in [tokens * num_experts_per_token], expert by expert
        counts = torch.bincount(chosen, minlength=self._moe.num_experts).tolist()
        for expert, places in zip(self._experts, torch.split(by_expert, counts), strict=True):
            if len(places):
                token = places // self._moe.num_experts_per_token
                out.index_add_(0, token, expert(x[token]) * shares[places, None])
        return out

    def destinations(self, prefix: str) -> Named:
        named = self._router.destinations([f"{prefix}.gate"])
        for index, expert in enumerate(self._experts):
            named |= expert.destinations(f"{prefix}.experts.{index}")
        return named
