"""Rotary position embedding: inverse frequencies by kind, and the rotation of queries and keys.

Formulas: RoFormer (arXiv:2104.09864); linear scaling: position interpolation (arXiv:2306.15595); llama3: the
frequency-dependent scaling released with Llama 3.1. The kinds are those of `engine.models.config.RopeConfig`.
"""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequency of each rotated pair, float32 [head_dim / 2], in radians a position."""
    pair = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32)
    plain = 1.0 / (rope.theta ** (pair / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "freq_factors":
        return plain / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended linearly in 1 / wavelength."""
    wavelength = 2 * math.pi / plain
    original = rope.original_max_position_embeddings
    share = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = share.clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, computed in float32: two tensors [tokens, 1, head_dim] of `dtype`."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x` [tokens, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
