"""The OpenAI protocol against a real server, with the official client where it reaches."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

TINY = {"temperature": 0, "seed": 0}
PROMPTS = [
    "hello there", "漢字かな", "🙂🙃 and more", "a", "  spaces  ", "line\nbreak", "ünïcode", "0123456789" * 5,
]  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def name(client) -> str:
    [card] = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    return card.id


def streamed(chunks: Any) -> tuple[str, str | None, Any]:
    """Text, finish reason and usage of a chat stream."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


def test_a_chat_answer_and_its_usage(client, name):
    said = [{"role": "user", "content": "hello"}]
    first = client.chat.completions.create(model=name, messages=said, max_tokens=7, **TINY)
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].finish_reason == "length"
    assert first.usage.completion_tokens == 7
    assert first.usage.total_tokens == first.usage.prompt_tokens + 7
    again = client.chat.completions.create(model=name, messages=said, max_completion_tokens=7, max_tokens=3, **TINY)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_whole_answer_in_pieces(client, name, prompt):
    said = [{"role": "user", "content": prompt}]
    options = {"model": name, "messages": said, "max_tokens": 24, **TINY}
    whole = client.chat.completions.create(**options)
    text, reason, usage = streamed(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert text == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens
    plain, _, usage = streamed(client.chat.completions.create(**options, stream=True))
    assert (plain, usage) == (text, None)


def test_stop_strings_cut_the_same_streamed_or_not(client, name):
    options = {"model": name, "messages": [{"role": "user", "content": "go"}], "max_tokens": 30, **TINY}
    text = client.chat.completions.create(**options).choices[0].message.content
    for start in range(0, len(text) - 2, 3):
        stop = text[start : start + 2]
        whole = client.chat.completions.create(**options, stop=[stop])
        assert whole.choices[0].message.content == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        assert streamed(client.chat.completions.create(**options, stop=stop, stream=True))[:2] == (
            text[: text.index(stop)],
            "stop",
        )


def test_many_at_once_get_each_their_own(client, name):
    def ask(prompt: str) -> tuple[str, str]:
        options = {"model": name, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16, **TINY}
        whole = client.chat.completions.create(**options).choices[0].message.content
        return whole, streamed(client.chat.completions.create(**options, stream=True))[0]

    alone = [ask(prompt)[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, PROMPTS * 4))
    for index, (whole, text) in enumerate(together):
        assert whole == text == alone[index % len(PROMPTS)]


def test_answers_with_n_and_seeds(client, name):
    options = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 1.0}
    answers = client.chat.completions.create(**options, n=3, seed=5).choices
    assert [answer.index for answer in answers] == [0, 1, 2]
    texts = [answer.message.content for answer in answers]
    assert len(set(texts)) == 3
    again = client.chat.completions.create(**options, n=3, seed=5).choices
    assert [answer.message.content for answer in again] == texts
    pieces = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**options, n=3, seed=5, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert list(pieces.values()) == texts


def test_logprobs_of_a_chat(client, name):
    options = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **TINY}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=3).choices[0]
    content = answer.logprobs.content
    assert len(content) == 5
    for one in content:
        assert one.logprob <= 0
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob, "greedy takes the best"
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == answer.message.content
    streamed_content = []
    for chunk in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            streamed_content += choice.logprobs.content if choice.logprobs else []
    assert [one.logprob for one in streamed_content] == pytest.approx([one.logprob for one in content], abs=1e-5)


def test_completions_of_all_forms(client, name, server):
    one = client.completions.create(model=name, prompt="hello", max_tokens=6, **TINY)
    ids = server.post("/tokenize", {"prompt": "hello"})["tokens"]
    by_ids = client.completions.create(model=name, prompt=ids, max_tokens=6, **TINY)
    many = client.completions.create(model=name, prompt=["hello", "other"], max_tokens=6, n=2, **TINY)
    batch = client.completions.create(model=name, prompt=[ids, ids], max_tokens=6, **TINY)
    assert by_ids.choices[0].text == one.choices[0].text
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == one.choices[0].text
    assert [choice.text for choice in batch.choices] == [one.choices[0].text] * 2
    assert many.usage.completion_tokens == 24
    assert many.usage.prompt_tokens == len(ids) + server.post("/tokenize", {"prompt": "other"})["count"]
    assert client.completions.create(model=name, prompt="hello", **TINY).usage.completion_tokens == 16
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in client.completions.create(
        model=name, prompt=["hello", "other"], max_tokens=6, n=2, stream=True, **TINY
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in many.choices]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(client, name, server, max_tokens):
    prompt = "hello there"
    count = server.post("/tokenize", {"prompt": prompt})["count"]
    answer = client.completions.create(model=name, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=2, **TINY)
    [choice] = answer.choices
    assert choice.text.startswith(prompt)
    assert len(choice.logprobs.tokens) == count + max_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert (answer.usage.completion_tokens, choice.finish_reason) == (max_tokens, "length")
    assert (choice.text == prompt) is (max_tokens == 0)


def strict(text: str) -> Any:
    """JSON without Python's own numbers."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def completion_events(server, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http() as client:
        answer = client.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [strict(line) for line in lines[:-1]]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_few_tokens_echo_and_logprobs_streamed_or_not(server, logprobs, n):
    """B096, B105: the same text and logprobs, finite ones, and each with the place where its token begins."""
    prompt = [5, 6, 7, 8]
    decoded = server.post("/detokenize", {"tokens": prompt})["text"]
    for max_tokens, echo in itertools.product((0, 1, 3), (False, True)):
        asked = {"max_tokens": max_tokens, "echo": echo, "logprobs": logprobs, "n": n, "top_p": 0.1, "ignore_eos": True}
        body = {"prompt": prompt, "temperature": 0.0, **asked}
        whole = server.post("/v1/completions", body)
        usage = {**whole["usage"], "prompt_tokens_details": None}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, n * max_tokens)
        events = completion_events(server, {**body, "stream_options": {"include_usage": True}})
        last = events.pop()
        assert (last["choices"], {**last["usage"], "prompt_tokens_details": None}) == ([], usage)
        assert all(event["usage"] is None for event in events)
        for choice in whole["choices"]:
            mine = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
            assert "".join(one["text"] for one in mine) == choice["text"]
            assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
            assert choice["text"].startswith(decoded if echo else "")
            check_logprobs(choice["logprobs"], mine, max_tokens, 4 if echo else 0, logprobs)


def check_logprobs(found, pieces, max_tokens: int, num_echoed: int, logprobs: int | None) -> None:
    if logprobs is None:
        assert found is None
        return
    count = max_tokens + num_echoed
    assert [len(found[name]) for name in found] == [count] * 4
    firsts = [value is None for value in found["token_logprobs"]]
    assert firsts == [bool(num_echoed) and place == 0 for place in range(count)]
    streamed = [one["logprobs"] for one in pieces if one["logprobs"]]
    assert [token for one in streamed for token in one["tokens"]] == found["tokens"]
    values = [value for one in streamed for value in one["token_logprobs"]]
    assert values == [value if value is None else pytest.approx(value, abs=1e-4) for value in found["token_logprobs"]]
    assert [best is None for best in found["top_logprobs"]] == firsts
    best = [len(one) for one in found["top_logprobs"] if one is not None]
    assert all(min(1, logprobs) <= one <= logprobs for one in best), "by text, which halves of characters share"
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:place]) for place in range(count)]


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"top_p": 0}, "top_p"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"stop_token_ids": [1 << 31]}, "stop_token_ids"),
    ({"max_tokens": -5}, "max_new_tokens"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
    ({"rid": ""}, "rid"),
    ({"rid": "x" * 257}, "rid"),
]


@pytest.mark.parametrize(("change", "field"), BAD_CHAT, ids=lambda value: json.dumps(value)[:40])
@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
def test_bad_input_is_a_400_with_the_error_object(server, change, field, stream):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream, **change}
    error = server.post("/v1/chat/completions", body, status=400)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "nul", '{"messages": NaN}'])
def test_a_body_that_is_no_request_is_a_400(server, body):
    with server.http() as client:
        answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_says_both_numbers(server):
    limit = server.get("/get_model_info")["context_length"]
    for stream in (False, True):
        body = {"prompt": [5] * limit, "max_tokens": 1, "stream": stream}
        error = server.post("/v1/completions", body, status=400)["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(limit) in error["message"]
    fits = server.post("/v1/completions", {"prompt": [5] * (limit - 1), "max_tokens": 9, "ignore_eos": True})
    assert fits["usage"]["completion_tokens"] == 1
    assert fits["choices"][0]["finish_reason"] == "length"


def test_unknown_models_and_paths(server):
    body = {"model": "gpt-none", "messages": [{"role": "user", "content": "x"}]}
    assert "gpt-none" in server.post("/v1/chat/completions", body, status=404)["error"]["message"]
    assert server.get("/v1/nothing", status=404)["error"]["type"] == "not_found_error"
    assert "error" in server.get("/v1/models/none", status=404)


def test_one_bad_prompt_of_many_starts_none(server):
    server.post("/v1/completions", {"prompt": ["ok", ""], "max_tokens": 2000}, status=400)
    server.post("/v1/completions", {"prompt": [[5], [99999]], "max_tokens": 2}, status=400)
    server.wait_until_idle()


def test_a_client_that_hangs_up_frees_its_request(server):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 4}
    for stream in (True, False):
        with server.http() as client:
            try:
                request = client.build_request("POST", "/v1/completions", json={**body, "stream": stream}, timeout=0.3)
                answer = client.send(request, stream=True)
                next(answer.iter_lines())
                answer.close()
            except httpx.TimeoutException:
                pass
        server.wait_until_idle()
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})["usage"]["completion_tokens"] == 2


def test_a_client_that_hangs_up_ends_a_request_that_does_not_move(server):
    """While nothing is computed no request ends by itself, so only its client's going can have ended it."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "n": 2}
    server.wait_until_idle()
    server.post("/pause_generation", {})
    try:
        for stream in (True, False):
            with server.http() as client:
                request = client.build_request(
                    "POST", "/v1/chat/completions", json={**body, "stream": stream}, timeout=1.0
                )
                with suppress(httpx.TimeoutException):
                    client.send(request, stream=True).close()
            server.wait_until_idle()
    finally:
        server.post("/continue_generation", {})


def test_the_default_model_answers_through_the_official_client(smollm2_server):
    client = openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none")
    said = [{"role": "user", "content": "Name the capital of France."}]
    answer = client.chat.completions.create(model="smol", messages=said, max_tokens=20, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client.chat.completions.create(model="smol", messages=said, temperature=0, stream=True))[0] == (
        answer.choices[0].message.content
    )
