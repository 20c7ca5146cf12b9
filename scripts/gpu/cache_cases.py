"""Kernels of pages: the write of new tokens, copies, page tables."""

from __future__ import annotations

import numpy as np
import torch
from case import Case, int32, randn
from report import relative_error, share_wrong


def write(name: str, device: torch.device, tokens: int, heads: int, dim: int, page_size: int) -> Case:
    from devices.cuda.kernels.kv_cache import write_kv

    num_pages = tokens // page_size + 2
    k, v = (randn(device, tokens, heads, dim) for _ in "kv")
    pools = [
        [torch.zeros(num_pages, heads, page_size, dim, dtype=k.dtype, device=device) for _ in "kv"] for _ in range(4)
    ]
    slots = (torch.randperm(tokens, device=device) + page_size).int()

    def run(i: int) -> None:
        write_kv(k, v, *pools[i], slots)

    def error() -> float:
        page, offset = slots.long() // page_size, slots.long() % page_size
        return relative_error(pools[0][0][page, :, offset], k) + relative_error(pools[0][1][page, :, offset], v)

    return Case(name, run, error, tokens * heads * dim * 2 * 4 + 4 * tokens, target=0.75, tolerance=0.0)


def copy(name: str, device: torch.device, pairs: int, heads: int, dim: int, page_size: int) -> Case:
    from devices.cuda.kernels.kv_cache import copy_pages

    shape = (2 * pairs, heads, page_size, dim)
    pools = [(randn(device, *shape), randn(device, *shape)) for _ in range(4)]
    sources, targets = torch.randperm(2 * pairs, device=device).int().split(pairs)

    def run(i: int) -> None:
        copy_pages(*pools[i], sources, targets)

    def error() -> float:
        for pool in pools[0]:
            pool[targets.long()] = 0
        kept = [pool[sources.long()].clone() for pool in pools[0]]
        run(0)
        return sum(
            relative_error(pool[targets.long()], want) + relative_error(pool[sources.long()], want)
            for pool, want in zip(pools[0], kept, strict=True)
        )

    num_bytes = 2 * 2 * pairs * heads * page_size * dim * 2
    return Case(name, run, error, num_bytes, target=0.75, tolerance=0.0)


def tables(name: str, device: torch.device, rows: int, new: int, width: int, page_size: int, most_s: float) -> Case:
    """Each row gets `new` tokens in the middle of its table, on pages that it gets in this step."""
    from devices.cuda.kernels.page_tables import update_tables

    draw = np.random.default_rng(0)
    starts = draw.integers(0, width * page_size - new, rows)
    first, last = starts // page_size, (starts + new - 1) // page_size
    counts = last - first + 1
    pages = draw.integers(1, 1 << 20, counts.sum())
    at = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    position = starts[:, None] + np.arange(new)
    place = (np.cumsum(counts) - counts)[:, None] + position // page_size - first[:, None]
    want = pages[place] * page_size + position % page_size
    table = torch.zeros(rows, width, dtype=torch.int32, device=device)
    slots = torch.zeros(rows * new, dtype=torch.int32, device=device)
    columns = [
        int32(device, column)
        for column in (range(rows), np.cumsum([0, *counts]), first, pages, starts, np.arange(rows + 1) * new)
    ]

    def run(i: int) -> None:
        update_tables(table, *columns, slots, page_size)

    def error() -> float:
        row = np.repeat(np.arange(rows), counts)
        return share_wrong(slots.tolist(), want.reshape(-1).tolist()) + share_wrong(
            table.cpu().numpy()[row, at].tolist(), pages.tolist()
        )

    return Case(name, run, error, 8 * rows * new, tolerance=0.0, num_sets=1, most_s=most_s)
