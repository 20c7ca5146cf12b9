"""Neighbours of a layer, one after another: for devices that gain nothing from computing them together."""

from __future__ import annotations

from typing import Protocol

import torch

from devices.base import Linear


class _Parts(Protocol):
    """What a composition calls; see `devices.base.Operators`."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class ComposedOperators:
    """The part of `devices.base.Operators` that follows from the others."""

    def norm_linear(
        self: _Parts, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, linear: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self.add_rms_norm(x, residual, norm, eps)
        return linear(normed), total

    def linear_norm(
        self: _Parts, x: torch.Tensor, residual: torch.Tensor, linear: Linear, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(linear(x), residual, norm, eps)

    def gated_mlp(self: _Parts, x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        return down(self.silu_mul(gate_up(x)))
