"""Faults that people met in servers like this one, by their numbers; what needs a process or a model is elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from inside import Inside, core_for_text, inside, say, served, until, waiting

COMPLETION = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def strict(text: str) -> Any:
    """JSON without Python's own numbers."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def chunks(server: Inside, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.ask("POST", path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [strict(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@served
async def test_b093_b095_prompts_about_the_limit(stream):
    """One position must be free, unless it is refused with both numbers; more tokens than there is room for are cut."""
    async with inside(core=core_for_text()) as server:
        limit = server.serving.context_len
        for length, max_tokens in itertools.product((limit - 2, limit - 1, limit, limit + 1, 10_000), (None, 1, 2, 64)):
            body = {**COMPLETION, "prompt": [5] * length, "max_tokens": max_tokens, "stream": stream}
            answer = await server.ask("POST", "/v1/completions", body)
            if length < limit:
                assert answer.status_code == 200
                assert '"length"' in answer.text
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (
                400, "context_length_exceeded", "invalid_request_error",
            )  # fmt: skip
            assert str(limit) in error["message"]
            assert str(length) in error["message"]
        words = {"messages": [{"role": "user", "content": "secret" + "x" * limit}], "stream": stream}
        assert (await server.post("/v1/chat/completions", words, 400))["error"]["code"] == "context_length_exceeded"
        assert server.client.num_open == 0


BODIES = [
    (b"", 400), (b"[]", 400), (b"{} x", 400), (b"\xff\xfe{}", 400), ("{\"messages\": \"汉\"}".encode("gbk"), 400),
    (b"\xef\xbb\xbf{\"messages\": []}", 400), (b'{"messages": [' + b"[" * 10_000 + b"]" * 10_000 + b"]}", 400),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "top_p": Infinity}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "stream": "often"}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot", "stream": true}', 400),
    (b'{"messages": 1, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}', 200),
    (b'{"messages": [{"role": "user", "content": "x\\u0000"}], "max_tokens": 1}', 200),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[str(body)[:40] for body, _ in BODIES])
@served
async def test_b097_b104_bodies_that_are_no_request(body, status):
    async with inside(core=core_for_text()) as server:
        for kind in ("application/json", "text/plain"):
            answer = await server.http.post("/v1/chat/completions", content=body, headers={"content-type": kind})
            assert answer.status_code == (status if kind == "application/json" else 400), answer.text
            said = strict(answer.text)
            if answer.status_code != 200:
                assert set(said["error"]) == {"message", "type", "param", "code"}
        assert (await server.ask("GET", "/health")).status_code == 200


V = 400
IDS: list[tuple[Any, int]] = [([-1], 400), ([V], 400), ([V - 1], 200), ([2**31], 400), ([1.5], 400), (["a"], 400)]
IDS += [([[[1]]], 400), ([None], 400), ([[5], "x"], 400)]


@pytest.mark.parametrize(("ids", "status"), IDS, ids=str)
@served
async def test_b100_ids_that_the_model_does_not_have(ids, status):
    async with inside(core=core_for_text()) as server:
        if ids != ["a"]:  # one text
            await server.post("/v1/completions", {"prompt": ids, "max_tokens": 1}, status)
        native = await server.ask("POST", "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
        assert native.status_code == status
        for token_id in ("191222", "-1", "x", "1.5"):
            body = {**COMPLETION, "logit_bias": {token_id: 1}}
            assert "logit_bias" in str(await server.post("/v1/completions", body, 400))


LARGE = [
    {"n": 10**6}, {"best_of": 10**6}, {"logprobs": V}, {"logprobs": -1}, {"stop": ["x"] * 10**5}, {"stop": "x" * 2**20},
    {"max_tokens": 10**30}, {"seed": -(10**30)}, {"priority": 10**30}, {"min_tokens": 10**9}, {"top_k": 10**12},
    {"prompt": ["x"] * 300}, {"prompt": [[5]] * 100, "n": 3}, {"rid": "x" * 10_000}, {"rid": ""},
]  # fmt: skip


@pytest.mark.parametrize("change", LARGE, ids=lambda change: str(change)[:30])
@served
async def test_b102_b114_numbers_and_names_have_limits(change):
    async with inside(core=core_for_text()) as server:
        status = 200 if "seed" in change else 400
        error = (await server.post("/v1/completions", {**COMPLETION, **change}, status)).get("error")
        assert error is None or len(error["message"]) < 1000
        if "rid" in change:
            await server.post("/v1/chat/completions", {**CHAT, **change}, 400)
        assert server.client.num_open == 0


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("asked", [None, False, True])
@served
async def test_b106_b115_choices_and_usage_of_a_stream(path, body, n, asked):
    """Chunks go by their choice's index: a role once, an end once, and usage once where it is asked for, at the end."""
    async with inside(core=core_for_text()) as server:
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        sampled = {**body, "n": n, "temperature": 1.0, "seed": 3}
        whole = await server.post(path, sampled)
        events = await chunks(server, path, {**sampled, **options})
        if asked:
            last = events.pop()
            assert (last["choices"], last["usage"]["total_tokens"]) == ([], whole["usage"]["total_tokens"])
            assert all(event["usage"] is None for event in events)
        assert all(asked or "usage" not in event for event in events)
        assert len({event["id"] for event in events}) == 1
        of: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            [choice] = event["choices"]
            of.setdefault(choice["index"], []).append(choice)
        assert sorted(of) == list(range(n))
        for choice in whole["choices"]:
            mine = of[choice["index"]]
            assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
            if path == "/v1/completions":
                assert "".join(one["text"] for one in mine) == choice["text"]
            else:
                assert [one["delta"].get("role") for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
                assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]


@served
async def test_b115_choices_of_several_prompts_have_numbers_of_their_own():
    async with inside() as server:
        body = {**COMPLETION, "prompt": [[5, 6], [7, 8], [9]], "n": 2}
        whole = await server.post("/v1/completions", body)
        texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert [*texts] == list(range(6))
        assert texts[0] == texts[1] != texts[2] == texts[3] != texts[4] == texts[5]
        found = dict.fromkeys(range(6), "")
        for event in await chunks(server, "/v1/completions", body):
            for choice in event["choices"]:
                found[choice["index"]] += choice["text"]
        assert found == texts


@served
async def test_b115_each_of_n_answers_has_a_text_of_its_own():
    """A stop string is found in each, although their tokens come in turns."""
    async with inside() as server:
        body = say([5, 6])
        body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": 12}
        text = (await server.post("/generate", body))["text"]
        for stop in (text[3:6], text[4:6]):
            body["sampling_params"] |= {"n": 3, "stop": [stop]}
            answers = await server.post("/generate", body)
            assert [answer["text"] for answer in answers] == [text[: text.index(stop)]] * 3
            assert {answer["meta_info"]["finish_reason"]["matched"] for answer in answers} == {stop}


@served
async def test_b104_an_error_may_name_what_cannot_be_written():
    async with inside(core=core_for_text()) as server:
        body = b'{"text": "x", "sampling_params": {"\\ud800": 1}}'
        answer = await server.http.post("/generate", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling_params.\ud800")


@served
async def test_b114_a_name_may_come_again_when_its_request_has_ended():
    async with inside() as server:
        for name in ("a\nb", "漢", "x" * 256, " "):
            for _ in range(2):
                answer = await server.post("/generate", say([5], rid=name))
                assert answer["meta_info"]["id"] == name
            await server.post("/pause_generation", {})
            first = asyncio.create_task(server.post("/generate", say([5], rid=name)))
            await until(waiting(server)(1))
            for path, body in (("/generate", say([5], rid=name)), ("/v1/completions", {**COMPLETION, "rid": name})):
                assert "still running" in (await server.post(path, body, 400))["error"]["message"]
            await server.post("/continue_generation", {})
            assert (await first)["meta_info"]["finish_reason"]["type"] == "length"
        assert server.client.core.audit() == []
