"""SGLang's own endpoints, sessions over HTTP, health and control, on a real server."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def generate(server, text: Any, status: int = 200, **fields: Any) -> Any:
    name = "input_ids" if isinstance(text, list) and text and not isinstance(text[0], str) else "text"
    body = {name: text, "sampling_params": GREEDY, **fields}
    return server.post("/generate", body, status)


def events(server, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http() as client, client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate_in_all_its_forms(server):
    one = generate(server, "hello")
    ids = server.post("/tokenize", {"prompt": "hello"})["tokens"]
    assert generate(server, ids)["output_ids"] == one["output_ids"]
    assert [each["text"] for each in generate(server, ["hello", "hello"])] == [one["text"]] * 2
    assert generate(server, [ids])[0]["text"] == one["text"]
    meta = one["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] == len(one["output_ids"]) == 6
    last = events(server, {"text": "hello", "sampling_params": GREEDY})[-1]
    assert (last["text"], last["output_ids"]) == (one["text"], one["output_ids"])


def test_streamed_events_hold_the_whole_answer_so_far(server):
    seen = events(server, {"text": "hello", "sampling_params": GREEDY})
    for before, after in itertools.pairwise(seen):
        assert after["text"].startswith(before["text"])
    assert [event["meta_info"]["finish_reason"] is None for event in seen[:-1]] == [True] * (len(seen) - 1)


def test_a_stop_id_ends_the_text_and_is_not_shown(server):
    ids = generate(server, "hello")["output_ids"]
    stop = next(index for index, token_id in enumerate(ids) if token_id not in ids[:index] and index)
    sampling = {**GREEDY, "stop_token_ids": [ids[stop]]}
    answer = server.post("/generate", {"text": "hello", "sampling_params": sampling})
    assert answer["output_ids"] == ids[: stop + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[stop]}
    assert answer["text"] == server.post("/detokenize", {"tokens": ids[:stop]})["text"]


def test_answers_with_n_and_logprobs(server):
    fields = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
    answer = generate(server, "hello", **fields)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert [len(best) for best in meta["output_top_logprobs"]] == [2] * 6
    assert meta["input_token_logprobs"][0] is None
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    many = server.post("/generate", {"text": "x", "sampling_params": {**GREEDY, "n": 3, "sampling_seed": 1}})
    assert len(many) == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "one of them"),
        ({"text": "x", "sampling_params": {"max_new_token": 3}}, "did you mean max_new_tokens"),
        ({"text": "x", "sampling_params": {"top_p": 2}}, "top_p"),
        ({"text": "x", "unknown": 1}, "unknown"),
        ({"text": ["a", "b"], "stream": True}, "stream"),
        ({"text": ["a"] * 300}, "256"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"input_ids": [99999]}, "no token id"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "x", "rid": ""}, "rid"),
        ({"text": "x", "session_params": {"id": "gone"}}, "not open"),
        ({"text": "x", "session_params": {"rid": "x"}}, "session_params"),
        ({"text": "x", "session_params": {"id": "x", "offset": "far"}}, "offset"),
    ],
)
def test_bad_generate_requests(server, body, says):
    status = 404 if says == "not open" else 400
    assert says in server.post("/generate", body, status)["error"]["message"]


def test_an_abort_by_id_ends_the_request_and_an_unknown_id_is_no_error(server):
    body = {"text": "x", "rid": "mine", "sampling_params": {**GREEDY, "max_new_tokens": 450}}
    with server.http() as client, client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert "still running" in server.post("/generate", body, 400)["error"]["message"]
        server.post("/abort_request", {"rid": "mine"})
        server.post("/abort_request", {"rid": "nobody"})
        said = [json.loads(line.removeprefix("data: ")) for line in lines if line and "DONE" not in line]
    assert said[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < said[-1]["meta_info"]["completion_tokens"] < 450
    server.wait_until_idle()


def test_tokens_and_text(server):
    tokens = server.post("/tokenize", {"prompt": "hello 🙂", "add_special_tokens": False})["tokens"]
    assert server.post("/detokenize", {"tokens": tokens})["text"] == "hello 🙂"
    server.post("/detokenize", {"tokens": [1 << 40]}, 400)
    server.post("/tokenize", {"prompt": 3}, 400)


# Sessions.


def turn(server, session_id: str, text: Any, status: int = 200, **where: Any) -> Any:
    return generate(server, text, status, session_params={"id": session_id, **where})


def test_a_session_computes_what_is_new(server):
    before = server.get("/server_info")["stats"]["num_sessions"]
    name = server.post("/open_session", {"capacity_of_str_len": 1000, "streaming": True})
    first = turn(server, name, [5] * 20)
    second = turn(server, name, [6] * 3)
    assert second["meta_info"]["cached_tokens"] == 25
    whole = generate(server, [5] * 20 + first["output_ids"] + [6] * 3)
    assert second["output_ids"] == whole["output_ids"]
    view = server.get(f"/sessions/{name}")
    assert (view["state"], view["turns"], view["history_tokens"]) == ("idle", 2, 35)
    assert view["held_tokens"] == view["row"]["committed"] == 34
    fork = server.post(f"/sessions/{name}/fork", {"turns": 1})["session_id"]
    assert server.get(f"/sessions/{fork}")["history_tokens"] == 26
    assert server.post(f"/sessions/{name}/rewind", {"turns": 1})["history_tokens"] == 26
    assert turn(server, fork, [7])["output_ids"] == turn(server, name, [7])["output_ids"]
    server.post(f"/sessions/{name}/hold", {"seconds": 5})
    for open_one in (name, fork):
        assert server.post("/close_session", {"session_id": open_one}) == {"closed": True}
    server.get(f"/sessions/{name}", 404)
    assert server.get("/server_info")["stats"]["num_sessions"] == before


def test_sessions_refuse_with_the_right_status(server):
    server.post("/open_session", {"session_id": "s", "capacity_of_str_len": 30})
    assert server.post("/open_session", {"session_id": "s"}, 400)["error"]["code"] == "session_illegal"
    turn(server, "s", [5] * 20)
    assert turn(server, "s", [5] * 20, 400)["error"]["code"] == "session_full"
    assert turn(server, "s", [5], 400, offset=3)["error"]["code"] == "session_illegal"
    assert server.post("/sessions/s/rewind", {"tokens": 99}, 400)["error"]["code"] == "session_illegal"
    server.post("/sessions/s/rewind", {}, 400)
    server.post("/sessions/s/hold", {"seconds": -1}, 400)
    server.post("/sessions/none/fork", {}, 404)
    server.post("/sessions/s/rewind", {"tokens": 5})
    server.post("/pause_generation", {})
    body = {"input_ids": [5], "session_params": {"id": "s"}, "sampling_params": GREEDY, "stream": True}
    with server.http() as client, client.stream("POST", "/generate", json=body) as running:
        assert turn(server, "s", [5], 409)["error"]["code"] == "session_busy"
        server.post("/continue_generation", {})
        assert running.read()
    server.post("/close_session", {"session_id": "s"})
    assert turn(server, "s", [5], 404)["error"]["code"] == "session_unknown"


def test_a_branching_session_continues_any_request(server):
    name = server.post("/open_session", {"streaming": False})
    a = turn(server, name, [5] * 4)
    b = turn(server, name, [6], rid=a["meta_info"]["id"])
    c = turn(server, name, [7], rid=a["meta_info"]["id"], drop_previous_output=True)
    assert b["meta_info"]["prompt_tokens"] == 4 + 6 + 1
    assert c["output_ids"] == generate(server, [5] * 4 + [7])["output_ids"]
    server.post("/close_session", {"session_id": name})


# Health and control.


def test_three_healths(server):
    for path in ("/health", "/ready", "/health_generate"):
        assert server.get(path) == {"status": "ok"}


def metric(server, name: str) -> float:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"rung:{name}"))


def test_metrics_count_answers_and_not_probes(server):
    before = metric(server, "num_requests_total")
    generate(server, "hello")
    server.get("/health_generate")
    assert metric(server, "num_requests_total") == before + 1
    assert metric(server, "time_to_first_token_seconds_count") > 0
    assert metric(server, "inter_token_latency_seconds_count") > 0
    assert metric(server, "kv_tokens_by_owner") == 4096
    assert metric(server, "prefix_hit_quantum_tokens") == 16
    assert metric(server, "queue_time_seconds_count") == metric(server, "num_requests_total")
    assert metric(server, "event_loop_lag_seconds_count") > 0


def test_gauges_are_right_without_a_step(server):
    """What an abort, a session or a flush changes while nothing runs is said with the next sign of life."""
    server.post("/pause_generation", {})
    body = {"text": "x", "sampling_params": {**GREEDY, "max_new_tokens": 400}, "stream": True, "rid": "waits"}
    with server.http() as client, client.stream("POST", "/generate", json=body):
        wait_for(lambda: metric(server, "num_queue_reqs") == 1)
        server.post("/abort_request", {"rid": "waits"})
        wait_for(lambda: metric(server, "num_queue_reqs") == 0)
    server.post("/continue_generation", {})
    before = metric(server, "num_streaming_sessions")
    name = server.post("/open_session", {})
    wait_for(lambda: metric(server, "num_streaming_sessions") == before + 1)
    server.post("/close_session", {"session_id": name})
    wait_for(lambda: metric(server, "num_streaming_sessions") == before)
    misses = {"never_seen": [8] * 20, "below_page": [8]}
    server.post("/flush_cache", {})
    for reason, ids in misses.items():
        before = metric(server, f'prefix_miss_reason_total{{reason="{reason}"')
        generate(server, ids)
        wait_for(lambda: metric(server, f'prefix_miss_reason_total{{reason="{reason}"') == before + 1)  # noqa: B023


def wait_for(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def test_flush_pause_and_go_on(server):
    server.wait_until_idle()
    server.post("/flush_cache", {})
    assert server.get("/server_info")["stats"]["tree_evictable_pages"] == 0
    server.post("/pause_generation", {"mode": "sideways"}, 400)
    server.post("/pause_generation", {"mode": "retract"})
    with (
        server.http() as client,
        client.stream("POST", "/generate", json={"text": "x", "sampling_params": GREEDY, "stream": True}) as answer,
    ):
        assert server.get("/server_info")["stats"]["num_waiting"] == 1
        assert "not finished" in server.post("/flush_cache", {}, 400)["error"]["message"]
        assert server.get("/health") == {"status": "ok"}
        server.post("/continue_generation", {})
        assert "[DONE]" in [line.removeprefix("data: ") for line in answer.iter_lines()]


def test_what_the_server_says_of_itself(server):
    info = server.get("/server_info")
    assert (info["allocation_page"], info["reuse_unit"], info["pool_tokens"]) == (16, "token", {"full": 4096})
    assert server.get("/get_model_info")["is_generation"] is True
