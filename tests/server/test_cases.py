"""Faults that people met in servers like this one, by their numbers; what needs a process or a model is elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hash_engine import HashExecutor
from inside import SHORT, Inside, byte_tokenizer, core_for_text, inside, say, served, until, waiting
from pydantic import BaseModel, ValidationError

from engine.server.native_api import DetokenizeRequest, GenerateRequest
from engine.server.openai_types import ChatRequest, CompletionRequest
from engine.server.response_types import ResponseRequest

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


@served
async def test_b097_a_body_of_20_mb_is_too_large():
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 2**20

    async with inside() as server:
        contents: list[Any] = [b" " * (20 << 20), pieces()]
        for content in contents:
            answer = await server.http.post("/v1/chat/completions", content=content)
            assert (answer.status_code, strict(answer.text)["error"]["code"]) == (413, "body_too_large")
        assert (await server.ask("GET", "/health")).status_code == 200


WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [5] * 9999}), (ChatRequest, {"messages": [], "tools": ["x"] * 9999}),
    (ChatRequest, {"messages": [], "stop": [5] * 9999}),
    (ChatRequest, {"messages": [], "stop_token_ids": ["x"] * 9999}),
    (ChatRequest, {"messages": [], "logit_bias": {str(index): "x" for index in range(9999)}}),
    (CompletionRequest, {"prompt": [1.5] * 9999}), (CompletionRequest, {"prompt": [[1.5]] * 9999}),
    (CompletionRequest, {"prompt": [[1.5] * 9999] * 9}), (ResponseRequest, {"input": [5] * 9999}),
    (ResponseRequest, {"input": "x", "include": [5] * 9999}), (ResponseRequest, {"input": "x", "tools": [5] * 9999}),
    (ResponseRequest, {"input": "x", "metadata": {str(index): 5 for index in range(9999)}}),
    (GenerateRequest, {"input_ids": [1.5] * 9999}), (GenerateRequest, {"input_ids": [[1.5]] * 9999}),
    (GenerateRequest, {"text": [5] * 9999}), (GenerateRequest, {"text": "x", "rid": [5] * 9999}),
    (GenerateRequest, {"text": "x", "sampling_params": [5] * 9999}), (DetokenizeRequest, {"tokens": ["x"] * 9999}),
    (GenerateRequest, {"text": "x", "token_ids_logprob": ["x"] * 9999}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=[f"{kind.__name__}-{[*body][-1]}" for kind, body in WRONG])
def test_b102_a_wrong_list_is_refused_at_its_first_wrong_item(kind, body):
    """A description of each of a million items takes half a minute, in which nobody is served."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 15


@served
async def test_b102_a_prompt_beyond_the_context_is_refused_before_its_ids_are_looked_at():
    async with inside(core=core_for_text()) as server:
        ids = [-1] * server.serving.context_len
        for path, body in (("/v1/completions", {"prompt": ids}), ("/generate", {"input_ids": ids})):
            assert (await server.post(path, body, 400))["error"]["code"] == "context_length_exceeded"
        assert server.client.sent == []
        text = (await server.post("/detokenize", {"tokens": [65] * 1000}))["text"]
        assert text == byte_tokenizer().decode([65] * 1000)


def answers_with(server: Inside, prompt_len: int, token_ids: list[int]) -> None:
    """The model says this."""
    runner: Any = server.client.core.runner
    compute = runner._compute

    def scripted(row: int, start: int, ids: list[int]) -> int:
        compute(row, start, ids)
        return token_ids[max(0, start + len(ids) - prompt_len)]

    runner._compute = scripted


@served
async def test_b104_an_answer_may_end_on_half_a_character():
    """Only its end is replaced: no event before the last shows what is not a character yet."""
    async with inside(core=core_for_text()) as server:
        whole = byte_tokenizer().encode("a🙂é🙂", add_special_tokens=False)
        said = byte_tokenizer().decode(whole[:-1])
        assert said == "a🙂é\ufffd", "the last token is a part of the last character"
        answers_with(server, 4, whole)
        body = {**COMPLETION, "max_tokens": len(whole) - 1}
        assert (await server.post("/v1/completions", body))["choices"][0]["text"] == said
        texts = [event["choices"][0]["text"] for event in await chunks(server, "/v1/completions", body)]
        assert "".join(texts) == said
        assert not any("\ufffd" in text for text in texts[:-1])
        native = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": len(whole) - 1, "temperature": 0}}
        events = await chunks(server, "/generate", native)
        assert events[-1]["text"] == said
        assert not any("\ufffd" in event["text"] for event in events[:-1])


WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("n", [1, 2])
@served
async def test_b099_an_answer_of_no_numbers_is_an_error_of_its_request_alone(path, body, n):
    async with inside(core=core_for_text()) as server:
        good = {"prompt": [9, 9, 9], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        alone = (await server.post("/v1/completions", good))["choices"][0]["text"]
        core = server.client.core
        running, runner = core.scheduler.running, core.runner
        assert isinstance(runner, HashExecutor)
        for stream in (False, True):
            beside = asyncio.create_task(server.post("/v1/completions", good))
            await until(lambda: any(one.num_output for one in running))
            wanted = {**body, "n": n, "max_tokens": 20, **(WITH_USAGE if stream else {})}
            bad = asyncio.create_task(server.ask("POST", path, wanted))
            await until(lambda: len(running) == 1 + n and running[-1].num_output > 1)
            runner.fail_next = 1
            answer = await bad
            if stream:
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
                assert lines.pop() == "[DONE]"
                error, usage = strict(lines.pop())["error"], strict(lines.pop())
                assert usage["choices"] == []
                assert 1 < usage["usage"]["completion_tokens"] < 20 * n
                assert usage["usage"]["prompt_tokens"] > 0
            else:
                assert answer.status_code == 500
                error = strict(answer.text)["error"]
            assert (error["type"], error["code"]) == ("server_error", "generation_failed")
            assert "not finite" in error["message"]
            assert (await beside)["choices"][0]["text"] == alone
            assert (await server.metrics())['num_requests_total{finish_reason="error"}'] == 1 + stream
        assert core.audit() == []


@served
async def test_b099_one_answer_of_a_batch_may_be_an_error():
    """Those of /generate come each with its own end; one alone is an error object, or the last event."""
    async with inside() as server:
        runner = server.client.core.runner
        assert isinstance(runner, HashExecutor)
        await server.post("/pause_generation", {})
        batch = asyncio.create_task(server.post("/generate", {"input_ids": [[5], [6], [7]], "sampling_params": SHORT}))
        await until(waiting(server)(3))
        runner.fail_next = 1
        await server.post("/continue_generation", {})
        ends = [one["meta_info"]["finish_reason"] for one in await batch]
        assert sorted(end["type"] for end in ends) == ["error", "length", "length"]
        runner.fail_next = 1
        [alone] = await server.post("/generate", {"input_ids": [[5]], "sampling_params": SHORT})
        assert alone["meta_info"]["finish_reason"]["type"] == "error", "a batch of one is a batch"
        runner.fail_next = 1
        assert (await server.post("/generate", say([5]), 500))["error"]["code"] == "generation_failed"
        runner.fail_next = 1
        events = await chunks(server, "/generate", say([8]))
        assert events[-1]["error"]["code"] == "generation_failed"


@served
async def test_b099_a_response_of_no_numbers_has_failed_and_is_not_kept():
    async with inside(core=core_for_text()) as server:
        runner = server.client.core.runner
        assert isinstance(runner, HashExecutor)
        runner.fail_next = 1
        body = {"input": "x", "max_output_tokens": 5, "temperature": 0}
        whole = await server.post("/v1/responses", body)
        runner.fail_next = 1
        stream = await server.ask("POST", "/v1/responses", {**body, "stream": True})
        last = [strict(line.removeprefix("data: ")) for line in stream.text.splitlines() if line.startswith("data: ")][
            -1
        ]
        assert last["type"] == "response.failed"
        for response in (whole, last["response"]):
            assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
            assert response["usage"]["input_tokens"] > 0
            assert (await server.ask("GET", f"/v1/responses/{response['id']}")).status_code == 404
        assert (await server.post("/v1/responses", body))["status"] == "completed"
        assert server.client.core.audit() == []


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@served
async def test_b106_b115_a_stream_that_is_aborted_says_what_it_has_used(path, body):
    async with inside(core=core_for_text()) as server:
        wanted = {**body, **WITH_USAGE, "max_tokens": 100, "rid": "cut", "n": 2}
        stream = asyncio.create_task(chunks(server, path, wanted))
        running = server.client.core.scheduler.running
        await until(lambda: len(running) == 2 and all(one.num_output > 3 for one in running))
        await server.post("/abort_request", {"rid": "cut"})
        events = await stream
        last = events.pop()
        assert last["choices"] == []
        assert 8 <= last["usage"]["completion_tokens"] < 200
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        choices = [choice for event in events for choice in event["choices"]]
        assert {one["index"]: one["finish_reason"] for one in choices if one["finish_reason"]} == {
            0: "abort",
            1: "abort",
        }
