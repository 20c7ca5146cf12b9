"""What launchers ask of their arguments: a kernel cannot say what is wrong with a pointer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_SIZES = (16, 32, 64, 128)
"""A tile lies in one page and has at least 16 tokens, the least that tensor cores multiply."""

MAX_QUERIES = 8
"""New tokens of a request that the split attention serves; with more it is a prefill."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the launchers of attention need to know of their tensors.

    Attributes:
        group: query heads that share a KV head.
        block_dim: `dim` rounded up to a power of two.
    """

    num_kv_heads: int
    group: int
    dim: int
    block_dim: int
    page_size: int
    kv_dtype: torch.dtype


def attention_shape(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> AttentionShape:
    """Raises BadKernelArgument for tensors that do not fit each other or the kernels."""
    check_rows("q", q)
    _, num_heads, dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    check_shape("out", out, *q.shape)
    check_shape("v_pages", v_pages, *k_pages.shape)
    if k_pages.shape[3] != dim or num_heads % num_kv_heads:
        raise BadKernelArgument(f"{num_heads} heads of {dim} do not fit KV of shape {tuple(k_pages.shape)}")
    if dim % 16 or dim > 256:
        raise BadKernelArgument(f"head_dim={dim} is not supported: a multiple of 16 up to 256 is")
    if page_size not in PAGE_SIZES:
        raise BadKernelArgument(f"page_size={page_size} is not supported by the kernels: one of {PAGE_SIZES} is")
    check_contiguous(k_pages=k_pages, v_pages=v_pages, out=out)
    if q.dtype not in DTYPES or k_pages.dtype not in (*DTYPES, FP8) or v_pages.dtype != k_pages.dtype:
        raise BadKernelArgument(f"no kernel for queries of {q.dtype} with KV of {k_pages.dtype} and {v_pages.dtype}")
    check_scales(k_pages.dtype, num_kv_heads, k_scale, v_scale)
    if sinks is not None:
        check_shape("sinks", sinks, num_heads)
    block_dim = 1 << (dim - 1).bit_length()
    return AttentionShape(num_kv_heads, num_heads // num_kv_heads, dim, block_dim, page_size, k_pages.dtype)


def check_scales(
    kv_dtype: torch.dtype, num_kv_heads: int, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> None:
    if (kv_dtype == FP8) != (k_scale is not None) or (k_scale is None) != (v_scale is None):
        raise BadKernelArgument(f"KV of {kv_dtype}: k_scale and v_scale go with {FP8}, and only with it")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None:
            check_shape(name, scales, num_kv_heads)
            if scales.dtype != torch.float32:
                raise BadKernelArgument(f"{name} must be float32, not {scales.dtype}")


def check_queries(max_queries: int) -> None:
    if not 1 <= max_queries <= MAX_QUERIES:
        raise BadKernelArgument(f"max_queries={max_queries}: the split attention serves 1 to {MAX_QUERIES} new tokens")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The same for latent attention: numbers of a token's latent and rotary parts."""

    num_heads: int
    latent: int
    rotary: int
    page_size: int


def latent_shape(q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> LatentShape:
    """Raises BadKernelArgument for tensors that do not fit each other or the kernel."""
    check_rows("q", q)
    tokens, num_heads, dim = q.shape
    latent = out.shape[2]
    rotary = dim - latent
    check_shape("out", out, tokens, num_heads, latent)
    _, _, page_size, _ = pages.shape
    check_shape("pages", pages, pages.shape[0], 1, page_size, dim)
    check_contiguous(pages=pages, out=out)
    check_same_dtype(q.dtype, pages=pages, out=out)
    if page_size not in PAGE_SIZES:
        raise BadKernelArgument(f"page_size={page_size} is not supported by the kernels: one of {PAGE_SIZES} is")
    for name, size in (("latent", latent), ("rotary", rotary)):
        check_power_of_two(f"the {name} part", size, 512)
        if size < 16:
            raise BadKernelArgument(f"the {name} part has {size} numbers, at least 16 are needed")
    return LatentShape(num_heads, latent, rotary, page_size)


def check_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise BadKernelArgument(f"{name} must be contiguous, its strides are {tensor.stride()}")


def check_same_dtype(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise BadKernelArgument(f"{name} must be of {dtype}, not {tensor.dtype}")
