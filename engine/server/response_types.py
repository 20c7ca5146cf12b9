"""Bodies of /v1/responses: input items become the messages of a chat, tools and formats those of a chat request.

instructions  ->  the system message, of this response only
input         ->  messages: text, messages, function calls and their outputs
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from engine.errors import BadRequest
from engine.server.body_types import Objects, Texts, Words
from engine.server.openai_types import ChatRequest, Sampled

Message = dict[str, Any]
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text")
_NOT_HERE = {
    "background": "answers come at once; leave it out, and stream",
    "conversation": "is not in this version; use previous_response_id",
    "prompt": "templates kept by the server are not in this version; send input",
}


class ResponseRequest(Sampled):
    """Body of POST /v1/responses. Fields that clients send and that change nothing here are let through."""

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = None
    metadata: Words = Field(default_factory=dict)
    tools: Objects = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: int | None = None
    include: Texts = Field(default_factory=list)
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include

    def check_supported(self) -> None:
        """Raises BadRequest for what this version does not do, and for what would not be kept."""
        for name, rule in _NOT_HERE.items():
            if getattr(self, name):
                raise BadRequest(name, getattr(self, name), rule)
        if self.truncation not in (None, "disabled"):
            raise BadRequest("truncation", self.truncation, "must be disabled: nothing is cut out of a conversation")
        if self.n != 1:
            raise BadRequest("n", self.n, "a response has one answer")
        try:  # a response repeats its request
            json.dumps(self.model_dump(), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise BadRequest("input", str(error), "has a text that is not valid Unicode, or no number") from None
        texts = [text for pair in self.metadata.items() for text in pair]
        if len(self.metadata) > MAX_METADATA or any(len(text) > MAX_METADATA_CHARS for text in texts):
            rule = f"entries; at most {MAX_METADATA} are kept, each text of at most {MAX_METADATA_CHARS} characters"
            raise BadRequest("metadata", len(self.metadata), rule)

    def as_chat(self, messages: Sequence[Message]) -> ChatRequest:
        """The same request to the chat endpoint. Raises BadRequest."""
        shared = {name: getattr(self, name) for name in Sampled.model_fields if name != "response_format"}
        return ChatRequest(
            **shared,
            messages=with_instructions(self.instructions, messages),
            max_completion_tokens=self.max_output_tokens,
            response_format=_response_format(self.text.get("format")),
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[_chat_tool(index, tool) for index, tool in enumerate(self.tools)] or None,
            tool_choice=_chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def items_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Input as items, each with an id, as they are kept and listed."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "id": new_id("msg"), "status": "completed", "role": "user", "content": content}]
    kinds = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    items = []
    for item in given:
        kind = item.get("type") or "message"
        items.append({"id": new_id(kinds.get(str(kind), "msg")), **item, "type": kind})
    return items


def messages_of(items: Iterable[Mapping[str, Any]], known_calls: Iterable[str] = ()) -> list[Message]:
    """Items as messages of a chat.

    Args:
        known_calls: ids of calls that the conversation had before.
    Raises:
        BadRequest: an item of a kind that is not known, malformed, or the output of a call that was never made.
    """
    messages: list[Message] = []
    calls = set(known_calls)
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", item.get("type")
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise BadRequest(f"{where}.role", role, "must be user, assistant, system or developer")
            content = _text(f"{where}.content", item.get("content"))
            messages.append({"role": "system" if role == "developer" else role, "content": content})
        elif kind == "function_call":
            call = _call(where, item)
            calls.add(call["id"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            if call_id not in calls:
                raise BadRequest(f"{where}.call_id", call_id, "is the id of no function call in this conversation")
            output = _text(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":  # what was thought before is not shown to a model again
            rule = "must be message, function_call, function_call_output or reasoning"
            raise BadRequest(f"{where}.type", kind, rule)
    return messages


def call_ids(messages: Iterable[Message]) -> list[str]:
    """Ids of the calls in these messages."""
    return [call["id"] for message in messages for call in message.get("tool_calls", ())]


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """Instructions stand in front, in one message with a system message that is there: many templates take one only."""
    if not instructions:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _text(where: str, content: Any) -> str:
    """A text, or its parts joined. Raises BadRequest."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(where, content, "must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part, dict) or kind not in (*_TEXT_PARTS, "refusal") or not isinstance(part.get(name), str):
            raise BadRequest(where, kind, "is no part that this model can read; send input_text")
        texts.append(part[name])
    return "".join(texts)


def _call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise BadRequest(f"{where}.{name}", item.get(name), "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API, which is flat, as one of the chat API, which is nested."""
    if tool.get("type") != "function":
        raise BadRequest(f"tools[{index}].type", tool.get("type"), "must be function: this server runs no tools")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(wanted: Any) -> dict[str, Any] | None:
    """`text.format` as the chat API's `response_format`; its schema stands one level higher here."""
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise BadRequest("text.format", wanted, "must be an object with a type")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: wanted[name] for name in ("name", "schema") if name in wanted}}
