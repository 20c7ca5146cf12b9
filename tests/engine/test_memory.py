"""Memory is taken once: hundreds of requests that abort, retract and evict leave an engine as large as it was."""

from __future__ import annotations

import gc
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import GREEDY, add, assert_idle, make_llm, prompts_with_shared_heads

from engine import LLM

PROMPTS = prompts_with_shared_heads(seed=21, n=20, max_len=150)
WAVE = 20


@pytest.fixture
def llm(tiny_path: Path) -> LLM:
    return make_llm(
        tiny_path, page_size=16, max_total_tokens=512, chunked_prefill_size=64, schedule_conservativeness=0.01
    )


def play_wave(llm: LLM, seed: int) -> int:
    """Requests of all kinds arrive over some steps; some are aborted, some sent back, one caller leaves its stream."""
    rng = np.random.default_rng(seed)
    requests = []
    while len(requests) < WAVE or llm.core.has_work:
        if len(requests) < WAVE:
            params = replace(GREEDY, max_new_tokens=int(rng.integers(1, 16)))
            requests.append(add(llm, PROMPTS[rng.integers(len(PROMPTS))], params))
            if rng.random() < 0.2:
                llm.core.abort(requests[rng.integers(len(requests))].id)
            running = llm.core.scheduler.running
            if running and rng.random() < 0.1:
                llm.core.scheduler.retract(running[0])
        if len(requests) == WAVE // 2:
            stream = llm.generate([PROMPTS[0], PROMPTS[1]], GREEDY, stream=True)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        llm.core.step()
    assert_idle(llm)
    return len(requests) + 2


def large_tensors(at_least_bytes: int) -> set[tuple[int, int]]:
    """Address and size of every storage of that size that is alive."""
    gc.collect()
    found = (o.untyped_storage() for o in gc.get_objects() if type(o) is torch.Tensor and not o.is_meta)
    return {(storage.data_ptr(), storage.nbytes()) for storage in found if storage.nbytes() >= at_least_bytes}


def traced_bytes(llm: LLM) -> int:
    """Python objects made since tracing began and alive now, without the record of step times, which fills up once."""
    llm.core.timings.clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pools_are_sized_once_and_two_hundred_mixed_requests_leave_nothing_behind(llm: LLM) -> None:
    layers = llm.core.runner.kv.layers
    addresses = [(layer.k.data_ptr(), layer.k.shape, layer.v.data_ptr(), layer.v.shape) for layer in layers]
    play_wave(llm, 0)
    play_wave(llm, 1)  # warm: lazily made things exist, the tree is full
    tensors = large_tensors(layers[0].k.nbytes)
    assert len(tensors) >= 2 * len(layers)
    stats, resident = llm.stats(), resident_bytes()

    served = sum(play_wave(llm, seed) for seed in range(2, 7))
    tracemalloc.start()  # it costs time, so it sees the second half only
    try:
        served += play_wave(llm, 7)
        traced = traced_bytes(llm)
        served += sum(play_wave(llm, seed) for seed in range(8, 12))
        grown = traced_bytes(llm) - traced
    finally:
        tracemalloc.stop()

    assert served >= 200
    after = llm.stats()
    assert after["num_retracted_total"] - stats["num_retracted_total"] > 10
    assert after["num_pages"] == stats["num_pages"] == after["free_pages"] + after["tree_evictable_pages"]
    assert [(layer.k.data_ptr(), layer.k.shape, layer.v.data_ptr(), layer.v.shape) for layer in layers] == addresses
    assert large_tensors(layers[0].k.nbytes) == tensors
    assert grown < 64 * 1024, f"{grown} bytes of Python objects stayed"
    assert resident_bytes() - resident < 32 * 2**20


def test_finished_requests_are_forgotten_by_every_book(llm: LLM) -> None:
    for seed in range(3):
        play_wave(llm, seed)
    core, tree, pool = llm.core, llm.core.allocator.tree, llm.core.allocator.families.pools["full"]
    assert core._requests == {}
    assert llm._delivery._live == {}
    assert (len(core.scheduler.running), len(core.scheduler.waiting)) == (0, 0)
    assert pool._pending == []
    assert pool._fences == {}
    assert len(tree._queue) <= len(list(tree.nodes()))
    assert len(core.timings) <= core.timings.maxlen
