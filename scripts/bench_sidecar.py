#!/usr/bin/env python
"""What sharing a begun 128:1 page is worth: hit tokens of the chat and the agent trace, by reuse unit.

    python scripts/bench_sidecar.py            a table
    python scripts/bench_sidecar.py --json     the same numbers as JSON

The rows have the page families of DeepSeek-V4 on Ascend: full pages of 128 tokens, and sidecar pages of 16 entries of
128 tokens each (2,048 tokens). Each turn's prompt is the whole conversation so far; the real allocator and the real
prefix tree match it, take its pages, publish and release them. "128" copies a begun sidecar page when another row
continues it. The other units are what engines do that share whole units only (SGLang on Ascend: 2,048; vLLM-Ascend:
block 128 times 128): the same allocator with pages of that size. The pool never runs out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from devices.npu.families import BLOCK_RATIO, compressed_families
from devices.page_pool import PageFamilies, PageFamily
from devices.pages import ceil_page, floor_page, page_count
from mem_cache.allocation import KvAllocator
from mem_cache.growth import extend, plan
from mem_cache.kv_info import ReqKvInfo, RowGeometry
from mem_cache.rows import RowPool
from mem_cache.tree.components import components_of
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import PrefixTree

TRACES = {"agent": (33, 12_000, 2_242), "chat": (6, 500, 250)}
"""Turns, tokens of the first prompt, tokens that each later one adds (Mooncake's medians; a short chat)."""

UNITS = (128, 2_048, 16_384)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one trace with one reuse unit.

    Attributes:
        copies: sidecar pages that were copied; sidecar_pages: most that were in use, 0 where there are none.
    """

    trace: str
    unit: int
    prompt_tokens: int
    hit_tokens: int
    copies: int
    sidecar_pages: int


def allocator_for(unit: int, longest: int) -> KvAllocator:
    width = ceil_page(longest, unit)
    shape: tuple[PageFamily, ...] = (PageFamily("full", unit),)
    if unit == BLOCK_RATIO:
        shape = compressed_families(unit, window=width)
    geometry = RowGeometry(unit, width, shape)
    families = PageFamilies([(family, 3 * page_count(width, family.tokens_per_page) + 64) for family in shape])
    tree = PrefixTree(components_of(geometry, families), unit)
    return KvAllocator(families, RowPool(2, geometry), tree)


def play(trace: str, unit: int) -> Result:
    """One conversation, turn by turn."""
    turns, first, more = TRACES[trace]
    text = np.random.default_rng(0).integers(0, 50_000, first + (turns - 1) * more, dtype=np.int32)
    allocator = allocator_for(unit, len(text))
    sidecar = allocator.families.pools.get("c128")
    lengths = [first + turn * more for turn in range(turns)]
    hits = copies = peak = 0
    for length in lengths:
        prompt, record = text[:length], ReqKvInfo(allocator.geometry)
        lock = allocator.tree.lock(allocator.match(prompt, Namespace()))
        hits += lock.num_pages * unit
        allocator.commit(plan([extend(record, length, allocator.tree.row_pages(lock))]))
        copies += len(allocator.take_copies())
        record.schedule(length)
        record.commit(length)
        lock = allocator.publish(record, prompt, Namespace(), lock)
        if sidecar is not None:
            peak = max(peak, sidecar.num_pages - sidecar.num_free)
        allocator.release(record, lock)
    assert hits == sum(
        floor_page(min(length - 1, seen), unit) for length, seen in zip(lengths, [0, *lengths[:-1]], strict=True)
    )
    return Result(trace, unit, sum(lengths), hits, copies, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    results = [play(trace, unit) for trace in TRACES for unit in UNITS]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(f"{'trace':<8}{'unit':>8}{'prompt':>10}{'hit':>10}{'share':>8}{'copies':>8}{'sidecar pages':>15}")
    for r in results:
        share = r.hit_tokens / r.prompt_tokens
        print(
            f"{r.trace:<8}{r.unit:>8}{r.prompt_tokens:>10}{r.hit_tokens:>10}{share:>8.4f}{r.copies:>8}"
            f"{r.sidecar_pages or '-':>15}"
        )


if __name__ == "__main__":
    main()
