"""Rotary position embedding: inverse frequencies by kind, and the turns at positions.

Formulas: RoFormer (arXiv:2104.09864); the scalings and their sources are listed in `engine/models/rope_config.py`. The
frequencies are chosen once, by the engine's context length, and never change while it runs: cached keys stay valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turns of a step's tokens, float32 [tokens, head_dim / 2], for `devices.base.Operators.rotate`."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """What turns positions into rotations.

    Attributes:
        frequencies: radians a position of each pair, float32 [head_dim / 2].
        attention_factor: what cosine and sine are multiplied with.
    """

    frequencies: torch.Tensor
    attention_factor: float

    def at(self, positions: torch.Tensor) -> Rotation:
        """Rotations at `positions`, an integer [tokens]."""
        angles = positions.to(torch.float32)[:, None] * self.frequencies
        return Rotation(angles.cos() * self.attention_factor, angles.sin() * self.attention_factor)


def build_rope(rope: RopeConfig, head_dim: int, context_len: int, device: torch.device) -> Rope:
    """The rope of an engine whose sequences have at most `context_len` tokens."""
    return Rope(inverse_frequencies(rope, head_dim, context_len).to(device), rope.attention_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> torch.Tensor:
    """Inverse frequency of each rotated pair, float32 [head_dim / 2], in radians a position."""
    theta = _dynamic_theta(rope, head_dim, context_len) if rope.kind == "dynamic" else rope.theta
    pair = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    powers = theta ** (pair / head_dim)
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "yarn":
        return _yarn(powers, rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(1.0 / powers, rope)
    if rope.kind in ("longrope", "freq_factors"):
        is_long = rope.kind == "longrope" and context_len > rope.original_max_position_embeddings
        divisors = rope.long_factors if is_long else rope.short_factors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers)
    return 1.0 / powers


def _dynamic_theta(rope: RopeConfig, head_dim: int, context_len: int) -> float:
    """NTK-aware theta for a context above the original one; at the original one it is the file's theta."""
    original = rope.original_max_position_embeddings
    stretch = rope.factor * max(context_len, original) / original - (rope.factor - 1)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _yarn(powers: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Pairs that turn more than `beta_fast` times in the original context are kept, those that turn less than
    `beta_slow` times divided by `factor`; between the two pairs the shares change linearly."""
    low, high = _yarn_pair(rope, head_dim, rope.beta_fast), _yarn_pair(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return divided / (rope.factor * powers) + (1.0 - divided) / powers


def _yarn_pair(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The pair, counted in fractions, that turns `turns` times in the original context."""
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended linearly in 1 / wavelength."""
    wavelength = 2 * math.pi / plain
    original = rope.original_max_position_embeddings
    share = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = share.clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor
