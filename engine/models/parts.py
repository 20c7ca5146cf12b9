"""The weights of a model while it is built and filled: linears and tables of rows, which the device takes over.

A weight either is a view of a tensor of the model's dtype, filled in place, or, when weights may stay in few bits, a
slot that keeps what the loader puts (`engine/weights/slot.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from devices.base import Device, Linear, PackedWeight
from devices.quantized import Bits, QuantizedWeight, joined
from engine.weights.slot import Quantization, WeightSlot

Named = dict[str, torch.Tensor | WeightSlot]

_BITS: dict[Quantization, Bits] = {"int8": 8, "int4": 4}
_TABLE_BITS: Bits = 8  # of embedding and head, where an error costs most


class FusedLinear(Protocol):
    """Several projections of the same input: `y = x W^T + b`, the parts side by side in `y`.

    Attributes:
        linear: the product, once it is prepared.
    """

    linear: Linear

    def prepare(self, device: Device) -> int:
        """Give the filled weights to the device, and say how many bytes they have."""
        ...

    def destinations(self, names: Sequence[str]) -> Named:
        """What is to be filled, before `prepare`; `names`: one for each part, without ".weight" and ".bias"."""
        ...


class PlainLinear:
    """A `FusedLinear` of one tensor."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]) -> None:
        self._weight, self._bias, self._sizes = weight, bias, list(sizes)
        self.linear: Linear

    def prepare(self, device: Device) -> int:
        num_bytes = self._weight.nbytes
        self.linear = device.operators.linear(self._weight, self._bias)
        del self._weight, self._bias
        return num_bytes

    def destinations(self, names: Sequence[str]) -> Named:
        weights = zip(names, torch.split(self._weight, self._sizes), strict=True)
        return {f"{name}.weight": part for name, part in weights} | _biases(names, self._bias, self._sizes)


class SlottedLinear:
    """A `FusedLinear` whose parts keep the bits they come in; neighbours of one form are one product."""

    def __init__(self, slots: Sequence[WeightSlot], bias: torch.Tensor | None) -> None:
        self._slots, self._bias = list(slots), bias
        self.linear: Linear

    def prepare(self, device: Device) -> int:
        num_bytes = start = 0
        products: list[Linear] = []
        for _, run in groupby(self._slots, key=lambda slot: _form(slot.weight)):
            slots = list(run)
            end = start + sum(slot.shape[0] for slot in slots)
            bias = None if self._bias is None else self._bias[start:end]
            held = _held([slot.take() for slot in slots], slots[0].dtype, device)
            if isinstance(held, torch.Tensor):
                products.append(device.operators.linear(held, bias))
                num_bytes += held.nbytes
            else:
                products.append(held.linear(bias))
                num_bytes += held.num_bytes
            start = end
        self._slots.clear()
        self.linear = products[0] if len(products) == 1 else _side_by_side(products)
        return num_bytes

    def destinations(self, names: Sequence[str]) -> Named:
        named: Named = {f"{name}.weight": slot for name, slot in zip(names, self._slots, strict=True)}
        return named | _biases(names, self._bias, [slot.shape[0] for slot in self._slots])


class Table:
    """A weight [rows, size] that is read by the row, multiplied with, or both: embedding and head.

    Attributes:
        destination: what is to be filled, before `prepare`.
        num_bytes: of the weight, after it.
    """

    def __init__(self, destination: torch.Tensor | WeightSlot) -> None:
        self.destination: torch.Tensor | WeightSlot = destination
        self.num_bytes = 0
        self.rows: Callable[[torch.Tensor], torch.Tensor]
        self.linear: Callable[[torch.dtype], Linear]

    def prepare(self, device: Device) -> int:
        """Give the filled weight to the device: `rows(ids)` and `linear(out_dtype)` work from now on."""
        destination = self.destination
        del self.destination
        if isinstance(destination, WeightSlot):
            held = _held([destination.take()], destination.dtype, device)
        else:
            held = destination
        del destination
        if isinstance(held, torch.Tensor) and device.pack is not None:
            held = device.pack(held, held.dtype) or held
        if isinstance(held, torch.Tensor):
            weight = held
            self.num_bytes = weight.nbytes
            self.rows = lambda ids: F.embedding(ids, weight)
            self.linear = lambda out_dtype: device.operators.linear(weight, out_dtype=out_dtype)
        else:
            packed = held
            self.num_bytes, self.rows = packed.num_bytes, packed.rows
            self.linear = lambda out_dtype: packed.linear(out_dtype=out_dtype)
        return self.num_bytes


class Parts:
    """Allocates the weights of a model on its device, and remembers those that the device takes over.

    Attributes:
        num_bytes: of all weights, once they are prepared.
    """

    def __init__(self, dtype: torch.dtype, device: Device, quantization: Quantization = "none") -> None:
        self.operators, self.dtype = device.operators, dtype
        self.num_bytes = 0
        self._device, self._quantization = device, quantization
        self._owned: list[FusedLinear | Table] = []

    def tensor(self, *shape: int) -> torch.Tensor:
        """An uninitialised weight that stays a tensor."""
        weight = self._empty(*shape)
        self.num_bytes += weight.nbytes
        return weight

    def linear(self, in_size: int, out_sizes: Sequence[int], bias: bool, rounded: bool = True) -> FusedLinear:
        """`rounded`: it may be rounded to fewer bits than it has in the file."""
        biases = self.tensor(sum(out_sizes)) if bias else None
        linear: FusedLinear
        if self._quantization == "none":
            linear = PlainLinear(self._empty(sum(out_sizes), in_size), biases, out_sizes)
        else:
            bits = _BITS.get(self._quantization) if rounded else None
            linear = SlottedLinear([self._slot(size, in_size, bits) for size in out_sizes], biases)
        self._owned.append(linear)
        return linear

    def table(self, num_rows: int, size: int) -> Table:
        if self._quantization == "none":
            table = Table(self._empty(num_rows, size))
        else:
            table = Table(self._slot(num_rows, size, _TABLE_BITS if self._quantization in _BITS else None))
        self._owned.append(table)
        return table

    def prepare(self) -> None:
        """Make everything ready to run, once all weights are filled."""
        for part in self._owned:
            self.num_bytes += part.prepare(self._device)
        self._owned.clear()

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device.torch_device)

    def _slot(self, out_size: int, in_size: int, bits: Bits | None) -> WeightSlot:
        return WeightSlot(torch.Size((out_size, in_size)), bits, self.dtype, self._device.torch_device)


def _biases(names: Sequence[str], bias: torch.Tensor | None, sizes: Sequence[int]) -> Named:
    if bias is None:
        return {}
    return {f"{name}.bias": part for name, part in zip(names, torch.split(bias, list(sizes)), strict=True)}


def _side_by_side(products: Sequence[Linear]) -> Linear:
    return lambda x: torch.cat([product(x) for product in products], dim=-1)


def _form(weight: torch.Tensor | QuantizedWeight) -> tuple[Bits, bool] | None:
    return weight.form if isinstance(weight, QuantizedWeight) else None


def _held(
    weights: Sequence[torch.Tensor | QuantizedWeight], dtype: torch.dtype, device: Device
) -> torch.Tensor | PackedWeight:
    """The rows of weights of one form as the device holds them: packed where it can, else a tensor of `dtype`."""
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not packed:
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    taken = None if device.pack is None else device.pack(joined(packed), dtype)
    return taken if taken is not None else joined(packed).dequantized(dtype).to(device.torch_device)
