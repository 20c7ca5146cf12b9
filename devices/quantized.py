"""A weight in 4 or 8 bits, as a model file has it or rounded from floats: what an engine hands to a device.

The form is one for all sources, so that a device has one to multiply with. What a device makes of it is its own affair;
one that has no products of few bits takes `dequantized`, and computes the same up to the rounding of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

Bits = Literal[4, 8]

BLOCK = 32
"""Consecutive elements of a row that share a scale."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
_ROUNDED_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`w[o, k] = scales[o, k // 32] * (q[o, k] - zero) + minima[o, k // 32]`; `q` has 4 or 8 bits.

    A row's last block is filled up with zeros when its size is no multiple of 32.

    Attributes:
        shape: [out, in].
        quants: uint8 [out, blocks, 32], or [out, blocks, 16] in 4 bits: a byte holds element i in its low half and
            element i + 16 in its high half.
        scales: float16 [out, blocks]; minima: the same, or None where all are 0.
        zero: 128 in 8 bits, 8 in 4 bits, 0 with minima.
    """

    shape: torch.Size
    bits: Bits
    quants: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    @property
    def zero(self) -> int:
        return 0 if self.minima is not None else 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> int:
        return self.quants.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)

    @property
    def form(self) -> tuple[Bits, bool]:
        """Weights of one form can be rows of one weight."""
        return self.bits, self.minima is not None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in], computed in fp32 and rounded once."""
        quants = self.quants
        if self.bits == 4:
            quants = torch.cat([quants & 15, quants >> 4], dim=-1)
        values = quants.float().sub_(self.zero).mul_(self.scales[..., None])
        if self.minima is not None:
            values.add_(self.minima[..., None])
        return values.flatten(1)[:, : self.shape[1]].to(dtype)

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """The weight after `change`, which permutes the first dimension of a tensor of any shape."""
        minima = None if self.minima is None else change(self.minima)
        return replace(self, quants=change(self.quants), scales=change(self.scales), minima=minima)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the rows of all, which are of one form and size of row."""
    first = weights[0]
    if len(weights) == 1:
        return first
    size = torch.Size((sum(weight.shape[0] for weight in weights), first.shape[1]))
    minima = [weight.minima for weight in weights if weight.minima is not None]
    return QuantizedWeight(
        size,
        first.bits,
        torch.cat([weight.quants for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(minima) if minima else None,
    )


def quantize(weight: torch.Tensor, bits: Bits) -> QuantizedWeight:
    """Round a weight [out, in] of floats: 8 bits around zero, 4 bits between a block's least and greatest element.

    In 4 bits the range is narrowed a little where that makes the sum of squared errors of a block less.

    Raises:
        ValueError: an element is not finite, or a scale is beyond fp16.
    """
    parts = torch.split(weight, max(1, _ROUNDED_ELEMENTS // weight.shape[1]))
    done = [_eight_bits(_blocks(part)) if bits == 8 else _four_bits(_blocks(part)) for part in parts]
    quants, scales, minima = (torch.cat(tensors) for tensors in zip(*done, strict=True))
    if not (scales.isfinite().all() and minima.isfinite().all()):
        raise ValueError(
            "a weight that is not finite, or beyond fp16, cannot be rounded to fewer bits; --quantization none takes it"
        )
    return QuantizedWeight(weight.shape, bits, quants, scales, minima if bits == 4 else None)


def _blocks(part: torch.Tensor) -> torch.Tensor:
    """float32 [rows, blocks, 32]"""
    part = part.float()
    return F.pad(part, (0, -part.shape[1] % BLOCK)).reshape(part.shape[0], -1, BLOCK)


def _eight_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = (x.abs().amax(-1) / 127).half()
    return (_rounded(x, scale, 127) + 128).to(torch.uint8), scale, torch.zeros(1)


def _four_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = torch.aminmax(x, dim=-1)
    middle, width = (low + high) / 2, high - low
    best: tuple[torch.Tensor, ...] | None = None
    for shrink in _SHRINKS:
        scale, minimum = (width * (shrink / 15)).half(), (middle - width * (shrink / 2)).half()
        quants = _rounded(x - minimum[..., None], scale, 15).clamp_(min=0)
        error = (quants * scale[..., None] + minimum[..., None] - x).square_().sum(-1)
        tried = (error, quants, scale, minimum)
        if best is None:
            best = tried
        else:
            less = error < best[0]
            best = tuple(
                torch.where(less.view(*less.shape, *[1] * (new.ndim - 2)), new, old)
                for new, old in zip(tried, best, strict=True)
            )
    assert best is not None
    _, quants, scale, minimum = best
    packed = quants.to(torch.uint8)
    return packed[..., : BLOCK // 2] | packed[..., BLOCK // 2 :] << 4, scale, minimum


def _rounded(x: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    """`x / scale`, as whole numbers from `-most` to `most`; 0 where the scale is 0."""
    wide = scale.float()[..., None]
    return torch.where(wide == 0, 0, x / wide).round_().clamp_(-most, most)
