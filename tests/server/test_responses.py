"""/v1/responses with the official client against real servers: chains, forks, streams, tools, formats, limits."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

GREEDY: dict[str, Any] = {"model": "default", "temperature": 0}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}


def of(server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return of(server)


def cached(response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def num_sessions(server, key: str | None = None) -> int:
    return server.get("/server_info", key=key)["stats"]["num_sessions"]


def test_a_conversation_of_the_default_model(smollm2_server):
    client = of(smollm2_server)
    first = client.responses.create(model="smol", input="Name the capital of France.", temperature=0)
    assert first.output_text == "The capital of France is Paris."
    assert (first.status, first.object, first.error) == ("completed", "response", None)
    said = [
        {"role": "user", "content": "Name the capital of France."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    wanted = client.chat.completions.create(model="smol", messages=said, max_tokens=20, temperature=0)
    options = {"model": "smol", "input": "And of Italy?", "previous_response_id": first.id, "max_output_tokens": 20}
    second = client.responses.create(**options, temperature=0)
    assert second.output_text == wanted.choices[0].message.content
    assert second.usage.input_tokens == wanted.usage.prompt_tokens
    # The held row has all but the last token of the first answer. The same again is a fork of what it computed.
    assert cached(second) == first.usage.total_tokens - 1
    branch = client.responses.create(**options, temperature=0)
    assert (branch.output_text, cached(branch)) == (second.output_text, second.usage.input_tokens - 1)
    events = list(client.responses.create(**options, temperature=0, stream=True))
    assert events[-1].response.output_text == second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text


def check_events(events: list[Any]) -> Any:
    """The order that the protocol promises, and that the pieces make the whole; returns the response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    whole = events[-1].response
    assert kinds[-1] == f"response.{whole.status}"
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    texts: dict[str, str] = {}
    added: dict[str, Any] = {}
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(added)
            assert not getattr(event.item, "content", None)
            assert not getattr(event.item, "arguments", None)
            added[event.item.id] = None
        elif event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif event.type.endswith("_text.done"):
            assert event.text == texts.get(event.item_id, "")
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == texts[event.item_id]
        elif event.type == "response.output_item.done":
            added[event.item.id] = event.item
    assert [item.model_dump() for item in added.values()] == [item.model_dump() for item in whole.output]
    return whole


def without_names(response: Any) -> Any:
    """All but ids and times."""
    names = ("id", "call_id", "created_at", "completed_at", "usage", "previous_response_id")
    if isinstance(response, dict):
        return {key: without_names(value) for key, value in response.items() if key not in names}
    return [without_names(value) for value in response] if isinstance(response, list) else response


@pytest.mark.parametrize("max_output_tokens", [1, 20])
def test_a_stream_is_the_response_in_events(client, max_output_tokens):
    options = {**GREEDY, "input": "漢字 🙂", "instructions": "be odd", "max_output_tokens": max_output_tokens}
    whole = client.responses.create(**options)
    streamed = check_events(list(client.responses.create(**options, stream=True)))
    assert without_names(streamed.model_dump()) == without_names(whole.model_dump())
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == max_output_tokens
    with client.responses.stream(**options) as stream:  # the client's own accumulator agrees
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_chains_and_resent_conversations_say_the_same(smollm2_server):
    """Tokens of the model's own answers are those of their text here, so both ways compute the same."""
    client, said, chain = of(smollm2_server), [], []
    options = {"model": "smol", "temperature": 0, "max_output_tokens": 6}
    for text in ("Say a colour.", "Another.", "A third."):
        said.append({"role": "user", "content": text})
        previous = {"previous_response_id": chain[-1].id} if chain else {}
        chain.append(client.responses.create(**options, input=text, instructions="Be brief.", **previous))
        alone = client.responses.create(**options, input=said, instructions="Be brief.", store=False)
        assert (chain[-1].output_text, chain[-1].usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
        assert cached(chain[-1]) == (chain[-2].usage.total_tokens - 1 if len(chain) > 1 else 0)
        said.append({"role": "assistant", "content": chain[-1].output_text})
    # New instructions change the front: what is behind it cannot be used, and is not.
    options["input"] = [*said[:2], {"role": "user", "content": "x"}]
    alone = client.responses.create(**options, instructions="Shout.", store=False)
    options |= {"input": "x", "previous_response_id": chain[0].id}
    assert client.responses.create(**options, instructions="Shout.").output_text == alone.output_text


def test_every_point_can_be_continued_by_several_at_once(server, client):
    options = {**GREEDY, "max_output_tokens": 8}
    chain, wanted = [], []
    for index in range(4):
        previous = {"previous_response_id": chain[-1].id} if chain else {}
        chain.append(client.responses.create(**options, input=f"turn {index}", **previous))
        if index:
            wanted.append((chain[-1].output_text, chain[-1].usage.input_tokens))

    def again(point: int) -> tuple[str, int, bool]:
        first = chain[point]
        answer = client.responses.create(**options, input=f"turn {point + 1}", previous_response_id=first.id)
        return answer.output_text, answer.usage.input_tokens, cached(answer) >= first.usage.total_tokens - 1

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(again, [0, 1, 2] * 3))
    assert found == [(*one, True) for one in wanted] * 3
    server.wait_until_idle()
    server.post("/flush_cache", {})  # rows go, histories stay
    assert [again(point)[:2] for point in (0, 1, 2)] == wanted
    server.wait_until_idle()


def test_what_is_shared_leaves_a_token_to_compute():
    from engine.server.response_turns import _shared

    for history, ids, shared in (
        ([], [1], 0),
        ([1, 2, 3], [1, 2], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 9, 3], [1, 2, 3], 1),
    ):
        assert _shared(np.array(history, dtype=np.int32), np.array(ids, dtype=np.int32)) == shared


def test_a_stop_string_cuts_a_response_and_the_conversation_goes_on(smollm2_server):
    client = of(smollm2_server)
    options = {"model": "smol", "temperature": 0, "max_output_tokens": 8}
    asked = "Name the capital of France."
    cut = client.responses.create(**options, input=asked, extra_body={"stop": " of Fr"})
    assert (cut.output_text, cut.status) == ("The capital", "completed")
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": cut.output_text}]
    alone = client.responses.create(**options, input=[*said, {"role": "user", "content": "on"}], store=False)
    going_on = client.responses.create(**options, input="on", previous_response_id=cut.id)
    assert (going_on.output_text, going_on.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)


def test_what_is_kept_and_what_is_not(server, client):
    kept = client.responses.create(**GREEDY, input="a", max_output_tokens=2, metadata={"k": "v"})
    assert client.responses.retrieve(kept.id).model_dump() == kept.model_dump()
    [item] = client.responses.input_items.list(kept.id).data
    assert item.content[0].text == "a"
    going_on = client.responses.create(**GREEDY, input="b", max_output_tokens=2, previous_response_id=kept.id)
    before = num_sessions(server)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    assert num_sessions(server) == before, "the conversation goes on"
    again = client.responses.create(**GREEDY, input="c", max_output_tokens=2, previous_response_id=going_on.id)
    for one in (going_on, again):
        client.responses.delete(one.id)
    assert num_sessions(server) == before - 1
    loose = client.responses.create(**GREEDY, input="a", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(loose.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**GREEDY, input="b", previous_response_id=loose.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert num_sessions(server) == before - 1


def test_a_client_that_hangs_up_leaves_the_conversation_as_it_was(server, client):
    first = client.responses.create(**GREEDY, input="a", max_output_tokens=4)
    before = num_sessions(server)
    for previous in (first.id, openai.NOT_GIVEN):
        stream = client.responses.create(**GREEDY, input="b", previous_response_id=previous, stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        server.wait_until_idle()
    assert num_sessions(server) == before
    second = client.responses.create(**GREEDY, input="c", previous_response_id=first.id, max_output_tokens=2)
    assert cached(second) >= first.usage.total_tokens - 1


def test_keys_and_limits_of_what_is_kept(own_server):
    limits = ("--max-stored-responses", "3", "--max-sessions", "6", "--stored-response-ttl-s", "2")
    server = own_server(*limits, "--api-key", "one,two", "--admin-api-key", "boss")
    client, other = of(server, "one"), of(server, "two")
    options = {**GREEDY, "max_output_tokens": 2}
    made = [client.responses.create(**options, input=f"{index}") for index in range(5)]
    for gone in made[:2]:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)
    assert num_sessions(server, "boss") == 3
    client.responses.retrieve(made[-1].id)
    for refused in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            refused(made[-1].id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        other.responses.create(**options, input="b", previous_response_id=made[-1].id)
    opened = [server.post("/open_session", {}, key="one") for _ in range(3)]  # no session is left for a fork
    on = client.responses.create(**options, input="x", previous_response_id=made[-1].id)
    branch = client.responses.create(**options, input="x", previous_response_id=made[-1].id)
    assert (cached(on), branch.output_text) == (made[-1].usage.total_tokens - 1, on.output_text)
    for name in opened:
        server.post("/close_session", {"session_id": name}, key="one")
    assert num_sessions(server, "boss") <= 3
    time.sleep(2.2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(on.id)
    assert num_sessions(server, "boss") == 0


def test_functions_are_called_and_answered(tool_server):
    pytest.importorskip("xgrammar")
    client = of(tool_server)
    named = {"type": "function", "name": "weather"}
    options = {**GREEDY, "tools": [WEATHER], "max_output_tokens": 200}
    for choice in (named, "required"):
        whole = client.responses.create(**options, input="hi", tool_choice=choice, parallel_tool_calls=False)
        [call] = [item for item in whole.output if item.type == "function_call"]
        assert (call.name, whole.status) == ("weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    create = client.responses.create
    events = list(create(**options, input="hi", tool_choice="required", parallel_tool_calls=False, stream=True))
    assert without_names(check_events(events).model_dump()) == without_names(whole.model_dump())
    answer = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    options["max_output_tokens"] = 5
    on = create(**options, input=answer, previous_response_id=whole.id)
    resent = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in whole.output], *answer]
    alone = create(**options, input=resent)
    assert (on.output_text, on.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="no function call in this conversation"):
        create(**options, input=answer)


def test_thinking_is_an_item_of_its_own(tool_server):
    pytest.importorskip("xgrammar")
    client = of(tool_server)
    extra = {"ebnf": 'root ::= "<think>\\nWell.\\n</think>\\n\\nYes."'}
    options = {**GREEDY, "input": "hi", "extra_body": extra}
    whole = client.responses.create(**options)
    thought, message = whole.output
    assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "Well.", "Yes.")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert without_names(check_events(list(client.responses.create(**options, stream=True))).model_dump()) == (
        without_names(whole.model_dump())
    )
    on = client.responses.create(**options, previous_response_id=whole.id)
    assert on.output_text == "Yes."


def test_formats_and_logprobs(client):
    pytest.importorskip("xgrammar")
    schema = WEATHER["parameters"]
    form = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    answer = client.responses.create(model="default", input="x", text=form, max_output_tokens=200)
    assert json.loads(answer.output_text)["city"] in ("Oslo", "Rome")
    json.loads(client.responses.create(**GREEDY, input="x", text={"format": {"type": "json_object"}}).output_text)
    options = {**GREEDY, "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**options, max_output_tokens=5).output[0].content[0]
    assert len(whole.logprobs) == 5
    assert b"".join(bytes(one.bytes) for one in whole.logprobs).decode(errors="replace") == whole.text
    assert all(len(one.top_logprobs) == 2 for one in whole.logprobs)


BAD = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": "\ud800"}, "input"),
    ({"input": "x" * 9000}, "input"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 1000}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": 3}}, "text.format"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {str(index): "x" for index in range(20)}}, "metadata"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_bad_responses_are_refused_and_leave_no_session(server, change, field):
    before = num_sessions(server)
    for stream in (False, True):
        body = {"input": "x", "max_output_tokens": 2, "stream": stream, **change}
        error = server.post("/v1/responses", body, 400)["error"]
        assert field in f"{error['param']} {error['message']}"
    assert num_sessions(server) == before
