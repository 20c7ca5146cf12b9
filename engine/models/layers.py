"""The parts a decoder layer is made of: fused linears, a dense MLP, a mixture of experts.

Each part allocates its weights uninitialised and lists, under the names that model files use, the views that have to
be filled. Weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.models.config import MoeConfig

Named = dict[str, torch.Tensor]


class Weights(Protocol):
    """Makes an uninitialised tensor of the model's dtype on its device."""

    def __call__(self, *shape: int) -> torch.Tensor: ...


class FusedLinear:
    """Several projections of the same input in one product: `y = x W^T + b`, the parts side by side in `y`."""

    def __init__(self, new: Weights, in_size: int, out_sizes: Sequence[int], bias: bool) -> None:
        self.sizes = list(out_sizes)
        self.weight = new(sum(out_sizes), in_size)
        self.bias = new(sum(out_sizes)) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def destinations(self, names: Sequence[str]) -> Named:
        """`names`: one for each part, without ".weight" and ".bias"."""
        parts = zip(names, torch.split(self.weight, self.sizes), strict=True)
        named = {f"{name}.weight": part for name, part in parts}
        if self.bias is not None:
            biases = zip(names, torch.split(self.bias, self.sizes), strict=True)
            named |= {f"{name}.bias": part for name, part in biases}
        return named


class Mlp(Protocol):
    """What follows attention in a layer; maps [tokens, hidden_size] to the same."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def destinations(self, prefix: str) -> Named: ...


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, new: Weights, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self._gate_up = FusedLinear(new, hidden_size, (intermediate_size, intermediate_size), bias)
        self._down = FusedLinear(new, intermediate_size, (hidden_size,), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)

    def destinations(self, prefix: str) -> Named:
        gate_up = self._gate_up.destinations([f"{prefix}.gate_proj", f"{prefix}.up_proj"])
        return gate_up | self._down.destinations([f"{prefix}.down_proj"])


class MoeMlp:
    """Each token goes through the `num_experts_per_token` gated MLPs that its router scores highest.

    The scores are a softmax over all experts in fp32; with `normalise_top_k` those of the chosen ones sum to 1
    (Qwen3-MoE). The experts are computed one after another, each for the tokens that chose it.
    """

    def __init__(self, new: Weights, hidden_size: int, moe: MoeConfig) -> None:
        self._moe = moe
        self._router = FusedLinear(new, hidden_size, (moe.num_experts,), bias=False)
        self._experts = [GatedMlp(new, hidden_size, moe.intermediate_size, bias=False) for _ in range(moe.num_experts)]

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
