"""`y = x W^T + b` by one call of the library, whatever form the weight is in."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from devices.cpu.kernels.memory import ResultMemory

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class _Product(ctypes.Structure):
    """`Product` of fused.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("run", "weight", "bias")),
        *((name, ctypes.c_long) for name in ("outs", "ins")),
    )


class KernelLinear:
    """Takes any number of rows; a row of the result depends on its own row of `x` only, to the last bit.

    Attributes:
        address: of the product, for kernels that call it themselves.
        in_size, out_size, dtype, out_dtype: of `x` and of the result.
    """

    def __init__(
        self,
        function: Any,
        weight_at: int,
        weight: object,
        shape: torch.Size,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        memory: ResultMemory,
    ) -> None:
        """Args beside those that the class has:

        function: of the library; it takes x, its stride, weight, bias, y, rows, outs, ins and threads.
        weight_at: what it is given for `weight`, which stays alive as long as this.
        shape: [out, in].
        memory: of large results.
        """
        self.out_size, self.in_size = shape
        if bias is not None and len(bias) != self.out_size:
            raise ValueError(f"a bias of {len(bias)} does not fit {list(shape)}")
        self.dtype, self.out_dtype = dtype, out_dtype
        self._function, self._memory = function, memory
        self._kept = weight, bias
        bias_at = None if bias is None else bias.data_ptr()
        self._arguments = weight_at, bias_at
        run = ctypes.cast(function, ctypes.c_void_p).value
        self._product = _Product(run, weight_at, bias_at, self.out_size, self.in_size)
        self.address = ctypes.addressof(self._product)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, (rows, size) = self.checked(x), x.shape
        y = self.result(rows)
        threads = torch.get_num_threads()
        addresses = (x.data_ptr(), x.stride(0), *self._arguments, y.data_ptr())
        self._function(*addresses, rows, self.out_size, size, threads)
        return y

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in] with contiguous rows. Raises ValueError when it does not fit."""
        if x.dtype != self.dtype or x.shape[1] != self.in_size:
            fitting = f"{self.dtype} {[self.out_size, self.in_size]}"
            raise ValueError(f"{x.dtype} {list(x.shape)} does not fit {fitting}")
        return x if x.stride(1) == 1 else x.contiguous()

    def result(self, rows: int) -> torch.Tensor:
        """Uninitialised, [rows, out]."""
        return self._memory.empty(rows, self.out_size, self.out_dtype)
