"""Structured output over HTTP: forms, refusals, and that a bad schema costs nobody else anything."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytest.importorskip("xgrammar")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "n"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
SAID = [{"role": "user", "content": "where?"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check(text: str) -> None:
    place = json.loads(text)
    assert list(place) == ["city", "n"]
    assert place["city"] in ("Oslo", "Rome")
    assert 1 <= place["n"] <= 9


def test_chat_and_completions_keep_a_schema(client):
    options = {"model": "default", "max_tokens": 200, "response_format": FORMAT, "temperature": 1.0}
    for seed in range(4):
        whole = client.chat.completions.create(messages=SAID, **options, seed=seed).choices[0]
        check(whole.message.content)
        assert whole.finish_reason == "stop"
        chunks = client.chat.completions.create(messages=SAID, **options, seed=seed, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    texts = [one.message.content for one in client.chat.completions.create(messages=SAID, n=3, **options).choices]
    for text in texts:
        check(text)
    extra = {"response_format": FORMAT}
    check(client.completions.create(model="default", prompt="x", max_tokens=200, extra_body=extra).choices[0].text)


def test_regex_and_ebnf_fields(server):
    for path, prompt in (("/v1/chat/completions", {"messages": SAID}), ("/v1/completions", {"prompt": "x"})):
        for form, pattern in (({"regex": "[ab]{3}c"}, "[ab]{3}c"), ({"ebnf": 'root ::= "u" | "vw"'}, "u|vw")):
            [choice] = server.post(path, {**prompt, "max_tokens": 20, **form})["choices"]
            assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])


TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}
STRUCTURAL = {"type": "structural_tag", "format": TAG}


def test_structural_tags(server, client):
    asked = {"model": "default", "max_tokens": 40, "temperature": 1.0}
    answer = client.chat.completions.create(messages=SAID, **asked, response_format=STRUCTURAL).choices[0]
    assert re.fullmatch("<n>[0-9]{3}</n>", answer.message.content)
    [choice] = server.post("/v1/completions", {**asked, "prompt": "x", "response_format": STRUCTURAL})["choices"]
    assert re.fullmatch("<n>[0-9]{3}</n>", choice["text"])
    for form in (STRUCTURAL, json.dumps(STRUCTURAL)):
        sampling = {"max_new_tokens": 40, "structural_tag": form}
        assert re.fullmatch(
            "<n>[0-9]{3}</n>", server.post("/generate", {"text": "x", "sampling_params": sampling})["text"]
        )
    answered = server.post("/v1/responses", {"input": "x", "text": {"format": STRUCTURAL}})["output"]
    assert re.fullmatch("<n>[0-9]{3}</n>", answered[0]["content"][0]["text"])
    wrong = {"type": "structural_tag", "structures": [], "triggers": []}
    assert (
        server.post("/v1/responses", {"input": "x", "text": {"format": wrong}}, 400)["error"]["param"] == "text.format"
    )


def test_native_sampling_parameters(server):
    for form in ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}):
        answer = server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 200, **form}})
        check(answer["text"])
    for form, pattern in (({"regex": "x{2,5}"}, "x{2,5}"), ({"ebnf": 'root ::= "q"+'}, "q+")):
        answer = server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 20, **form}})
        assert re.fullmatch(pattern, answer["text"])


def test_a_session_goes_on_in_a_schema(server):
    name = server.post("/open_session", {})
    for text in ("first", "second"):
        sampling = {"max_new_tokens": 100, "json_schema": SCHEMA}
        body = {"text": text, "session_params": {"id": name}, "sampling_params": sampling}
        check(server.post("/generate", body)["text"])
    server.post("/close_session", {"session_id": name})


BAD = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "Unsupported type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}}, "Cannot find"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "must be an object"),
    ({"response_format": {"type": "json_schema"}}, "name and schema"),
    ({"response_format": {"type": "yaml"}}, "must be text"),
    ({"response_format": {"type": "structural_tag"}}, "with format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token", "token": "x"}}}, "cannot be used"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<a"]}}, "cannot be used"),
    ({"regex": "(?=a)b"}, "Lookahead"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "one of"),
    ({"ebnf": "nothing"}, "cannot be used"),
]


def test_bad_schemas_beside_a_running_answer(server, client):
    """Each refused with its reason, while an answer streams, whose text is what it is alone."""
    long = {"model": "default", "messages": SAID, "max_tokens": 400, "temperature": 0}
    alone = client.chat.completions.create(**long).choices[0].message.content
    with ThreadPoolExecutor(2) as pool:
        refusals = pool.submit(lambda: [refused(server, change) for change, _ in BAD])
        texts = []
        while not refusals.done() or not texts:
            texts.append(client.chat.completions.create(**long).choices[0].message.content)
    assert set(texts) == {alone}
    for error, (_, reason) in zip(refusals.result(), BAD, strict=True):
        assert error["type"] == "invalid_request_error"
        assert reason in error["message"]
    server.wait_until_idle()


def test_large_numbers_many_branches_and_recursion(server):
    """B098: schemas that have brought servers down are kept here."""
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}, "v": {"enum": [1]}}, "required": ["v"]}
    branches = [f"w{index}" for index in range(5000)]
    for schema, is_kept in (
        ({"type": "integer", "maximum": 20_000_000_000}, lambda value: isinstance(value, int)),
        ({"enum": branches}, lambda value: value in branches),
        ({"$ref": "#/$defs/node", "$defs": {"node": node}}, lambda value: value["v"] == 1),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": SAID, "max_tokens": 300, "seed": 1, "response_format": form}
        [choice] = server.post("/v1/chat/completions", body)["choices"]
        assert choice["finish_reason"] == "length" or is_kept(json.loads(choice["message"]["content"]))


def refused(server, change: dict[str, Any]) -> dict[str, Any]:
    error: dict[str, Any] = server.post("/v1/chat/completions", {"messages": SAID, **change}, 400)["error"]
    return error


def test_an_abort_while_the_grammar_compiles(server):
    body = {"text": "x", "rid": "slow", "sampling_params": {"regex": "[^y]{1,90000}" * 50}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/generate", body, 400)
        while not waiting.done():
            server.post("/abort_request", {"rid": "slow"})
        assert "aborted" in waiting.result()["error"]["message"]
