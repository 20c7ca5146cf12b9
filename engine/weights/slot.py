"""A place for a weight that may stay in few bits: the loader fills it, the model takes it out.

Which widths there are is said by `Quantization`: "file" keeps what a file holds in few bits, "int8" and "int4" round
the rest to as many, "none" has no slots at all: every weight is a tensor of the model's dtype.
"""

from __future__ import annotations

from typing import Literal

import torch

from devices.quantized import Bits, QuantizedWeight, quantize

Quantization = Literal["none", "file", "int8", "int4"]


class WeightSlot:
    """Takes one weight [out, in].

    Attributes:
        shape: of the weight.
        bits: most bits that it keeps; None keeps what comes.
        dtype: of a weight that is not in few bits.
    """

    def __init__(self, shape: torch.Size, bits: Bits | None, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.bits, self.dtype = shape, bits, dtype
        self._device = device
        self._weight: torch.Tensor | QuantizedWeight | None = None

    @property
    def nbytes(self) -> int:
        weight = self.weight
        return weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes

    @property
    def weight(self) -> torch.Tensor | QuantizedWeight:
        """What was put."""
        assert self._weight is not None, "nobody has filled the slot"
        return self._weight

    def put(self, weight: torch.Tensor | QuantizedWeight) -> None:
        """Keep a weight of the slot's shape. Raises ValueError: it cannot be rounded to the slot's bits."""
        if self.bits is not None and not (isinstance(weight, QuantizedWeight) and weight.bits <= self.bits):
            weight = quantize(_values(weight), self.bits)
        self._weight = weight if isinstance(weight, QuantizedWeight) else weight.to(self._device, self.dtype)

    def would_keep(self, weight: torch.Tensor | QuantizedWeight) -> bool:
        """Whether putting `weight` would change nothing of what is here."""
        twin = WeightSlot(self.shape, self.bits, self.dtype, self._device)
        twin.put(weight)
        return torch.equal(_values(twin.weight), _values(self.weight))

    def take(self) -> torch.Tensor | QuantizedWeight:
        """What was put; the slot is empty afterwards."""
        weight, self._weight = self.weight, None
        return weight


def _values(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
