"""Writes new keys and values into their pages, and copies pages when a row is forked.

KV of a layer is `[pages, num_kv_heads, page_size, head_dim]` (`devices.cuda.kernels.decode` says why). One program
serves one token: its slot is one scalar, so page and offset are scalar arithmetic, and all heads of keys and of values
move in one pass with 16 bytes a thread.
"""

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import (
    check_contiguous,
    check_int32,
    check_rows,
    check_same_dtype,
    check_scales,
    check_shape,
)

E4M3_MAX = tl.constexpr(448.0)

COPY_BLOCK = 2048
"""Numbers that a program copies."""


@triton.jit
def _to_fp8(x, inverse_scale):
    """Scaled and held within e4m3, whose overflow is NaN; a NaN stays one: its request has failed and must show it."""
    x = x.to(tl.float32) * inverse_scale
    x = tl.where(x > E4M3_MAX, E4M3_MAX, x)
    return tl.where(x < -E4M3_MAX, -E4M3_MAX, x)


@triton.jit
def write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_scale,
    v_scale,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_DIM)
    source = head[:, None] * DIM + dim[None, :]
    is_value = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    target = (slot // PAGE).to(tl.int64) * (HEADS * PAGE * DIM) + slot % PAGE * DIM
    at = head[:, None] * (PAGE * DIM) + dim[None, :]
    keys = tl.load(k + token.to(tl.int64) * k_stride + source, mask=is_value)
    values = tl.load(v + token.to(tl.int64) * v_stride + source, mask=is_value)
    if HAS_SCALES:
        keys = _to_fp8(keys, 1.0 / tl.load(k_scale + head, mask=head < HEADS, other=1.0)[:, None])
        values = _to_fp8(values, 1.0 / tl.load(v_scale + head, mask=head < HEADS, other=1.0)[:, None])
    tl.store(k_pages + target + at, keys.to(k_pages.dtype.element_ty), mask=is_value)
    tl.store(v_pages + target + at, values.to(v_pages.dtype.element_ty), mask=is_value)


@triton.jit
def copy_kernel(k_pages, v_pages, sources, targets, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(sources + pair).to(tl.int64) * SIZE
    target = tl.load(targets + pair).to(tl.int64) * SIZE
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < SIZE
    keys = tl.load(k_pages + source + at, mask=is_value)
    values = tl.load(v_pages + source + at, mask=is_value)
    tl.store(k_pages + target + at, keys, mask=is_value)
    tl.store(v_pages + target + at, values, mask=is_value)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store the keys and values of new tokens in their slots.

    Args:
        k, v: [tokens, num_kv_heads, head_dim]; tokens may lie apart.
        k_pages, v_pages: [pages, num_kv_heads, page_size, head_dim], of any floating dtype.
        slots: int32 [tokens], `page * page_size + offset`; a negative slot is padding and writes nothing.
        k_scale, v_scale: fp32 [num_kv_heads], for fp8 pages: `x / scale` is stored, held within +-448.
    """
    check_rows("k", k)
    check_rows("v", v)
    check_int32(slots)
    check_same_dtype(k_pages.dtype, v_pages=v_pages)
    check_same_dtype(k.dtype, v=v)
    check_contiguous(k_pages=k_pages, v_pages=v_pages)
    _, num_kv_heads, page_size, dim = k_pages.shape
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_shape("k", k, len(slots), num_kv_heads, dim)
    check_shape("v", v, *k.shape)
    check_scales(k_pages.dtype, num_kv_heads, k_scale, v_scale)
    if len(slots):
        write_kernel[(len(slots),)](
            k,
            v,
            k_pages,
            v_pages,
            slots,
            slots if k_scale is None else k_scale,
            slots if v_scale is None else v_scale,
            k.stride(0),
            v.stride(0),
            HEADS=num_kv_heads,
            BLOCK_H=triton.next_power_of_2(num_kv_heads),
            DIM=dim,
            BLOCK_DIM=triton.next_power_of_2(dim),
            PAGE=page_size,
            HAS_SCALES=k_scale is not None,
            num_warps=4,
        )


def copy_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole pages of one layer: page `sources[i]` to page `targets[i]`.

    Args:
        k_pages, v_pages: [pages, ...], contiguous, changed in place.
        sources, targets: int32 [pairs]; pairs run at the same time: a target stands once and is nobody's source.
    """
    check_int32(sources, targets)
    check_shape("targets", targets, len(sources))
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_same_dtype(k_pages.dtype, v_pages=v_pages)
    check_contiguous(k_pages=k_pages, v_pages=v_pages)
    size = k_pages[0].numel()
    if len(sources):
        copy_kernel[(len(sources), triton.cdiv(size, COPY_BLOCK))](
            k_pages, v_pages, sources, targets, SIZE=size, BLOCK=COPY_BLOCK, num_warps=8
        )
