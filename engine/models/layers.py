"""The parts a decoder layer is made of: a dense MLP, a mixture of experts.

Each part allocates its weights uninitialised and lists, under the names that model files use, the views that have to
be filled. Weights are [out, in]. Once they are filled they are the device's, which may keep them in a form of its own.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.config import MoeConfig
from engine.models.parts import Named, Parts


class Mlp(Protocol):
    """What follows attention in a layer; maps [tokens, hidden_size] to the same."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def destinations(self, prefix: str) -> Named: ...


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, parts: Parts, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        self._gate_up = parts.linear(hidden_size, (intermediate_size, intermediate_size), bias)
        self._down = parts.linear(intermediate_size, (hidden_size,), bias)
        self._operators = parts.operators

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._operators.gated_mlp(x, self._gate_up.linear, self._down.linear)

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
        self._router = parts.linear(hidden_size, (moe.num_experts,), bias=False, rounded=False)
        size = moe.intermediate_size
        self._experts = [GatedMlp(parts, hidden_size, size, bias=False) for _ in range(moe.num_experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self._router.linear(x), dim=-1, dtype=torch.float32)
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
