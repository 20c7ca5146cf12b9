"""`devices.base.Operators` with the kernels; what they do not speed up goes to torch.

Few rows (decode) are bound by reading the weight, which torch's products do slowly, and slower still in bf16 on
processors without bf16 instructions. Many rows (prefill) are bound by arithmetic: MKL's fp32 product is used for them,
on fp32 copies of one part of a bf16 weight after another. Where the processor multiplies bf16, a bf16 weight goes into
panels (`bf16.py`), which serve any number of rows. MKL adds up in an order that depends on the number of rows, the
kernels do not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from devices.base import Linear
from devices.cpu.kernels.bf16 import Bf16Weight, takes
from devices.cpu.kernels.memory import ResultMemory

MAX_KERNEL_ROWS = 64
"""With more rows than this, MKL is faster."""

WIDENED_FLOATS = 1 << 21
"""Elements of a bf16 weight that are widened at once (8 MiB of fp32, less than a last-level cache)."""

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class KernelOperators:
    """See `devices.base.Operators`. Tensors may have any row stride; rows are copied when they are not contiguous."""

    def __init__(
        self,
        library: ctypes.CDLL,
        has_fast_bf16: bool,
        *,
        deterministic: bool = False,
        memory: ResultMemory | None = None,
    ) -> None:
        """Args beside the library:

        has_fast_bf16: the processor multiplies bf16, and a bf16 weight is kept in a form for that.
        deterministic: a row of a product never depends on how many there are.
        memory: of large results.
        """
        self._memory = memory or ResultMemory()
        self._library = library
        self._functions = {
            (name, dtype): getattr(library, f"{name}_{suffix}")
            for name in ("rms_norm", "add_rms_norm", "silu_mul", "rotate")
            for dtype, suffix in TYPE_NAMES.items()
        }
        self._has_fast_bf16 = has_fast_bf16
        self._most_rows = sys.maxsize if deterministic else MAX_KERNEL_ROWS

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if self._has_fast_bf16 and takes(weight):
            return Bf16Weight(self._library, weight, self._memory).linear(bias, out_dtype)
        most_rows = self._most_rows
        out_dtype = out_dtype or weight.dtype
        return _KernelLinear(self._library, weight, bias, out_dtype, self._has_fast_bf16, most_rows, self._memory)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        run = self._function("rms_norm", x)
        run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, torch.get_num_threads())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        rows, size = x.shape
        out, total = x.new_empty(rows, size), x.new_empty(rows, size)
        run, places = self._function("add_rms_norm", x), (x, residual, weight, out, total)
        run(*[tensor.data_ptr() for tensor in places], rows, size, eps, torch.get_num_threads())
        return out, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        run = self._function("silu_mul", gate_up)
        run(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = with_whole_tokens(x)
        tokens, heads, dim = x.shape
        out = x.new_empty(tokens, heads, dim)
        run, places = self._function("rotate", x), (cos, sin, out)
        addresses = [tensor.data_ptr() for tensor in places]
        run(x.data_ptr(), x.stride(0), *addresses, tokens, heads, dim // 2, torch.get_num_threads())
        return out

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, size = logits.shape
        best, places = logits.new_empty(rows), torch.empty(rows, dtype=torch.int64)
        run, threads = self._library.largest_f32, torch.get_num_threads()
        run(logits.data_ptr(), logits.stride(0), best.data_ptr(), places.data_ptr(), rows, size, threads)
        return best, places

    def _function(self, name: str, x: torch.Tensor) -> Callable[..., None]:
        """The kernel for the type of `x`; it takes addresses, sizes and, last, the number of threads."""
        function: Callable[..., None] = self._functions[name, x.dtype]
        return function


class _KernelLinear:
    """`y = x W^T + b`, x [rows, in] and W [out, in] of one type."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        has_fast_bf16: bool,
        most_rows: int,
        memory: ResultMemory,
    ) -> None:
        """`most_rows`: with more than these, torch computes."""
        self._memory = memory
        self._weight, self._bias, self._out_dtype = weight.contiguous(), bias, out_dtype
        self._function = getattr(library, f"linear_{TYPE_NAMES[weight.dtype]}_{TYPE_NAMES[out_dtype]}")
        self._widens = weight.dtype == torch.bfloat16 and not has_fast_bf16
        self._most_rows = most_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._weight.dtype or x.shape[1] != self._weight.shape[1]:
            raise ValueError(f"{x.dtype} {list(x.shape)} does not fit {self._weight.dtype} {list(self._weight.shape)}")
        if x.shape[0] > self._most_rows:
            return (self._widened(x) if self._widens else F.linear(x, self._weight, self._bias)).to(self._out_dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        out_size, in_size = self._weight.shape
        y = self._memory.empty(x.shape[0], out_size, self._out_dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._function(
            x.data_ptr(),
            x.stride(0),
            self._weight.data_ptr(),
            bias,
            y.data_ptr(),
            x.shape[0],
            out_size,
            in_size,
            torch.get_num_threads(),
        )
        return y

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, out]."""
        x = x.float()
        out_size, in_size = self._weight.shape
        y = self._memory.empty(x.shape[0], out_size, torch.float32)
        parts = torch.split(self._weight, max(1, WIDENED_FLOATS // in_size))
        for columns, part in zip(torch.split(y, len(parts[0]), dim=1), parts, strict=True):
            torch.mm(x, part.float().T, out=columns)
        return y if self._bias is None else y.add_(self._bias)


def with_whole_tokens(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, dim], copied unless each token's heads lie one behind another."""
    _, head, one = x.stride()
    return x if one == 1 and head == x.shape[2] else x.contiguous()
