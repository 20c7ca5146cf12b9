"""What a broken rule of an operator's documentation raises, and the checks that several builders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SOURCE = "torch_npu 2.13 documentation"

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT32_MAX = 2**31 - 1


class ContractViolation(ValueError):
    """A call that breaks a rule of an operator.

    Attributes:
        operator: its name in torch_npu.
        rule: what its documentation demands, in our words.
        got: what the call brought.
    """

    def __init__(self, operator: str, rule: str, got: object, source: str = SOURCE) -> None:
        self.operator, self.rule, self.got = operator, rule, got
        super().__init__(f"{operator}: {rule}; got {got} ({source} of {operator})")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one checked call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def check_dtype(operator: str, name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ContractViolation(operator, f"{name} is one of {names}", tensor.dtype)


def check_same_dtype(operator: str, **tensors: torch.Tensor) -> None:
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        got = {name: str(tensor.dtype) for name, tensor in tensors.items()}
        raise ContractViolation(operator, f"{', '.join(tensors)} have one dtype", got)


def check_contiguous(operator: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ContractViolation(operator, f"{name} is contiguous", f"strides {tensor.stride()}")


def check_one_device(operator: str, **tensors: torch.Tensor) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = {name: str(tensor.device) for name, tensor in tensors.items()}
        raise ContractViolation(operator, f"{', '.join(tensors)} are on one device", got)


def check_not_empty(operator: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise ContractViolation(operator, f"{name} is not empty", f"shape {tuple(tensor.shape)}")


def check_lengths(operator: str, name: str, lengths: object, batch: int) -> Sequence[int]:
    """A host list: a tensor would be baked into a captured graph, or cost a synchronisation."""
    if not isinstance(lengths, list) or not all(type(length) is int for length in lengths):
        raise ContractViolation(operator, f"{name} is a list of Python integers on the host", type(lengths).__name__)
    if len(lengths) != 1 and len(lengths) < batch:
        raise ContractViolation(operator, f"{name} has one entry for each of {batch} rows, or exactly one", lengths)
    if any(length < 0 for length in lengths):
        raise ContractViolation(operator, f"{name} has no negative entry", lengths)
    return lengths
