"""Tool calls and reasoning over HTTP. A grammar makes even a random model write what a test needs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytest.importorskip("xgrammar")

SAID = [{"role": "user", "content": "hi"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


TOOLS = [
    tool("weather", city={"enum": ["Oslo", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9}),
    tool("now"),
]
NAMED = {"type": "function", "function": {"name": "weather"}}
OPTIONS: dict[str, Any] = {"model": "default", "messages": SAID, "tools": TOOLS, "max_tokens": 250}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(tool_server):
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


def literal(text: str) -> dict[str, Any]:
    """Makes the model write this text."""
    return {"extra_body": {"ebnf": f"root ::= {json.dumps(text)}"}}


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert list(value) == ["city", "days"]
    assert value["city"] in ("Oslo", "Rome")
    assert 1 <= value["days"] <= 9


def joined(chunks: Any) -> dict[int, dict[str, Any]]:
    """What a client puts together from a stream, for each choice."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = whole.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "finish": None})
            one["content"] += choice.delta.content or ""
            one["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                own = one["calls"].setdefault(call.index, ["", ""])
                own[0] += call.function.name or ""
                own[1] += call.function.arguments or ""
                assert call.id.startswith("call_")
            one["finish"] = choice.finish_reason or one["finish"]
    return whole


def of_message(choice: Any) -> dict[str, Any]:
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    content = message.content or ""
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": dict(enumerate(calls)),
        "finish": choice.finish_reason,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_function_is_called(client, temperature):
    options = {**OPTIONS, "tool_choice": NAMED, "temperature": temperature, "seed": 3}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    [call] = whole.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    check_weather(call.function.arguments)
    assert joined(client.chat.completions.create(**options, stream=True)) == {0: of_message(whole)}


def test_some_function_is_called_when_one_is_required(client):
    options = {**OPTIONS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 2.0, "n": 4}
    choices = client.chat.completions.create(**options, seed=1).choices
    names = set()
    for choice in choices:
        [call] = choice.message.tool_calls
        names.add(call.function.name)
        if call.function.name == "weather":
            check_weather(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
    assert names <= {"weather", "now"}
    streamed = joined(client.chat.completions.create(**options, seed=1, stream=True))
    assert streamed == {choice.index: of_message(choice) for choice in choices}


def test_several_calls_where_they_are_welcome(client):
    answer = client.chat.completions.create(**OPTIONS, tool_choice="required", temperature=1.0, seed=2).choices[0]
    assert answer.message.tool_calls
    assert not answer.message.content
    for call in answer.message.tool_calls[:-1]:
        assert call.function.name in ("weather", "now")


TEXTS = [
    "no call",
    f"I look.\n\n{CALL}",
    f"<think>\nWhich? {CALL}\n</think>\n\n{CALL}\n{CALL}",
    "<think>\nshort\n</think>\n\nno call after all",
    "<tool_call>\nnothing like it\n</tool_call> and on",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "a <tool_cal 漢 🙂",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("max_tokens", [250, 20])
def test_a_stream_is_the_whole_reply_and_shows_no_markup(client, text, max_tokens):
    options = {**OPTIONS, "max_tokens": max_tokens, "temperature": 0, **literal(text)}
    whole = of_message(client.chat.completions.create(**options).choices[0])
    assert joined(client.chat.completions.create(**options, stream=True)) == {0: whole}
    assert not any(mark in whole["content"] for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    if max_tokens == 250:
        thought, _, answer = text.partition("</think>") if "<think>" in text else ("", "", text)
        assert whole["reasoning"] == thought.removeprefix("<think>").strip()
        assert len(whole["calls"]) == answer.count(CALL)
        assert whole["finish"] == ("tool_calls" if whole["calls"] else "stop")
    else:
        assert whole["finish"] in ("length", "stop")


def test_unfinished_thinking_is_all_reasoning(client):
    options = {**OPTIONS, **literal("<think>\nI think and think and think"), "max_tokens": 25, "temperature": 0}
    whole = of_message(client.chat.completions.create(**options).choices[0])
    assert whole["reasoning"].startswith("I think")
    assert (whole["content"], whole["finish"]) == ("", "length")


def test_thinking_stays_in_the_text_when_that_is_wanted(client):
    options = {**OPTIONS, **literal("<think>a</think>b"), "temperature": 0}
    options["extra_body"]["separate_reasoning"] = False
    assert client.chat.completions.create(**options).choices[0].message.content == "<think>a</think>b"


def test_a_schema_waits_for_the_end_of_thinking_that_the_template_began(client):
    schema = {"name": "s", "schema": TOOLS[0]["function"]["parameters"]}
    extra = {"chat_template_kwargs": {"think": True}}
    options = {"model": "default", "messages": SAID, "max_tokens": 40, "extra_body": extra, "temperature": 1.0}
    response_format = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(**options, seed=0, response_format=response_format).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("length", "")
    assert answer.message.reasoning_content
    assert not answer.message.reasoning_content.startswith("{"), "the schema has begun before the thinking has ended"


def test_calls_and_their_answers_go_through_the_template(client, tool_server, server):
    made = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    said = [*SAID, {"role": "assistant", "content": None, "tool_calls": [made]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "12:30"})
    with_call = client.chat.completions.create(**{**OPTIONS, "messages": said, "max_tokens": 1}).usage.prompt_tokens
    without = client.chat.completions.create(**{**OPTIONS, "max_tokens": 1}).usage.prompt_tokens
    assert with_call > without
    # A template without a place for tools: they are written as text.
    body = {"messages": said, "tools": TOOLS, "max_tokens": 1}
    tokens = server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    assert tokens > server.post("/v1/chat/completions", {**body, "tools": None})["usage"]["prompt_tokens"] + 100
    forced = server.post("/v1/chat/completions", {**body, "tool_choice": NAMED, "max_tokens": 250})["choices"][0]
    check_weather(forced["message"]["tool_calls"][0]["function"]["arguments"])


def test_without_tools_to_call_nothing_is_taken_apart(client):
    options = {**OPTIONS, "tool_choice": "none", **literal(CALL), "temperature": 0}
    assert client.chat.completions.create(**options).choices[0].message.content == CALL


def test_calls_in_xml(own_server):
    """Forced, streamed, cut by a length, and written into the prompt of a template without tools."""
    server = own_server("--tool-call-parser", "qwen3_coder")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for choice in (NAMED, "required"):
        options = {**OPTIONS, "tool_choice": choice, "temperature": 1.0, "seed": 1, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**options).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        [call] = whole.message.tool_calls
        if call.function.name == "weather":
            check_weather(call.function.arguments)
        assert joined(client.chat.completions.create(**options, stream=True)) == {0: of_message(whole)}
    written = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo 漢\n</parameter>\n<parameter=days>\n3\n"
    text = f"I look.\n{written}</parameter>\n</function>\n</tool_call>"
    arguments = '{"city": "Oslo 漢", "days": 3}'
    for max_tokens in (250, 60):
        options = {**OPTIONS, "temperature": 0, **literal(text), "max_tokens": max_tokens}
        whole = of_message(client.chat.completions.create(**options).choices[0])
        assert joined(client.chat.completions.create(**options, stream=True)) == {0: whole}
        assert whole["content"] == "I look."
        [(name, found)] = whole["calls"].values()
        assert name == "weather"
        cut = found.removesuffix("}").removesuffix("\ufffd")
        assert arguments.startswith(cut), "cut anywhere, also between two values and inside a character"
        assert (found == arguments) is (max_tokens == 250)
    made = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    body = {"messages": [*SAID, {"role": "assistant", "tool_calls": [made]}], "max_tokens": 1}
    tokens = server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    spelled = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    body["messages"][1] = {"role": "assistant", "content": spelled}
    assert server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"] == tokens


BAD = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [tool("no spaces please")]}, "tools"),
    ({"tools": [tool("a"), tool("a")]}, "twice"),
    ({"tools": [tool(f"t{i}") for i in range(200)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "JSON schema"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "absent"}}}, "names no function"),
    ({"tool_choice": "required", "regex": "a"}, "together"),
    ({"tool_choice": "required", "tools": [tool("a", x={"type": "strin"})]}, "Unsupported type"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "content": None}]}, "content"),
]


@pytest.mark.parametrize(("change", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_tools_are_refused(server, change, says):
    body = {"messages": SAID, "tools": TOOLS, "max_tokens": 5, **change}
    error = server.post("/v1/chat/completions", body, 400)["error"]
    assert says in f"{error['param']} {error['message']}"
