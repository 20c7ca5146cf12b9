"""GGUF's blocks of few bits as `QuantizedWeight`s, without a detour through floats where the form allows it.

Q8_0, Q4_0 and Q4_1 are taken over bit by bit. Q4_K has blocks of 32 whose scale is the product of an fp16 and a 6-bit
number: that product is rounded to fp16 (by at most 1 part in 2,048, a quarter of what bf16 weights would lose). Q5_K
and Q6_K are rounded again to 8 bits in blocks of 32, a step of 1/127 of a block's largest element.
Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from devices.quantized import BLOCK, Bits, QuantizedWeight, quantize

Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = {GGMLQuantizationType.Q8_0: 34, GGMLQuantizationType.Q4_0: 18, GGMLQuantizationType.Q4_1: 20}
_SUPER_BYTES = 144  # Q4_K: 8 blocks
_SCALE_BYTES = 12


def packed(rows: Bytes, quant_type: GGMLQuantizationType, in_size: int) -> QuantizedWeight:
    """The weight of a quantised matrix.

    Args:
        rows: its bytes, [out, bytes of a row].
    Raises:
        ValueError: its numbers are not finite, or beyond fp16.
    """
    shape = torch.Size((rows.shape[0], in_size))
    if quant_type == GGMLQuantizationType.Q4_K:
        return _q4_k(rows, shape)
    if quant_type not in _BLOCK_BYTES:
        with np.errstate(invalid="ignore"):  # a scale that is no number shows in the weight, which is refused then
            floats = dequantize(rows, quant_type)
        return quantize(torch.from_numpy(floats).reshape(shape), 8)
    blocks = rows.reshape(shape[0], in_size // BLOCK, _BLOCK_BYTES[quant_type])
    bits: Bits = 8 if quant_type == GGMLQuantizationType.Q8_0 else 4
    has_minima = quant_type == GGMLQuantizationType.Q4_1
    quants = blocks[..., 4:] if has_minima else blocks[..., 2:]
    return QuantizedWeight(
        shape,
        bits,
        torch.from_numpy(quants ^ 0x80 if bits == 8 else quants.copy()),
        _halves(blocks[..., :2]),
        _halves(blocks[..., 2:4]) if has_minima else None,
    )


def _halves(pairs: Bytes) -> torch.Tensor:
    """float16 [...] of bytes [..., 2]."""
    return torch.from_numpy(np.ascontiguousarray(pairs).view(np.float16)[..., 0].copy())


def _q4_k(rows: Bytes, shape: torch.Size) -> QuantizedWeight:
    """A super block: scale, scale of the minima, 6-bit scales and minima of 8 blocks, 4 runs of 32 bytes; the low
    halves of a run are one block, the high halves the next."""
    supers = rows.reshape(shape[0], -1, _SUPER_BYTES)
    scale, minimum = _halves(supers[..., :2]).float(), _halves(supers[..., 2:4]).float()
    scales, minima = _six_bit_numbers(supers[..., 4 : 4 + _SCALE_BYTES])
    runs = supers[..., 4 + _SCALE_BYTES :].reshape(*supers.shape[:2], 4, BLOCK)
    elements = np.stack([runs & 15, runs >> 4], axis=-2).reshape(shape[0], -1, BLOCK)
    quants = elements[..., : BLOCK // 2] | elements[..., BLOCK // 2 :] << 4
    steps = (scale[..., None] * torch.from_numpy(scales)).half().flatten(1)
    lows = (-minimum[..., None] * torch.from_numpy(minima)).half().flatten(1)
    if not (steps.isfinite().all() and lows.isfinite().all()):
        raise ValueError("a scale is not finite, or beyond fp16; --quantization none takes it")
    return QuantizedWeight(shape, 4, torch.from_numpy(quants), steps, lows)


def _six_bit_numbers(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima [..., 8] of 12 bytes: the first 4 of each are the low 6 bits of 8 bytes, whose high 2 bits
    are the high bits of the last 4; the halves of the last 4 bytes are the low bits of those."""
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    return scales, minima
