"""bf16 weights in the layout of `bf16.cpp`, for processors that multiply bf16."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from devices.cpu.kernels.linear import TYPE_NAMES, KernelLinear
from devices.cpu.kernels.memory import ResultMemory


def takes(weight: torch.Tensor) -> bool:
    """Whether `Bf16Weight` has a form of it."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


class Bf16Weight:
    """See `devices.base.PackedWeight`. A row of a product depends on its own input row only, to the last bit."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, memory: ResultMemory | None = None) -> None:
        """`weight`: one that `takes` it; `memory`: of large results."""
        self._memory = memory or ResultMemory()
        self._library, self._shape = library, weight.shape
        width = ctypes.c_int.in_dll(library, "bf16_width").value
        missing = -weight.shape[0] % width
        whole = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        panels = whole.reshape(-1, width, weight.shape[1] // 2, 2)
        self._panels = panels.transpose(1, 2).contiguous()  # [panels, in / 2, width, 2]
        self.num_bytes = self._panels.nbytes

    def linear(self, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> KernelLinear:
        dtype = torch.bfloat16
        out_dtype = out_dtype or dtype
        function = getattr(self._library, f"bf16_linear_{TYPE_NAMES[out_dtype]}")
        weight_at = self._panels.data_ptr()
        return KernelLinear(function, weight_at, self._panels, self._shape, bias, dtype, out_dtype, self._memory)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `devices.base.PackedWeight.rows`."""
        ids, (num_rows, size) = ids.contiguous(), self._shape
        numbers = ids.numpy()
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= num_rows):
            raise IndexError(f"rows {numbers.min()} to {numbers.max()} of a weight with {num_rows}")
        out = torch.empty(len(ids), size, dtype=torch.bfloat16)
        addresses = (self._panels.data_ptr(), ids.data_ptr(), out.data_ptr())
        self._library.bf16_rows(*addresses, len(ids), size // 2, torch.get_num_threads())
        return out
