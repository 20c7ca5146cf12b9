"""The picture of the KV says what records, pools, tree and sessions say, is bounded, and holds no token."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hash_engine import make_core
from strategies import geometry

from engine.core import EngineCore
from engine.sampling.params import SamplingParams
from engine.server import kv_picture as module
from engine.server.kv_picture import kv_picture
from mem_cache.kv_info import Owner, OwnerKind, ReqKvInfo

PAGE = 4


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)


def ids(rng: random.Random, length: int, shift: int) -> np.ndarray:
    """Tokens of a small alphabet, so that prompts share heads."""
    return np.array([3 + shift + rng.randrange(2) for _ in range(length)], dtype=np.int32)


def drive(core: EngineCore, seed: int, shift: int = 0, num_moves: int = 60):
    """Requests and turns of sessions at random; yields between steps."""
    rng = random.Random(seed)
    names = [core.sessions.open(f"s{i}").id for i in range(3)]
    for number in range(num_moves):
        prompt = ids(rng, rng.randrange(1, 14), shift)
        move = rng.random()
        if move < 0.3 and len(core.scheduler) < 4:
            core.add(prompt, params(rng.randrange(1, 6)), request_id=f"r{number}")
        elif move < 0.6 and not core.sessions.running(name := rng.choice(names)):
            if len(core.sessions.get(name).log) > 30:
                core.sessions.rewind(name, 5)
            core.add_turn(name, prompt, params(rng.randrange(1, 6)), request_id=f"t{number}")
        if core.has_work:
            core.step()
        yield


def page_owners(core: EngineCore) -> dict[str, int]:
    """Who has each page, page by page: a slow and separate account."""
    pool = core.allocator.families.pools["full"]
    free, pending = set(pool.free_pages().tolist()), set(pool.pending_pages().tolist())
    tree = {page: node.lock_count for node in core.allocator.tree.nodes() for page in node.held["full"].tolist()}
    idle, running = set(), set()
    for session in core.sessions.sessions():
        record = session.slot.record
        if session.slot.has_row:
            own = core.allocator.rows.pages("full", record.row, record.cache_protected_len, record.kv_allocated_len)
            (idle if session.slot.is_idle else running).update(own.tolist())
    for request in core.scheduler.running:
        record = request.kv
        own = core.allocator.rows.pages("full", record.row, record.cache_protected_len, record.kv_allocated_len)
        running.update(own.tolist())
    return {
        "free": len(free),
        "pending": len(pending),
        "tree_evictable": sum(locks == 0 for locks in tree.values()),
        "tree_protected": sum(locks > 0 for locks in tree.values()),
        "sessions": len(idle - running - set(tree)),
        "requests": len(running - set(tree)),
    }


@pytest.mark.parametrize("seed", range(4))
def test_it_says_what_the_books_say_after_every_step(seed):
    core = make_core(page_size=PAGE, num_pages=40, num_rows=6)
    seen_idle = seen_running = seen_tree = False
    for _ in drive(core, seed):
        view = kv_picture(core)
        assert core.audit() == []
        assert view == kv_picture(core)  # looking changes nothing

        held = {
            holding.record.row: holding.record for holding in core.sessions.holdings() if holding.record.req_pool_idx
        }
        held |= {request.kv.row: request.kv for request in core.scheduler.running}
        rows = view["rows"]
        assert {row["row"] for row in rows["shown"]} == set(held) == core.allocator.rows.used
        for row in rows["shown"]:
            record = held[row["row"]]
            assert f"{row['owner']} {row['owner_id']}" == str(record.owner)
            lengths = (row["protected"], row["committed"], row["scheduled"], row["allocated"])
            assert all(text in str(record) for text in (f"protected {lengths[0]} ", f"committed {lengths[1]} "))
            assert all(text in str(record) for text in (f"scheduled {lengths[2]} ", f"allocated {lengths[3]} "))
            assert (row["request"] is None) == (record not in [request.kv for request in core.scheduler.running])

        assert view["pools"][0]["pages"] == page_owners(core)
        nodes = view["tree"]["shown"]
        assert sum(node["tokens"] for node in nodes) == view["tree"]["tokens"]
        assert all(node["parent"] is None or node["parent"] < place for place, node in enumerate(nodes))
        of_nodes = [(node.num_pages * PAGE, node.lock_count, node.hits) for node in core.allocator.tree.nodes()]
        assert [(node["tokens"], node["locks"], node["hits"]) for node in nodes] == of_nodes
        for one in view["sessions"]["shown"]:
            session = core.sessions.get(one["id"])
            assert (one["history"], one["turns"]) == (len(session.log), len(session.log.turns))
            assert (one["reused"], one["computed"]) == (session.stats.reused_tokens, session.stats.computed_tokens)
        seen_idle |= any(row["request"] is None for row in rows["shown"])
        seen_running |= any(row["request"] is not None for row in rows["shown"])
        seen_tree |= any(node["parent"] is not None for node in nodes)
    assert seen_idle
    assert seen_running
    assert seen_tree


def test_other_tokens_of_the_same_lengths_give_the_same_picture():
    one, other = (make_core(page_size=PAGE, num_pages=40, num_rows=6) for _ in range(2))
    for _ in zip(drive(one, 7), drive(other, 7, shift=20), strict=True):
        assert kv_picture(one) == kv_picture(other)


def test_it_is_bounded_and_says_what_it_leaves_out(monkeypatch):
    core = make_core(page_size=PAGE, num_pages=60, num_rows=8, context_len=32)
    for number in range(5):
        name = core.sessions.open(f"s{number}").id
        core.add_turn(name, np.full(9, 3 + number, dtype=np.int32), params(2))
        while core.has_work:
            core.step()
    core.sessions.open_branching("b")
    for name, most in (("MAX_ROWS", 2), ("MAX_NODES", 1), ("MAX_SESSIONS", 3)):
        monkeypatch.setattr(module, name, most)
    view = kv_picture(core)
    assert (len(view["rows"]["shown"]), view["rows"]["num_left_out"]) == (2, 3)
    assert (len(view["tree"]["shown"]), view["tree"]["tokens_left_out"]) == (1, view["tree"]["tokens"] - 8)
    sessions = view["sessions"]
    assert (len(sessions["shown"]), sessions["num_left_out"], sessions["num_branching"]) == (3, 2, 1)


def test_a_windows_cursor_is_shown_where_the_window_let_pages_go():
    record = ReqKvInfo(geometry(PAGE, 8, window=True), Owner(OwnerKind.REQUEST, "r"))
    record.bind(1)
    record.adopt(4)
    record.reserve(28)
    record.schedule(24)
    record.commit(24)
    assert module._row(record, None)["window"] is None
    record.slide_window(16)
    assert module._row(record, None)["window"] == [4, 16]


def test_it_costs_less_than_a_millisecond_of_the_engine():
    core = make_core(page_size=PAGE, num_pages=4000, num_rows=64, context_len=128)
    for number in range(60):
        name = core.sessions.open(f"s{number}").id
        core.add_turn(name, np.array([3 + number % 8, 3 + number // 8] * 20, dtype=np.int32), params(2))
        while core.has_work:
            core.step()
    best = min(_seconds(core) for _ in range(20))
    assert len(kv_picture(core)["rows"]["shown"]) == 60
    assert best < 3e-3, f"{1e3 * best:.2f} ms"  # 0.5 ms alone; other tests share the machine


def _seconds(core: EngineCore) -> float:
    start = time.perf_counter()
    kv_picture(core)
    return time.perf_counter() - start
