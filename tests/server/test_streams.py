"""200 prompts, every protocol: a stream's pieces make exactly the text that comes without streaming."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("xgrammar")

NUM_PROMPTS = 200
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "東京 🗼"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
PARTS = [
    "漢字かな",
    "한국어",
    "🙂",
    "👩‍👩‍👧",
    "é",
    "e\u0301",
    "naïve ",
    "plain words ",
    "\n\n",
    "\t",
    "12.5 ",
    "<think>",
    "</s>",
    '{"a":',
]
TEXTS = [
    "你好🙂世界",
    "a👩‍👩‍👧b",
    f"Let me see.\n{CALL}",
    f"{CALL}\n{CALL}",
    "<think>\n思う\n</think>\n\n答え",
    "no <tool_cal",
    "END ENDE END",
]


def case(index: int) -> tuple[str, dict[str, Any]]:
    """A prompt, and what is asked with it. A third of the answers are texts of our own, by a grammar."""
    dice = random.Random(index)
    prompt = "".join(dice.choices(PARTS, k=dice.randint(1, 6)))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": dice.choice([1, 6, 16, 24])}
    if index % 3 == 0:
        text = dice.choice(TEXTS)
        options |= {"ebnf": f"root ::= {json.dumps(text, ensure_ascii=False)}", "max_tokens": dice.choice([9, 150])}
        options["stop"] = dice.choice([None, [text[len(text) // 2 :][:3]], ["END END", "ENDE"]])
    return prompt, options


def data_of(server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    with server.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(server, prompt: str, options: dict[str, Any]) -> tuple[Any, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "tools": TOOLS, **options}
    [choice] = server.post("/v1/chat/completions", body)["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    whole = (message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"])
    content, reasoning, calls, reason = "", "", [], None
    for event in data_of(server, "/v1/chat/completions", body):
        [choice] = event["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        calls += [call["function"] for call in delta.get("tool_calls", ())]
        reason = choice["finish_reason"] or reason
    return whole, (content, reasoning, calls, reason)


def completion(server, prompt: str, options: dict[str, Any]) -> tuple[Any, Any]:
    body = {"prompt": prompt, **options}
    [choice] = server.post("/v1/completions", body)["choices"]
    found = [event["choices"][0] for event in data_of(server, "/v1/completions", body)]
    return (choice["text"], choice["finish_reason"]), ("".join(c["text"] for c in found), found[-1]["finish_reason"])


def native(server, prompt: str, options: dict[str, Any]) -> tuple[Any, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    body = {"text": prompt, "sampling_params": {**given, "max_new_tokens": given.pop("max_tokens")}}
    body["sampling_params"].pop("max_tokens")
    whole = server.post("/generate", body)
    events = data_of(server, "/generate", body)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
    return (whole["text"], whole["output_ids"]), (events[-1]["text"], events[-1]["output_ids"])


def response(server, prompt: str, options: dict[str, Any]) -> tuple[Any, Any]:
    body = {"input": prompt, "store": False, "tools": [{"type": "function", **TOOLS[0]["function"]}], **options}
    body["max_output_tokens"] = body.pop("max_tokens")
    whole = server.post("/v1/responses", body)
    events = data_of(server, "/v1/responses", body)
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in whole["output"]]
    return (texts, whole["status"]), ([deltas.get(i, "") for i in range(len(texts))], events[-1]["response"]["status"])


def test_streamed_and_not_are_equal_byte_for_byte(tool_server):
    protocols = [chat, completion, native, response]

    def run(index: int) -> tuple[int, Any, Any]:
        prompt, options = case(index)
        ask = protocols[index % len(protocols)]
        whole, streamed = ask(tool_server, prompt, options)
        if index % 3 and isinstance(whole[0], str) and len(whole[0]) > 4:  # a stop string of the answer's own text
            start = len(whole[0]) // 3
            stop = whole[0][start : start + 3]
            cut, cut_streamed = ask(tool_server, prompt, {**options, "stop": [stop]})
            assert cut[0] == whole[0][: whole[0].index(stop)], (index, stop)
            whole, streamed = (whole, cut), (streamed, cut_streamed)
        return index, json.dumps(whole), json.dumps(streamed)

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(run, range(NUM_PROMPTS)))
    assert [(index, whole) for index, whole, _ in results] == [(index, streamed) for index, _, streamed in results]
    said = "".join(whole for _, whole, _ in results)
    for text in ("你好🙂", "👩‍👩‍👧", "東京 🗼", "思う"):
        assert json.dumps(text)[1:-1] in said.replace("\\\\", "\\"), text
