"""Weights of 4 and 8 bits in the layout of `packed.cpp`, and what is computed with them."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from devices.cpu.kernels.linear import TYPE_NAMES, KernelLinear
from devices.cpu.kernels.memory import ResultMemory
from devices.quantized import QuantizedWeight

_COLUMNS_OF_A_WORD = 4


class _Packed(ctypes.Structure):
    """`Packed` of packed.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("quants", "scales", "minima")),
        *((name, ctypes.c_long) for name in ("outs", "ins")),
        *((name, ctypes.c_int) for name in ("bits", "zero")),
    )


class KernelPackedWeight:
    """See `devices.base.PackedWeight`. A row of a product depends on its own input row only, to the last bit."""

    def __init__(
        self, library: ctypes.CDLL, weight: QuantizedWeight, dtype: torch.dtype, memory: ResultMemory | None = None
    ) -> None:
        """`dtype`: of activations and of `rows`; `memory`: of large results."""
        self._memory = memory or ResultMemory()
        self._library, self._dtype, self._shape = library, dtype, weight.shape
        lanes = ctypes.c_int.in_dll(library, "packed_lanes").value
        self._quants = _panels(weight.quants.reshape(*weight.scales.shape, -1, _COLUMNS_OF_A_WORD), lanes)
        self._scales = _panels(weight.scales, lanes)
        self._minima = None if weight.minima is None else _panels(weight.minima, lanes)
        tensors = (self._quants, self._scales, self._minima)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._packed = _Packed(*addresses, *weight.shape, weight.bits, weight.zero)

    def linear(self, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> KernelLinear:
        dtype = self._dtype
        out_dtype = out_dtype or dtype
        function = getattr(self._library, f"packed_linear_{TYPE_NAMES[dtype]}_{TYPE_NAMES[out_dtype]}")
        weight_at = ctypes.addressof(self._packed)
        return KernelLinear(function, weight_at, self, self._shape, bias, dtype, out_dtype, self._memory)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [tokens, in], by `ids`, int64 [tokens]."""
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._shape[1], dtype=self._dtype)
        numbers = ids.numpy()
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self._shape[0]):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of a weight with {self._shape[0]}")
        function = getattr(self._library, f"packed_rows_{TYPE_NAMES[self._dtype]}")
        function(ctypes.addressof(self._packed), ids.data_ptr(), out.data_ptr(), len(ids), torch.get_num_threads())
        return out


def _panels(rows: torch.Tensor, lanes: int) -> torch.Tensor:
    """[out, blocks, (words, bytes)] -> [panels, blocks, (words,) lanes, (bytes)]; missing rows are zeros."""
    missing = -rows.shape[0] % lanes
    if missing:
        rows = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))
    panels = rows.reshape(-1, lanes, *rows.shape[1:])
    order = (0, 2, 1) if rows.ndim == 2 else (0, 2, 3, 1, 4)
    return panels.permute(order).contiguous()
