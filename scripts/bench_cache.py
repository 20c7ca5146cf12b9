#!/usr/bin/env python
"""What the prefix tree and the allocator cost, in microseconds of CPU time (medians), on trees of up to 100k nodes.

    python scripts/bench_cache.py            a table
    python scripts/bench_cache.py --quick    fewer repeats and no tree of 100k nodes
    python scripts/bench_cache.py --json     the same numbers as JSON
    python scripts/bench_cache.py --rates    operations a second on trees of 100k nodes with pages of 1 and 128 tokens,
                                             other keys in each operation, and the allocator: what peers state of theirs

No device and no torch: these are the host's costs of a step. It is CPU time that is counted, so that a busy machine
changes little. Trees have many prefixes of 256 tokens and, behind each, branches of 128 tokens, as system prompts with
conversations behind them do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import thread_time

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from devices.page_pool import PageFamilies, PageFamily
from devices.pages import IntArray, ceil_page, page_count
from mem_cache.allocation import KvAllocator
from mem_cache.growth import decode, extend, plan
from mem_cache.kv_info import ReqKvInfo, RowGeometry
from mem_cache.rows import RowPool
from mem_cache.tree.components import FullPages
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.prefix_tree import PrefixTree

HEAD_TOKENS = 256
BRANCH_TOKENS = 128
LONG_PROMPT_TOKENS = 4096
BRANCHES_PER_HEAD = 9
BASE = Namespace()


@dataclass(frozen=True, slots=True)
class Timing:
    """One line of the table."""

    what: str
    page_size: int
    nodes: int
    us: float


@dataclass(frozen=True, slots=True)
class Rate:
    """One operation, how often a second of CPU time."""

    what: str
    page_size: int
    per_s: float


@dataclass
class Bench:
    """A tree of `num_nodes` nodes and the books around it; every prompt is made from its number."""

    page_size: int
    num_nodes: int
    repeats: int

    def __post_init__(self) -> None:
        self.family = PageFamily("full", self.page_size)
        self.num_heads = max(1, self.num_nodes // (BRANCHES_PER_HEAD + 1))
        tokens = self.num_heads * (HEAD_TOKENS + BRANCHES_PER_HEAD * BRANCH_TOKENS) + 4 * LONG_PROMPT_TOKENS
        self.num_pages = page_count(tokens + 2 * self.repeats * (HEAD_TOKENS + BRANCH_TOKENS), self.page_size)
        self.families = PageFamilies([(self.family, self.num_pages)])
        self.pool = self.families.pools["full"]
        self.tree = PrefixTree((FullPages(self.pool),), self.page_size)
        self.fresh = count(self.num_heads * BRANCHES_PER_HEAD)
        for head in range(self.num_heads):
            for branch in range(BRANCHES_PER_HEAD):
                self.insert(self.key(self.prompt(head, branch)))

    def prompt(self, head: int, branch: int) -> IntArray:
        tokens = np.arange(HEAD_TOKENS + BRANCH_TOKENS, dtype=np.int32)
        tokens[:HEAD_TOKENS] += head * 1_000
        tokens[HEAD_TOKENS:] += branch * 1_000 + 7
        return tokens

    def key(self, tokens: IntArray) -> PrefixKey:
        return PrefixKey(tokens, self.page_size, BASE)

    def insert(self, key: PrefixKey) -> None:
        pages = self.pool.alloc(key.num_pages)
        inserted = self.tree.insert(key, {"full": pages})
        self.pool.release(pages[: inserted.num_known])

    def median_us(self, act: Callable[[], object], prepare: Callable[[], object] | None = None) -> float:
        took = []
        for _ in range(self.repeats):
            if prepare is not None:
                prepare()
            start = thread_time()
            act()
            took.append(thread_time() - start)
        return median(took) * 1e6

    def timing(self, what: str, us: float) -> Timing:
        return Timing(what, self.page_size, self.num_nodes, us)

    def walks(self) -> list[Timing]:
        """match, insert and lock on this tree."""
        middle = self.num_heads // 2
        long_prompt = np.arange(LONG_PROMPT_TOKENS, dtype=np.int32) + 50_000_000
        self.insert(self.key(long_prompt))
        short = self.prompt(middle, 4)
        found = self.tree.match(self.key(short))
        new_keys = [self.key(self.prompt(middle, next(self.fresh))) for _ in range(self.repeats)]
        pages = [self.pool.alloc(key.num_pages) for key in new_keys]
        waiting = iter(zip(new_keys, pages, strict=True))

        def insert_one() -> None:
            key, own = next(waiting)
            self.tree.insert(key, {"full": own})

        return [
            self.timing("match 4096 cached tokens", self.median_us(lambda: self.tree.match(self.key(long_prompt)))),
            self.timing("match 384 cached tokens", self.median_us(lambda: self.tree.match(self.key(short)))),
            self.timing("match 384 unknown tokens", self.median_us(lambda: self.tree.match(self.key(short + 1)))),
            self.timing("insert a branch of 128 tokens", self.median_us(insert_one)),
            self.timing("lock + unlock 384 tokens", self.median_us(lambda: self.tree.unlock(self.tree.lock(found)))),
        ]

    def rates(self) -> list[Rate]:
        """Operations a second over `repeats` keys drawn from the whole tree: few of them are in the CPU's caches."""
        draw, n = np.random.default_rng(0), self.repeats
        heads = draw.integers(self.num_heads, size=n)
        known = [self.prompt(int(head), int(draw.integers(BRANCHES_PER_HEAD))) for head in heads]
        keys = [self.key(tokens) for tokens in known]
        new = [self.prompt(int(head), next(self.fresh)) for head in heads]

        def publish(tokens: IntArray) -> object:
            key = self.key(tokens)
            found = self.tree.match(key).num_pages
            own = self.pool.alloc(key.num_pages - found)
            return self.tree.insert(key, {"full": np.concatenate([np.zeros(found, dtype=np.int32), own])})

        return [
            self.rate("match of a cached key", n, lambda: [self.tree.match(key) for key in keys]),
            self.rate(
                "key + match of a cached key", n, lambda: [self.tree.match(self.key(tokens)) for tokens in known]
            ),
            self.rate("key + match + allocate + insert", n, lambda: [publish(tokens) for tokens in new]),
            self.rate("first eviction of one page", 1, lambda: self.tree.evict(1)),
            self.rate("evict one page", n, lambda: [self.tree.evict(1) for _ in range(n)]),
        ]

    def rate(self, what: str, num_times: int, act: Callable[[], object]) -> Rate:
        start = thread_time()
        act()
        return Rate(what, self.page_size, num_times / (thread_time() - start))

    def eviction(self) -> Timing:
        """One page at a time from a tree whose leaves were all used again since they were queued."""
        for head in range(0, self.num_heads, 7):
            self.tree.unlock(self.tree.lock(self.tree.match(self.key(self.prompt(head, 0)))))
        self.tree.evict(1)
        return self.timing("evict one page", self.median_us(lambda: self.tree.evict(1)))


def bench_allocator(page_size: int, repeats: int, num_requests: int = 256, length: int = 512) -> list[Timing]:
    """A batch of requests extends by its prompt, decodes one token, and is released."""
    width = ceil_page(2 * length, page_size)
    geometry = RowGeometry(page_size, width, (PageFamily("full", page_size),))
    families = PageFamilies([(geometry.families[0], num_requests * page_count(width, page_size))])
    rows = RowPool(num_requests, geometry)
    tree = PrefixTree((FullPages(families.pools["full"]),), page_size)
    allocator = KvAllocator(families, rows, tree)
    took: dict[str, list[float]] = {}
    for _ in range(repeats):
        records = [ReqKvInfo(geometry) for _ in range(num_requests)]

        def forward(records: list[ReqKvInfo], end: int) -> None:
            for record in records:
                record.schedule(end)
                record.commit(end)

        def release(records: list[ReqKvInfo]) -> None:
            for record in records:
                allocator.release(record, None)

        acts: list[tuple[str, Callable[[], object]]] = [
            ("extend 256 x 512", lambda r=records: allocator.commit(plan([extend(x, length) for x in r]))),  # type: ignore[misc]
            ("launch + commit 256 x 512", lambda r=records: forward(r, length)),  # type: ignore[misc]
            ("decode 256 x 1", lambda r=records: allocator.commit(plan([decode(x) for x in r]))),  # type: ignore[misc]
            ("release 256 x 512", lambda r=records: release(r)),  # type: ignore[misc]
        ]
        for what, act in acts:
            start = thread_time()
            act()
            took.setdefault(what, []).append(thread_time() - start)
        rows.take_changes()
    return [Timing(what, page_size, 0, median(times) * 1e6) for what, times in took.items()]


def pool_alone(page_size: int, repeats: int, num_requests: int = 256, length: int = 512) -> list[Timing]:
    """The same pages without records, rows and tables: taken in one call, released in one call for each request, and
    taken again and released in one."""
    per_request = page_count(length, page_size)
    families = PageFamilies([(PageFamily("full", page_size), 2 * num_requests * per_request)])
    demand = {"full": num_requests * per_request}
    whats = ("alloc 256 x 512", "release 256 x 512", "alloc + release in one call")
    took: dict[str, list[float]] = {f"pool alone: {what}": [] for what in whats}
    for _ in range(repeats):
        times = [thread_time()]
        pages = families.alloc(demand)
        times.append(thread_time())
        for own in np.split(pages["full"], num_requests):
            families.release({"full": own})
        times.append(thread_time())
        families.release(families.alloc(demand))
        times.append(thread_time())
        for seconds, end, start in zip(took.values(), times[1:], times, strict=False):
            seconds.append(end - start)
    return [Timing(what, page_size, 0, median(seconds) * 1e6) for what, seconds in took.items()]


def run_rates(*, quick: bool) -> str:
    """The lines of `--rates`."""
    num_nodes, operations = (10_000, 500) if quick else (100_000, 5_000)
    sizes = (1, 128)
    found = [rate for size in sizes for rate in Bench(size, num_nodes, operations).rates()]
    lines = [f"{f'operations a second, {num_nodes} nodes':<40}" + "".join(f"{f'page {size}':>12}" for size in sizes)]
    lines += [
        f"{what:<40}" + "".join(f"{rate.per_s:12,.0f}" for rate in found if rate.what == what)
        for what in dict.fromkeys(rate.what for rate in found)
    ]
    timings = [t for size in sizes for t in (*bench_allocator(size, 10), *pool_alone(size, 10))]
    return "\n".join([*lines, "", table(timings)])


def run(*, quick: bool) -> list[Timing]:
    repeats = 30 if quick else 200
    timings: list[Timing] = []
    for page_size in (1, 16, 128):
        timings += Bench(page_size, 10_000, repeats).walks()
    for page_size in (1, 16, 128):
        for num_nodes in (1_000, 10_000) if quick else (1_000, 10_000, 100_000):
            timings.append(Bench(page_size, num_nodes, repeats).eviction())
    for page_size in (1, 16, 128):
        timings += bench_allocator(page_size, max(5, repeats // 10))
    return timings


def table(timings: list[Timing]) -> str:
    """One line for each operation and tree size, one column for each page size."""
    sizes = sorted({timing.page_size for timing in timings})
    lines = [f"{'us of CPU, median':<32}{'nodes':>8}" + "".join(f"{f'page {size}':>12}" for size in sizes)]
    for what, nodes in dict.fromkeys((timing.what, timing.nodes) for timing in timings):
        cells = {t.page_size: t.us for t in timings if (t.what, t.nodes) == (what, nodes)}
        line = f"{what:<32}{nodes or '':>8}" + "".join(f"{cells[size]:>12.1f}" for size in sizes)
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no tree of 100k nodes")
    parser.add_argument("--rates", action="store_true", help="operations a second instead; with --quick 10k nodes")
    options = parser.parse_args()
    if options.rates:
        print(run_rates(quick=options.quick))
        return
    timings = run(quick=options.quick)
    if options.json:
        rows = [{"what": t.what, "page_size": t.page_size, "nodes": t.nodes, "us": round(t.us, 2)} for t in timings]
        print(json.dumps(rows, indent=1))
    else:
        print(table(timings))


if __name__ == "__main__":
    main()
