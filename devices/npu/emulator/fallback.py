"""aten on the emulated device: every operator runs on the CPU, over the same memory.

A *boxed fallback* is what torch calls for an operator that has no kernel for a device. This one swaps npu tensors for
their host faces, calls the operator again, and gives new tensors an npu face. What an operator needs (which arguments
it writes, whether the host waits) is read from its schema once. Views are made by torch itself, over one storage, so
aliasing, strides and write-through are real. `install` registers all of it, once for the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from devices.npu.emulator.launch import host_uploads, host_waits, launched, tensors_of
from devices.npu.emulator.pinned import is_pinned
from devices.npu.emulator.rules import ContractViolation, strictness
from devices.npu.emulator.storage import is_npu, on_host, on_npu
from devices.npu.emulator.streams import current_device

_WAITS = {
    "aten::nonzero": "nonzero",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::masked_select": "boolean index",
    "aten::repeat_interleave": "repeat_interleave",
    "aten::bincount": "bincount",
    "aten::equal": "equal",
}
"""Operators whose result's size or value the host must know: it waits for the device."""

_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""They take indices on the CPU as well, and a boolean mask among them is a `nonzero`."""

_VIEWS = ("view", "as_strided", "_reshape_alias", "unfold", "set_.source_Tensor", "set_.source_Storage_storage_offset")
"""Operators that only write a shape over a storage: the CPU's own kernels do it for any device."""

_DIRECT = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal",
    "sigmoid", "silu", "tanh", "gelu", "cos", "sin", "pow.Tensor_Scalar", "clamp", "where.self", "maximum", "minimum",
    "mm", "bmm", "addmm", "cat", "stack", "index.Tensor", "index_select", "gather", "sum.dim_IntList", "mean.dim",
    "amax", "amin", "argmax", "topk", "sort.stable", "cumsum", "_softmax", "_log_softmax", "eq.Scalar", "eq.Tensor",
    "ne.Scalar", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor", "gt.Scalar", "gt.Tensor", "ge.Scalar",
    "ge.Tensor", "bitwise_and.Tensor", "bitwise_or.Tensor", "any", "all.dim", "any.dim", "scatter.src", "add_.Tensor",
    "mul_.Tensor", "sub_.Tensor", "div_.Tensor", "embedding", "zero_", "fill_.Scalar", "masked_fill.Scalar",
    "masked_fill_.Scalar", "triu", "tril", "clone", "zeros", "full", "arange.start_step", "ones", "zeros_like",
    "full_like", "ones_like", "_unsafe_view", "convolution",
)  # fmt: skip
"""Common operators that torch would split into an allocation and an `out=` form: one call instead of two or three."""

_HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass(slots=True)
class _Plan:
    """What the fallback must know of one operator.

    Attributes:
        call: the operator, without its Python wrapper.
        writes: whether it writes an argument, which it then returns, and may resize.
        waits: the kind of host sync that it is, "" for none.
        indexes: whether it takes indices from either device.
    """

    name: str
    call: Any
    writes: bool
    waits: str
    indexes: bool


_plans: dict[Any, _Plan] = {}


def _plan(op: Any) -> _Plan:
    schema = op._schema
    name = schema.name
    waits = _WAITS.get(name, "")
    if name == "aten::repeat_interleave" and schema.overload_name != "Tensor":
        waits = ""
    plan = _plans[op] = _Plan(
        name=name if not schema.overload_name else f"{name}.{schema.overload_name}",
        call=op._op,
        writes=any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments),
        waits=waits,
        indexes=name in _INDEXING,
    )
    return plan


class _Operands:
    """Host faces of a call's npu tensors, each tensor once."""

    __slots__ = ("foreign", "index", "pairs")

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.index = -1
        self.foreign: torch.Tensor | None = None

    def swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_cpu:
                if value.dim():
                    self.foreign = value
                return value
            known = self.pairs.get(id(value))
            if known is not None:
                return known[1]
            if self.index < 0:
                self.index = value.device.index
            host = on_host(value)
            self.pairs[id(value)] = (value, host)
            return host
        if isinstance(value, list | tuple):
            return type(value)([self.swap(item) for item in value])
        return value


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the host faces of its operands."""
    plan = _plans.get(op) or _plan(op)
    operands = _Operands()
    swap = operands.swap
    host_args = [swap(value) for value in args]
    to_host = False
    if kwargs:
        device = kwargs.get("device")
        if device is not None:
            device = torch.device(device)
            to_host = device.type == "cpu"
            if not to_host and operands.index < 0:
                operands.index = current_device() if device.index is None else device.index
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        kwargs = {name: swap(value) for name, value in kwargs.items()}
    if operands.foreign is not None:
        _check_foreign(plan, operands)
    if plan.waits:
        host_waits(plan.waits)
    elif plan.indexes and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in host_args[1]):
        host_waits("boolean index")
    if plan.writes:
        return _call_writing(plan, operands, host_args, kwargs)
    result = plan.call(*host_args, **kwargs)
    if to_host:
        return result
    launched(plan.name, plan.call, host_args, kwargs, tensors_of(result))
    return _give(result, max(operands.index, 0), plan.name)


def _check_foreign(plan: _Plan, operands: _Operands) -> None:
    if operands.pairs and not plan.indexes and strictness().devices:
        raise ContractViolation("one-device", plan.name, "it was given tensors on the CPU and on the NPU")


def _give(result: Any, index: int, name: str) -> Any:
    """The result with npu faces."""
    if isinstance(result, torch.Tensor):
        if result.dtype is torch.float64 and strictness().dtypes:
            raise ContractViolation("no-float64", name, "its result is float64, which Ascend cores do not compute")
        return on_npu(result, index)
    if isinstance(result, list | tuple):
        return type(result)([_give(item, index, name) for item in result])
    return result


def _call_writing(plan: _Plan, operands: _Operands, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into an argument and returns it; `out=` may be resized."""
    try:
        result = plan.call(*args, **kwargs)
    except RuntimeError as error:
        # Memory behind a capsule cannot grow: the host faces get memory of their own, the npu tensors follow below.
        if "not resizable" not in str(error):
            raise
        # The failed attempt may have changed a host face's shape, hence fresh ones.
        copies = {id(host): on_host(tensor).clone() for tensor, host in operands.pairs.values()}
        operands.pairs = {key: (tensor, copies[id(host)]) for key, (tensor, host) in operands.pairs.items()}

        def grown(value: Any) -> Any:
            return copies.get(id(value), value)

        args = [grown(value) for value in args]
        kwargs = {name: grown(value) for name, value in kwargs.items()}
        result = plan.call(*args, **kwargs)
    back: dict[int, torch.Tensor] = {}
    for tensor, host in operands.pairs.values():
        back[id(host)] = tensor
        if host.shape != tensor.shape or (host.numel() and host.data_ptr() != tensor.data_ptr()):
            tensor.data = on_npu(host, tensor.device.index)
    launched(plan.name, plan.call, args, kwargs, tuple(made for made in tensors_of(result) if id(made) not in back))

    def give(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = back.get(id(value))
            return known if known is not None else on_npu(value, max(operands.index, 0))
        if isinstance(value, list | tuple):
            return type(value)([give(item) for item in value])
        return value

    return give(result)


# Kernels of their own: what crosses devices, what makes memory, and views.


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Within the device, and across in both directions; a copy to host memory waits unless that is pinned."""
    if src.is_cpu:
        host_uploads(pinned=non_blocking and is_pinned(src))
        source = src
        if src.dtype is torch.float64 and self.dtype is torch.float64 and strictness().dtypes:
            raise ContractViolation("no-float64", "copy_", "float64 does not exist on the device")
    else:
        source = on_host(src)
    if self.is_cpu:
        if not (non_blocking and is_pinned(self)):
            host_waits("cpu")
        target = self
    else:
        target = on_host(self)
    target.copy_(source)
    launched("aten::copy_", _copy, (target, source), {}, ())
    return self


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, self, non_blocking)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """`.to(...)`: another type, the way to the device (an upload), or the way to the host, which waits."""
    target = self.device if device is None else torch.device(device)
    if target.type == "cpu":
        host_waits("cpu")
    elif self.is_cpu:
        host_uploads(pinned=non_blocking and is_pinned(self))
    kwargs = {"dtype": dtype, "memory_format": memory_format or torch.preserve_format}
    source = self if self.is_cpu else on_host(self)
    result: torch.Tensor = torch.ops.aten._to_copy.default(source, **kwargs)
    if target.type == "cpu":
        return result
    launched("aten::_to_copy", torch.ops.aten._to_copy.default, (source,), kwargs, (result,))
    given: torch.Tensor = _give(result, current_device() if target.index is None else target.index, "aten::_to_copy")
    return given


def _local_scalar_dense(self: torch.Tensor) -> Any:
    host_waits("item")
    return on_host(self).item()


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _give_empty(torch.empty(size, dtype=dtype, device="cpu"), device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _give_empty(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def _give_empty(host: torch.Tensor, device: Any) -> torch.Tensor:
    index = None if device is None else torch.device(device).index
    given: torch.Tensor = _give(host, current_device() if index is None else index, "aten::empty")
    return given


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    return None


def _view(op: Any) -> Any:
    def view(*args: Any) -> Any:
        return op.redispatch(_HOST_KEYS, *args)

    return view


_libraries: list[torch.library.Library] = []
"""torch drops a library's kernels when the object dies."""


def install() -> None:
    """Register everything above for the device; once for the process."""
    library: Any = torch.library.Library
    everything = library("_", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = library("aten", "IMPL")
    kernels: dict[str, Any] = {
        "copy_": copy_,
        "_copy_from": _copy_from,
        "_to_copy": _to_copy,
        "_local_scalar_dense": _local_scalar_dense,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "record_stream": _record_stream,
    }
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        kernels[name] = _view(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    for name in _DIRECT:
        packet, _, overload = name.partition(".")
        kernels[name] = partial(fallback, getattr(getattr(torch.ops.aten, packet), overload or "default"))
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    _libraries.extend((everything, aten))
    _patch_tensor()


def _patch_tensor() -> None:
    """Two methods of `Tensor` that only work for devices in C++: both ask whether the tensor is ours first.

    `copy.deepcopy` reads the storage in its own way: npu tensors are cloned. `repr` computes in float64 on the device.
    """
    deepcopy_of: Any = torch.Tensor.__deepcopy__
    repr_of: Any = torch.Tensor.__repr__

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not is_npu(self) or not self.is_leaf:
            return deepcopy_of(self, memo)
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            else:
                copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def show(self: torch.Tensor, **options: Any) -> str:
        if not is_npu(self):
            return str(repr_of(self, **options))
        host_waits("cpu")
        return f"{repr_of(on_host(self.detach()), **options)[:-1]}, device='{self.device}')"

    patched: Any = torch.Tensor
    patched.__deepcopy__, patched.__repr__ = deepcopy, show
