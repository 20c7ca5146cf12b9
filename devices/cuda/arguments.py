"""What launchers ask of their arguments: a kernel cannot say what is wrong with a pointer."""

from __future__ import annotations

import torch


class BadKernelArgument(ValueError):
    """A kernel was called with a tensor or number that it cannot handle; the text names the limit."""


def check_int32(*tensors: torch.Tensor) -> None:
    """Index tensors: int32 and contiguous."""
    for tensor in tensors:
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise BadKernelArgument(
                f"indices of shape {tuple(tensor.shape)} must be contiguous int32, not {tensor.dtype} with strides "
                f"{tensor.stride()}"
            )


def check_power_of_two(name: str, value: int, most: int) -> None:
    if value < 1 or value & (value - 1) or value > most:
        raise BadKernelArgument(f"{name}={value} must be a power of two up to {most}")


def check_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise BadKernelArgument(f"{name} must be of shape {shape}, not {tuple(tensor.shape)}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """`[tokens, heads, dim]` whose rows may lie apart (a view of a fused projection) but are contiguous themselves."""
    if tensor.dim() != 3 or tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]):
        raise BadKernelArgument(
            f"{name} must be [tokens, heads, dim] with contiguous [heads, dim], not {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
