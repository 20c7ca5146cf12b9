"""Tile sizes of the kernels as fixed tables: no measuring at run time, so that a step is the same step every time.

The numbers come from what the compiler makes of them (`python -m devices.cuda.aot`): no spilled registers, enough
programs on a multiprocessor to keep about 30 KiB of loads in flight, which is what 4 TB/s at 1 us asks of each one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from devices.cuda.arguments import AttentionShape, LatentShape

LEAST_SPAN = 256
"""Keys that are worth a program of their own when a row is shared evenly."""

MOST_SPLITS = 64
MERGE_BLOCK = 8
"""Partial results that are joined at once; fixed, so that their order is."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel cuts its work: rows and keys of a tile, threads (32 a warp), loads in flight.

    Attributes:
        num_stages: depth of the software pipeline; the tiles of keys that are in flight are one fewer.
        ctas_per_sm: programs that fit on a multiprocessor at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


# By (least compute capability, head_dim up to, bytes of an element of KV up to); the first that fits.
_DECODE: tuple[tuple[int, int, int, Tiles], ...] = (
    (90, 64, 2, Tiles(16, 64, 2, 3, 6)),
    (90, 128, 1, Tiles(16, 64, 4, 3, 4)),
    (90, 128, 2, Tiles(16, 64, 4, 3, 3)),
    (90, 256, 2, Tiles(16, 32, 4, 3, 3)),
    (80, 64, 2, Tiles(16, 64, 4, 3, 4)),
    (80, 128, 2, Tiles(16, 64, 4, 3, 2)),
    (80, 256, 2, Tiles(16, 32, 4, 3, 2)),
    (80, 128, 4, Tiles(16, 32, 4, 2, 2)),
    (80, 256, 4, Tiles(16, 16, 4, 2, 2)),
)


# By (least compute capability, head_dim up to, bytes of an element of the queries up to); the first that fits.
_EXTEND: tuple[tuple[int, int, int, Tiles], ...] = (
    (90, 64, 2, Tiles(128, 64, 4, 3, 2)),
    (90, 128, 2, Tiles(128, 64, 8, 3, 1)),
    (90, 256, 2, Tiles(64, 64, 8, 2, 1)),
    (80, 64, 2, Tiles(64, 64, 4, 3, 3)),
    (80, 128, 2, Tiles(128, 64, 8, 3, 1)),
    (80, 256, 2, Tiles(64, 32, 8, 3, 1)),
    (80, 128, 4, Tiles(32, 32, 4, 1, 1)),
    (80, 256, 4, Tiles(16, 16, 4, 1, 1)),
)


# By (least compute capability, least heads, bytes of an element up to); the first that fits. From 64 heads on the
# products are what takes time, and wgmma multiplies 64 rows.
_LATENT: tuple[tuple[int, int, int, Tiles], ...] = (
    (90, 64, 2, Tiles(64, 32, 8, 3, 1)),
    (80, 64, 2, Tiles(32, 32, 8, 3, 1)),
    (80, 1, 2, Tiles(16, 32, 4, 3, 1)),
    (80, 1, 4, Tiles(16, 16, 4, 1, 1)),
)


@functools.cache
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def architecture(tensor: torch.Tensor) -> int:
    """Compute capability of the GPU that holds a tensor, times ten; 90 in the interpreter."""
    return _capability(tensor.device.index) if tensor.is_cuda else 90


def decode_tiles(arch: int, shape: AttentionShape, max_queries: int) -> Tiles:
    """For the split kernel; query heads of a group and new tokens of a request are the rows of one tile."""
    rows = max_queries * shape.group
    most = 64 if shape.dim <= 128 else 32
    block_m = min(most, max(16, 1 << (rows - 1).bit_length()))
    for least, dim, itemsize, tiles in _DECODE:
        if arch >= least and shape.dim <= dim and shape.kv_dtype.itemsize <= itemsize:
            block_n = min(tiles.block_n, shape.page_size)
            num_warps = tiles.num_warps if block_m == tiles.block_m else max(4, tiles.num_warps)
            return Tiles(block_m, block_n, num_warps, tiles.num_stages, tiles.ctas_per_sm)
    raise AssertionError(f"arguments.py lets head_dim={shape.dim} pass, the table for sm_{arch} has no line for it")


def extend_tiles(arch: int, shape: AttentionShape, itemsize: int) -> Tiles:
    """For prefill; `itemsize`: bytes of an element of the queries."""
    for least, dim, size, tiles in _EXTEND:
        if arch >= least and shape.dim <= dim and itemsize <= size:
            block_n = min(tiles.block_n, shape.page_size)
            block_m = max(tiles.block_m, 1 << (shape.group - 1).bit_length())
            return Tiles(block_m, block_n, tiles.num_warps, tiles.num_stages, tiles.ctas_per_sm)
    raise AssertionError(f"arguments.py lets head_dim={shape.dim} pass, the table for sm_{arch} has no line for it")


def latent_tiles(arch: int, shape: LatentShape, itemsize: int) -> Tiles:
    """For latent decode; `itemsize`: bytes of an element of queries and latents."""
    for least, heads, size, tiles in _LATENT:
        if arch >= least and shape.num_heads >= heads and itemsize <= size:
            return Tiles(tiles.block_m, min(tiles.block_n, shape.page_size), tiles.num_warps, tiles.num_stages)
    raise AssertionError(f"the table for sm_{arch} has no line for elements of {itemsize} bytes")


def balanced_splits(seq_lens: npt.NDArray[np.int32], num_programs: int, num_sms: int, ctas_per_sm: int) -> int:
    """Programs along the keys of each row, such that the GPU is full once and no program is tiny.

    Args:
        seq_lens: of the rows, at least one of them not 0.
        num_programs: that serve one row without a split: KV heads, times tiles of rows.
    """
    longest = int(seq_lens.max(initial=1))
    rows = max(1.0, int(seq_lens.sum(dtype="int64")) / longest)  # a short row makes few programs
    wanted = num_sms * ctas_per_sm / (rows * num_programs)
    return max(1, min(round(wanted), -(-longest // LEAST_SPAN), MOST_SPLITS))
