"""What a server says of itself is true: three healths, every number of /metrics, pauses, and an engine that is gone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hash_engine import Clock, make_core
from inside import Inside, core_for_text, inside, say, served, until, waiting

from engine.server import control_api, engine_process
from engine.server.messages import Abort, Beat, Start, decode_from_engine
from engine.server.throughput import WINDOW_S
from mem_cache.tree.misses import MISS_REASONS

HEALTHS = ("/health", "/ready", "/health_generate")


async def healths(server: Inside) -> list[int]:
    return [(await server.ask("GET", path)).status_code for path in HEALTHS]


@served
async def test_three_healths_are_three_truths():
    async with inside() as server:
        assert await healths(server) == [200, 200, 200]
        server.app.state.is_draining = True
        assert await healths(server) == [200, 503, 200], "alive and able, but not welcoming"
        server.app.state.is_draining = False
        server.client.engine.stats = lambda: {}  # type: ignore[method-assign]
        server.client._take(Beat(1e6, {}))
        server.client._take = lambda _: None  # type: ignore[method-assign]
        server.client.beat_at_s = time.monotonic()
        assert (await healths(server))[:2] == [503, 503], "a step hangs"
    async with inside() as server:
        server.client._fail("gone")
        assert await healths(server) == [503, 503, 503]


@served
async def test_a_probe_that_gets_no_token_says_so_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(control_api, "PROBE_LIMIT_S", 0.05)
    async with inside() as server:
        await server.post("/pause_generation", {})
        answers = await asyncio.gather(*(server.ask("GET", "/health_generate") for _ in range(6)))
        assert [answer.status_code for answer in answers] == [503] * 6
        assert "no token within" in answers[0].json()["status"]
        assert {abort.id for abort in server.told(Abort)} == {start.id for start in server.told(Start)}
        assert (server.client.num_open, server.client.core.has_work) == (0, False)
        await server.post("/continue_generation", {})
        assert await healths(server) == [200, 200, 200]
        assert all(value == 0 for name, value in (await server.metrics()).items() if name.endswith("_count"))


def test_a_beat_says_how_long_the_step_has_taken(monkeypatch):
    """The thread that beats sees a step that hangs, and that the next one does not: a long prefill is many steps."""
    monkeypatch.setattr(engine_process, "BEAT_S", 0.01)
    core, beats, go_on, hangs = make_core(), [], threading.Event(), threading.Event()
    wire: Any = SimpleNamespace(send=lambda data: beats.append(decode_from_engine(data)))

    def step() -> list[Any]:
        hangs.set()
        go_on.wait()
        return []

    monkeypatch.setattr(core, "step", step)
    parts: Any = SimpleNamespace(core=core)
    loop = engine_process.EngineLoop(parts, wire, wire)
    steps, beat = (threading.Thread(target=target, daemon=True) for target in (loop._step, loop._beat))

    def see(condition: Any) -> None:
        seen = len(beats)
        for _ in range(2000):
            if any(condition(one.step_age_s) for one in beats[seen:]):
                return
            time.sleep(0.01)
        raise AssertionError("no beat says so")

    beat.start()
    see(lambda age: age == 0.0)
    steps.start()
    hangs.wait()
    see(lambda age: age > 0.05)
    go_on.set()
    steps.join()
    see(lambda age: age == 0.0)
    loop._is_stopping = True
    beat.join()


STATS = {
    "num_pages": 100, "page_size": 16, "free_pages": 41, "pending_pages": 2, "tree_evictable_pages": 13,
    "tree_protected_pages": 19, "session_pages": 11, "request_pages": 14, "num_rows": 8, "free_rows": 3,
    "num_running": 7, "num_waiting": 5, "num_compiling": 3, "num_prefilling": 2, "num_retracted_total": 17,
    "prompt_tokens_total": 1000, "cached_tokens_total": 230, "num_sessions": 6, "session_held_tokens": 170,
    "evicted_tokens_total": 64, "graph_steps_replayed": 31, "graph_steps_eager": 37,
    "family_pages_free_window": 21, "family_pages_pending_window": 1, "family_pages_used_window": 23,
    **{f"prefix_miss_{reason}_total": 100 + place for place, reason in enumerate(MISS_REASONS)},
}  # fmt: skip
GAUGES = {
    "num_running_reqs": 7, "num_queue_reqs": 5, "num_grammar_queue_reqs": 3, "num_prefill_reqs": 2,
    "num_decode_reqs": 5, "token_usage": 0.46, "kv_available_tokens": 41 * 16, "kv_evictable_tokens": 13 * 16,
    "kv_used_tokens": 46 * 16, "cache_hit_rate": 0.23, "num_retracted_reqs": 17, "num_streaming_sessions": 6,
    "streaming_session_held_tokens": 170, "prefix_hit_quantum_tokens": 16, "engine_step_age_seconds": 2.5,
    "evicted_tokens_total": 64, 'kv_tokens_by_owner{owner="free"}': 41 * 16, 'kv_tokens_by_owner{owner="pending"}': 32,
    'kv_tokens_by_owner{owner="tree"}': 32 * 16, 'kv_tokens_by_owner{owner="session"}': 11 * 16,
    'kv_tokens_by_owner{owner="request"}': 14 * 16, 'decode_graph_steps{how="replayed"}': 31,
    'decode_graph_steps{how="eager"}': 37, 'kv_family_pages{family="window",owner="free"}': 21,
    'kv_family_pages{family="window",owner="pending"}': 1, 'kv_family_pages{family="window",owner="used"}': 23,
    **{f'prefix_miss_reason_total{{reason="{one}"}}': 100 + place for place, one in enumerate(MISS_REASONS)},
}  # fmt: skip


@served
async def test_every_gauge_is_the_engines_number():
    async with inside() as server:
        server.client.beat = Beat(2.5, STATS)
        found = await server.metrics()
        own = {name for name in found if name in GAUGES or not name.split("{")[0].endswith(("_bucket", "_created"))}
        assert {name: found[name] for name in GAUGES} == pytest.approx(GAUGES)
        counted = {
            "prompt_tokens_total",
            "cached_tokens_total",
            "generation_tokens_total",
            "num_http_requests",
            "gen_throughput",
        }
        counted |= {"prefix_lost_to_alignment_tokens_total"}
        left = {name for name in own - GAUGES.keys() - counted if not name.endswith(("_sum", "_count"))}
        assert left == set(), "a gauge that this test does not know"


@served
async def test_counters_are_the_sums_of_what_clients_were_told():
    async with inside(core=make_core(num_pages=64, num_rows=8, resume_unit="page")) as server:
        clock = server.serving.metrics.generated._clock = Clock()
        await server.post("/open_session", {"session_id": "s"})
        bodies = [say([5] * 11), say([5] * 11), *(say([7] * 7, session_params={"id": "s"}) for _ in range(2))]
        metas = [(await server.post("/generate", body))["meta_info"] for body in bodies]
        assert [meta["cached_tokens"] for meta in metas[:3]] == [0, 8, 0], "whole pages of what was said before"
        await server.ask("GET", "/health_generate")
        found = await server.metrics()
        for name, told in (
            ("prompt_tokens_total", "prompt_tokens"),
            ("cached_tokens_total", "cached_tokens"),
            ("prefix_lost_to_alignment_tokens_total", "lost_to_alignment_tokens"),
            ("generation_tokens_total", "completion_tokens"),
        ):
            assert found[name] == sum(meta[told] for meta in metas) > 0, name
        assert found["gen_throughput"] == 0, "the second is not whole"
        clock.now_s += 1
        assert (await server.metrics())["gen_throughput"] * WINDOW_S == found["generation_tokens_total"]
        assert found['num_requests_total{finish_reason="length"}'] == 4
        assert [found[f"{name}_count"] for name in ("e2e_request_latency_seconds", "queue_time_seconds")] == [4, 4]
        assert (found["time_to_first_token_seconds_count"], found["inter_token_latency_seconds_count"]) == (4, 8)
        assert 0 < found["time_to_first_token_seconds_sum"] < found["e2e_request_latency_seconds_sum"]
        assert found["queue_time_seconds_sum"] == 0, "by the engine's clock, which stands still here"
        many = say([9] * 5)
        many["sampling_params"] = {**many["sampling_params"], "n": 3}
        await server.post("/generate", many)
        after = await server.metrics()
        assert after['num_requests_total{finish_reason="length"}'] == 7, "an answer each"
        assert after["time_to_first_token_seconds_count"] == 5, "a request once"
        assert after["num_http_requests"] == 0


@served
async def test_a_pause_can_send_back_or_end_what_runs():
    async with inside() as server:
        long = say([5, 6])
        long["sampling_params"] = {**long["sampling_params"], "max_new_tokens": 40}
        alone = await server.post("/generate", long)
        core, running = server.client.core, server.client.core.scheduler.running
        for mode in ("in_place", "retract", "abort"):
            answer = asyncio.create_task(server.post("/generate", long))
            await until(lambda: any(request.num_output for request in running))
            await server.post("/pause_generation", {"mode": mode})
            counts = (len(running), len(core.scheduler.waiting))
            assert counts == {"in_place": (1, 0), "retract": (0, 1), "abort": (0, 0)}[mode]
            if mode == "abort":
                meta = (await answer)["meta_info"]
                assert meta["finish_reason"]["type"] == "abort"
                assert 0 < meta["completion_tokens"] < 40
            await server.post("/continue_generation", {})
            assert (await answer)["output_ids"] == alone["output_ids"][: len((await answer)["output_ids"])]
            assert mode == "abort" or (await answer)["output_ids"] == alone["output_ids"]
        assert core.audit() == []


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("/v1/completions", {"prompt": [5], "max_tokens": 5}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 5}),
    ("/generate", say([5])),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
@served
async def test_whoever_waits_is_told_that_the_engine_is_gone(path, body):
    async with inside(core=core_for_text()) as server:
        await server.post("/pause_generation", {})
        whole, stream = (
            asyncio.create_task(server.ask("POST", path, {**body, "stream": stream})) for stream in (False, True)
        )
        await until(waiting(server)(2))
        server.client._fail("gone")
        assert (await whole).status_code == 503
        error = (await whole).json()["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "engine_stopped")
        assert (await stream).status_code == 200
        lines = [line for line in (await stream).text.splitlines() if line.startswith("data: ")]
        lines = lines[:-1] if lines[-1] == "data: [DONE]" else lines
        said = json.loads(lines[-1].removeprefix("data: "))
        assert "engine_stopped" in (said.get("code"), said.get("error", {}).get("code"))
        assert (await server.ask("POST", path, body)).status_code == 503
