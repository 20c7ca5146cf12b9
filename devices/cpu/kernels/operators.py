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
from devices.cpu.kernels.linear import TYPE_NAMES, KernelLinear
from devices.cpu.kernels.memory import ResultMemory
from devices.torch_forms.composed import ComposedOperators

MAX_KERNEL_ROWS = 64
"""With more rows than this, MKL is faster."""

WIDENED_FLOATS = 1 << 21
"""Elements of a bf16 weight that are widened at once (8 MiB of fp32, less than a last-level cache)."""

_OF_A_TYPE = ("rms_norm", "add_rms_norm", "silu_mul", "rotate", "norm_linear", "linear_norm", "gated_mlp")


class KernelOperators(ComposedOperators):
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
            for name in _OF_A_TYPE
            for dtype, suffix in TYPE_NAMES.items()
        }
        self._has_fast_bf16 = has_fast_bf16
        self._most_rows = sys.maxsize if deterministic else MAX_KERNEL_ROWS

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if self._has_fast_bf16 and takes(weight):
            return Bf16Weight(self._library, weight, self._memory).linear(bias, out_dtype)
        dtype, weight = weight.dtype, weight.contiguous()
        out_dtype = out_dtype or dtype
        function = getattr(self._library, f"linear_{TYPE_NAMES[dtype]}_{TYPE_NAMES[out_dtype]}")
        at = weight.data_ptr()
        few = KernelLinear(function, at, weight, weight.shape, bias, dtype, out_dtype, self._memory)
        return _PlainLinear(few, weight, bias, self._has_fast_bf16, self._most_rows, self._memory)

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

    def norm_linear(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, linear: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product, (rows, size) = _kernel_of(linear, x), x.shape
        if product is None or product.in_size != size:
            return super().norm_linear(x, residual, norm, eps, linear)
        x, residual = x.contiguous(), residual.contiguous()
        normed, total, y = x.new_empty(rows, size), x.new_empty(rows, size), product.result(rows)
        run, sources = self._function("norm_linear", x), (x.data_ptr(), residual.data_ptr(), norm.data_ptr())
        results = (normed.data_ptr(), total.data_ptr(), y.data_ptr())
        run(*sources, eps, product.address, *results, rows, torch.get_num_threads())
        return y, total

    def linear_norm(
        self, x: torch.Tensor, residual: torch.Tensor, linear: Linear, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product, rows = _kernel_of(linear, x), len(x)
        if product is None:
            return super().linear_norm(x, residual, linear, norm, eps)
        x, residual = product.checked(x), residual.contiguous()
        size = product.out_size
        y, normed, total = product.result(rows), x.new_empty(rows, size), x.new_empty(rows, size)
        run, results = self._function("linear_norm", x), (y.data_ptr(), normed.data_ptr(), total.data_ptr())
        sources = (x.data_ptr(), x.stride(0), product.address, residual.data_ptr(), norm.data_ptr())
        run(*sources, eps, *results, rows, torch.get_num_threads())
        return normed, total

    def gated_mlp(self, x: torch.Tensor, gate_up: Linear, down: Linear) -> torch.Tensor:
        first, last, rows = _kernel_of(gate_up, x), _kernel_of(down, x), len(x)
        if first is None or last is None or first.out_size != 2 * last.in_size:
            return super().gated_mlp(x, gate_up, down)
        x = first.checked(x)
        wide, gated, y = first.result(rows), x.new_empty(rows, last.in_size), last.result(rows)
        run, results = self._function("gated_mlp", x), (wide.data_ptr(), gated.data_ptr(), y.data_ptr())
        run(x.data_ptr(), x.stride(0), first.address, last.address, *results, rows, torch.get_num_threads())
        return y

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


def _kernel_of(linear: Linear, x: torch.Tensor) -> KernelLinear | None:
    """The product that a kernel may call for `x` [rows, in] in place of `linear`, if there is one."""
    if isinstance(linear, _PlainLinear) and len(x) <= linear.most_rows:
        linear = linear.few
    if isinstance(linear, KernelLinear) and linear.dtype == linear.out_dtype == x.dtype:
        return linear
    return None


class _PlainLinear:
    """A weight as it is: read by the kernel for few rows, by torch for more than `most_rows`."""

    def __init__(
        self,
        few: KernelLinear,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        has_fast_bf16: bool,
        most_rows: int,
        memory: ResultMemory,
    ) -> None:
        self.few, self.most_rows = few, most_rows
        self._weight, self._bias, self._memory = weight, bias, memory
        self._widens = weight.dtype == torch.bfloat16 and not has_fast_bf16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.most_rows:
            return self.few(x)
        x = self.few.checked(x)
        return (self._widened(x) if self._widens else F.linear(x, self._weight, self._bias)).to(self.few.out_dtype)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, out]."""
        x = x.float()
        out_size, in_size = self._weight.shape
        y = self._memory.empty(len(x), out_size, torch.float32)
        parts = torch.split(self._weight, max(1, WIDENED_FLOATS // in_size))
        for columns, part in zip(torch.split(y, len(parts[0]), dim=1), parts, strict=True):
            torch.mm(x, part.float().T, out=columns)
        return y if self._bias is None else y.add_(self._bias)


def with_whole_tokens(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, dim], copied unless each token's heads lie one behind another."""
    _, head, one = x.stride()
    return x if one == 1 and head == x.shape[2] else x.contiguous()
