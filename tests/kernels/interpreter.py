"""Makes Triton's interpreter right about bfloat16 and fp8.

The interpreter keeps these as bare integers and computes with the integers: sums of bf16 are sums of bit patterns,
casts drop a carry or truncate, and nothing says so. `install` has every operation widen them to float32, compute, and
round the result to nearest even, which is what a GPU does for each single operation.

The patch reaches into `triton.runtime.interpreter`, whose shape is the same in Triton 3.6 to 3.9. Import this module
only in a process that started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = Any
"""`interpreter.TensorHandle`: a numpy array `data` and a Triton `dtype`."""

LOW_FLOATS = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

COMPUTING = ("binary_op", "ternary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_dot")
"""Builder methods that do arithmetic; all others move bits and are right as they are."""


def is_low(handle: Handle) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar in LOW_FLOATS


def widen(handle: Handle) -> Handle:
    """The same values in float32; anything else is returned as it is."""
    if not is_low(handle):
        return handle
    bits = np.ascontiguousarray(handle.data)
    signed = torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int8))
    return interpreter.TensorHandle(signed.view(LOW_FLOATS[handle.dtype.scalar]).float().numpy(), tl.float32)


def narrow(values: np.ndarray[Any, Any], dtype: Any) -> Handle:
    """float32 values rounded to nearest even into `dtype`, as the bit patterns that the interpreter keeps."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(LOW_FLOATS[dtype])
    bits = rounded.view(torch.int16 if rounded.itemsize == 2 else torch.int8).numpy()
    return interpreter.TensorHandle(bits.view(np.uint16 if rounded.itemsize == 2 else np.uint8), dtype)


def _in_float32(method: Callable[..., Handle]) -> Callable[..., Handle]:
    def computed(self: Any, *arguments: Any) -> Handle:
        result = method(self, *map(widen, arguments))
        # A result has the dtype of the first operand, of the last in a select; a dot's accumulator decides for itself.
        typed = [argument for argument in arguments if isinstance(argument, interpreter.TensorHandle)]
        like = typed[0] if len(typed) < 3 else typed[2]
        is_float = np.issubdtype(result.data.dtype, np.floating)  # a comparison gives bool
        return narrow(result.data, like.dtype.scalar) if is_low(like) and is_float else result

    return computed


def _cast(method: Callable[..., Handle]) -> Callable[..., Handle]:
    def cast(self: Any, source: Handle, target: Any, *rest: Any) -> Handle:
        to_low = target.scalar in LOW_FLOATS
        if not (is_low(source) or to_low):
            return method(self, source, target, *rest)
        wide = widen(source).data
        if to_low:
            return narrow(wide, target.scalar)
        return interpreter.TensorHandle(wide.astype(interpreter._get_np_dtype(target)), target.scalar)

    return cast


def _reduce_in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(self: Any, tensors: tuple[Any, ...]) -> Any:
        if not any(is_low(tensor.handle) for tensor in tensors):
            return method(self, tensors)
        result = method(self, tuple(_tensor(widen(tensor.handle)) for tensor in tensors))
        parts = [result] if not isinstance(result, list | tuple) else list(result)
        for i, (part, before) in enumerate(zip(parts, tensors, strict=False)):
            if is_low(before.handle) and part.dtype == tl.float32:
                parts[i] = _tensor(narrow(part.handle.data, before.dtype))
        return parts[0] if not isinstance(result, list | tuple) else tuple(parts)

    return reduced


def _tensor(handle: Handle) -> Any:
    shape = list(handle.data.shape)
    scalar = handle.dtype.scalar
    return tl.core.tensor(handle, tl.block_type(scalar, shape) if shape and shape != [1] else scalar)


def install() -> None:
    """Patch the interpreter of this process, once."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "computes_low_floats", False):
        return
    for name in COMPUTING:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _cast(getattr(builder, name)))
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        operations.apply_impl = _reduce_in_float32(operations.apply_impl)
    _prepare_functions_once_for_a_launch()
    builder.computes_low_floats = True


def _prepare_functions_once_for_a_launch() -> None:
    """A call of one jitted function by another patches Triton's whole language each time, which takes milliseconds."""
    prepared: set[Any] = set()
    launch = interpreter.GridExecutor.__call__

    def start(self: Any, *arguments: Any, **named: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.GridExecutor.__call__ = start
    interpreter.InterpretedFunction.__call__ = call
