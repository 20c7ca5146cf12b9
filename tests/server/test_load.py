"""`rung bench-serve` against a real server, and the server under many clients of which some misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from contextlib import ExitStack

import httpx
import pytest

from engine.errors import BadRequest
from engine.server.load import LoadPlan, Outcome, conversations, report, run_load

SMALL = {"num_requests": 12, "concurrency": 4, "input_len": 40, "output_len": 5}


def load(server, **fields):
    return asyncio.run(run_load(server.url, LoadPlan(**{**SMALL, **fields})))


@pytest.mark.parametrize("rate", [None, 50.0], ids=["closed", "open"])
def test_random_prompts(server, rate):
    result = load(server, rate=rate)
    assert (result["num_ok"], result["num_failed"]) == (12, 0)
    assert result["output_tokens_per_s"] == pytest.approx(60 / result["seconds"])
    assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["end_to_end_ms"]["p99"]


def test_shared_prefixes_are_hit(server):
    server.post("/flush_cache", {})
    assert load(server, workload="shared-prefix", prefix_len=32, concurrency=1)["hit_rate"] == pytest.approx(
        11 * 32 / (12 * 40)
    )


def test_sessions_compute_what_is_new(server):
    server.post("/flush_cache", {})
    before = server.get("/server_info")["stats"]["num_sessions"]
    result = load(server, workload="sessions", turns=4, input_len=20)
    assert result["num_failed"] == 0
    # Turn k has k * 25 - 5 prompt tokens, of which all but the last turn's are held but one.
    assert result["hit_rate"] == pytest.approx(sum(k * 25 - 1 for k in (1, 2, 3)) / sum(k * 25 + 20 for k in range(4)))
    assert server.get("/server_info")["stats"]["num_sessions"] == before


def test_a_trace_repeats_its_blocks(server, tmp_path):
    server.post("/flush_cache", {})
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp_ms": 0, "input_length": 100, "output_length": 3, "hash_ids": [7]},
        {"timestamp_ms": 400, "input_length": 100, "output_length": 3, "hash_ids": [7]},
        {"timestamp": 450, "input_length": 30, "output_length": 3},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    result = load(server, workload="trace", trace=path)
    assert result["num_ok"] == 3
    assert result["hit_rate"] == pytest.approx(96 / 230)
    assert result["seconds"] > 0.4
    path.write_text('{"timestamp_ms": 0}')
    with pytest.raises(BadRequest, match="line 1"):
        load(server, workload="trace", trace=path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"rate": 0.0},
        {"workload": "other"},
        {"workload": "trace"},
        {"workload": "shared-prefix", "prefix_len": 128},
    ],
)
def test_plans_that_cannot_be(wrong):
    with pytest.raises(BadRequest, match=list(wrong)[-1] if len(wrong) > 1 else "trace|" + next(iter(wrong))):
        LoadPlan(**wrong)


def test_no_server_is_one_line():
    with pytest.raises(BadRequest, match="no Rung server"):
        asyncio.run(run_load("http://127.0.0.1:9", LoadPlan()))


def test_the_goodput_counts_who_kept_both_bounds():
    plan = LoadPlan(ttft_bound_ms=100, tpot_bound_ms=10)
    fast = Outcome(ttft_s=0.05, total_s=0.1, completion_tokens=11)
    late = Outcome(ttft_s=0.2, total_s=0.25, completion_tokens=11)
    slow = Outcome(ttft_s=0.05, total_s=0.5, completion_tokens=11)
    result = report([fast, late, slow, Outcome(error="x")], plan, 2.0)
    assert (result["goodput_per_s"], result["requests_per_s"]) == (0.5, 1.5)
    assert (result["num_failed"], result["first_errors"]) == (1, ["x"])
    assert report([], plan, 1.0)["ttft_ms"] == {}


def test_equal_seeds_ask_the_same():
    plan = LoadPlan(workload="sessions", num_requests=8, turns=4)
    assert conversations(plan, 300) == conversations(plan, 300)
    assert [len(talk) for talk in conversations(plan, 300)] == [4, 4]


def test_many_clients_of_which_some_hang_up_and_some_send_garbage(server):
    """256 streams at once: the good ones are answered, the books are right, and nothing is left."""
    dice = random.Random(0)

    async def good(client: httpx.AsyncClient, index: int) -> str:
        body = {"prompt": f"number {index}", "max_tokens": 8, "stream": True, "temperature": 0, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        return lines[-1] if answer.status_code == 200 and '"length"' in lines[-2] else f"{answer.status_code} {lines}"

    async def hangs_up(client: httpx.AsyncClient, index: int) -> str:
        body = {"text": f"gone {index}", "sampling_params": {"max_new_tokens": 400}, "stream": True}
        async with client.stream("POST", "/generate", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
        return "left"

    async def garbage(client: httpx.AsyncClient, index: int) -> str:
        bodies = [b"{", b"\xff\xfe", b'{"prompt": 3}', b'{"text": "x", "sampling_params": {"n": -1}}', b"[]" * 1000]
        path = ["/generate", "/v1/completions", "/v1/chat/completions"][index % 3]
        answer = await client.post(path, content=bodies[index % 5], headers={"content-type": "application/json"})
        return "refused" if answer.status_code in (400, 422) and "error" in answer.json() else answer.text

    async def all_at_once() -> list[tuple[str, str]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            kinds = [dice.choices([good, hangs_up, garbage], [8, 1, 1])[0] for _ in range(256)]
            answers = await asyncio.gather(*(kind(client, index) for index, kind in enumerate(kinds)))
        return [(kind.__name__, answer) for kind, answer in zip(kinds, answers, strict=True)]

    expected = {"good": "data: [DONE]", "hangs_up": "left", "garbage": "refused"}
    wrong = [(kind, answer) for kind, answer in asyncio.run(all_at_once()) if answer != expected[kind]]
    assert wrong == []
    server.wait_until_idle()
    stats = server.get("/server_info")["stats"]
    assert stats["free_pages"] + stats["tree_evictable_pages"] == stats["num_pages"]
    assert stats["free_rows"] == stats["num_rows"]


def test_a_burst_of_connections_waits_for_a_busy_server(own_server):
    """More than it takes in one turn of its event loop arrive while it stands still."""
    running = own_server()
    host, port = running.url.removeprefix("http://").split(":")
    with ExitStack() as opened:
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            peers = [opened.enter_context(socket.create_connection((host, int(port)), timeout=5.0)) for _ in range(200)]
            for peer in peers:
                peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        for peer in peers:
            peer.settimeout(30.0)
            assert peer.recv(4096).startswith(b"HTTP/1.1 200 ")
