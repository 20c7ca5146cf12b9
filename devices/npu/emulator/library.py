"""torch_npu's operators on the emulated device: real schemas, CPU kernels, one way through for all of them.

A call passes three places: the *front* (what stands where torch_npu's function would) records how it was called and
refuses a device tensor where the schema wants a host list; torch's dispatcher checks it against the schema; `_launch`
swaps operands for their host faces and runs the reference kernel, which checks the operator's rules first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from devices.npu.emulator.counters import Kind, note_call
from devices.npu.emulator.graph import snapshot
from devices.npu.emulator.kernels import KERNELS
from devices.npu.emulator.launch import launched, observers
from devices.npu.emulator.rules import DOCS, ContractViolation, strictness
from devices.npu.emulator.schemas import SCHEMAS, SOURCE
from devices.npu.emulator.storage import on_host, on_npu

HOST_TENSORS = {
    ("atb::_npu_paged_attention", "context_lens"),
    ("atb::_npu_paged_attention_get_workspace", "context_lens"),
}
"""Tensor arguments that live on the host."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """One overload of an operator.

    Attributes:
        name: with namespace, e.g. "npu::npu_rms_norm".
        arguments: names in the schema's order.
        defaults: of the arguments that have one.
        host_lists: names of arguments that are lists of integers.
        kernel: takes every argument by name, tensors as host faces.
    """

    name: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    host_lists: tuple[str, ...]
    kernel: Callable[..., Any]


def _read(schema: Any) -> _Operator:
    return _Operator(
        name=schema.name,
        arguments=tuple(argument.name for argument in schema.arguments),
        defaults={
            argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
        },
        host_lists=tuple(argument.name for argument in schema.arguments if "List[int]" in str(argument.type)),
        kernel=KERNELS[schema.name, schema.overload_name],
    )


def _launch(operator: _Operator) -> Callable[..., Any]:
    """What the dispatcher calls for an npu tensor."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        values = {**operator.defaults, **dict(zip(operator.arguments, args, strict=False)), **kwargs}
        faces: list[tuple[torch.Tensor, torch.Tensor]] = []
        index = 0
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.is_cpu:
                    _check_host_tensor(operator, name)
                    if observers.capture is not None:
                        values[name] = snapshot(value)  # lists are new ones already
                    continue
                if _is_host(operator, name) and strictness().host_lists:
                    raise ContractViolation("host-lists", operator.name, f"{name} is on the NPU; it must be on the CPU")
                index = value.device.index
                host = on_host(value)
                faces.append((host, value))
                values[name] = host
            elif isinstance(value, list):
                values[name] = [_list_item(item, faces) for item in value]
        result = operator.kernel(**values)
        made: list[torch.Tensor] = []
        given = _give(result, faces, index, made)
        launched(operator.name, operator.kernel, (), values, tuple(made))
        return given

    return launch


def _is_host(operator: _Operator, name: str) -> bool:
    return (operator.name, name) in HOST_TENSORS


def _check_host_tensor(operator: _Operator, name: str) -> None:
    if not _is_host(operator, name) and strictness().devices:
        raise ContractViolation("one-device", operator.name, f"{name} is on the CPU, other operands on the NPU")


def _list_item(item: Any, faces: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    host = on_host(item)
    faces.append((host, item))
    return host


def _give(result: Any, faces: list[tuple[torch.Tensor, torch.Tensor]], index: int, made: list[torch.Tensor]) -> Any:
    """npu tensors for a kernel's result: an operand that was written is given back as it came; what is new is listed
    in `made`."""
    if isinstance(result, torch.Tensor):
        for host, tensor in faces:
            if host is result:
                return tensor
        made.append(result)
        return on_npu(result, index)
    if isinstance(result, list | tuple):
        return type(result)(_give(item, faces, index, made) for item in result)
    return result


class Front:
    """Stands where torch_npu's function would: callable, with its overloads as attributes."""

    def __init__(self, namespace: str, name: str, overloads: dict[str, _Operator]) -> None:
        self.__name__ = name
        self._overloads = {
            overload: _FrontOverload(
                getattr(getattr(getattr(torch.ops, namespace), name), overload), overload, operator
            )
            for overload, operator in overloads.items()
        }
        for overload, front in self._overloads.items():
            setattr(self, overload, front)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = "out" if "out" in kwargs and "out" in self._overloads else "default"
        return self._overloads[name](*args, **kwargs)


class _FrontOverload:
    """One overload: records the call, checks what the dispatcher would convert in silence, calls."""

    def __init__(self, call: Any, overload: str, operator: _Operator) -> None:
        self._call, self._overload, self._operator = call, overload, operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        operator = self._operator
        note_call(
            operator.name,
            self._overload,
            tuple([_kind(value) for value in args]),
            tuple([(name, _kind(value)) for name, value in kwargs.items()]),
        )
        for name in operator.host_lists:
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor) and strictness().host_lists:
                raise ContractViolation(
                    "host-lists",
                    operator.name,
                    f"{name} is a tensor on {value.device}; it must be a Python list of int on the host ({DOCS})",
                )
        return self._call(*args, **kwargs)


def _kind(value: Any) -> Kind:
    """A tensor's dtype; the type for the rest, with the first item's for a list."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, list | tuple):
        return type(value), _kind(value[0]) if value else None
    return type(value)


_libraries: dict[str, Any] = {}
"""torch drops a library's operators when the object dies."""

_fronts: dict[str, Front] = {}


def install() -> None:
    """Define the operators with the vendor's schemas; once for the process."""
    make: Any = torch.library.Library
    found: dict[tuple[str, str], dict[str, _Operator]] = {}
    for text in SCHEMAS:
        schema = torch._C.parse_schema(text)
        namespace, name = schema.name.split("::")
        if namespace not in _libraries:
            _libraries[namespace] = make(namespace, "FRAGMENT")
        library = _libraries[namespace]
        library.define(text.partition("::")[2])
        operator = _read(schema)
        library.impl(f"{name}.{schema.overload_name}".rstrip("."), _launch(operator), "PrivateUse1")
        found.setdefault((namespace, name), {})[schema.overload_name or "default"] = operator
    for (namespace, name), overloads in found.items():
        _fronts[name] = Front(namespace, name, overloads)


def namespace() -> SimpleNamespace:
    """What `import torch_npu` would give: its functions, and `npu`."""
    backend: Any = torch
    return SimpleNamespace(**_fronts, npu=backend.npu, __version__=f"{SOURCE.split()[1]} (emulated)")
