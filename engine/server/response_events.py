"""A reply as the Responses API shows it: output items, and the events of its stream, which are made of the same pieces.

    created, in_progress, (output_item.added, deltas, done, output_item.done)*, completed | incomplete | failed

Streaming or not, a response is written by one `ResponseWriter`, so both say the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from engine.request import Finish
from engine.server.chat_plan import ChatPlan
from engine.server.openai_api import chat_logprobs
from engine.server.response_types import Message, ResponseRequest, new_id
from engine.server.serving import Piece, Serving, Usage
from engine.text.tools.style import ToolCall

Event = dict[str, Any]


class ResponseWriter:
    """One response.

    Attributes:
        body: the response as far as it is known; whole after the last piece.
    """

    def __init__(self, serving: Serving, request: ResponseRequest, plan: ChatPlan) -> None:
        self.body = _body(serving, request)
        self._serving = serving
        self._with_logprobs = request.wants_logprobs
        self._parser = plan.parser()
        self._open: dict[str, Any] | None = None
        self._number = 0
        self._reasoning_tokens = 0

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.body)
        yield self._event("response.in_progress", response=self.body)

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Events of what is new; with the last piece they end the response."""
        part = self._parser.feed(piece.text, is_last=piece.finish is not None)
        logprobs = []
        if self._with_logprobs and piece.logprobs:
            logprobs = chat_logprobs(self._serving, piece.logprobs)["content"]
        if part.reasoning:
            yield from self._text("reasoning", part.reasoning)
        if part.content or (logprobs and self._open is not None and self._open["type"] == "message"):
            yield from self._text("message", part.content, logprobs)
        elif self._open is not None and self._open["type"] == "reasoning":
            self._reasoning_tokens += len(piece.token_ids)
        for call in part.calls:
            yield from self._close()
            yield from self._call(call)
        if piece.finish is not None:
            yield from self._end(piece.finish, piece.usage)

    def message(self) -> Message:
        """The answer as a message of the conversation; thoughts are not shown to the model again."""
        texts = [part["text"] for item in self.body["output"] if item["type"] == "message" for part in item["content"]]
        message: Message = {"role": "assistant", "content": "".join(texts)}
        calls = [item for item in self.body["output"] if item["type"] == "function_call"]
        if calls:
            message["tool_calls"] = [
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
                for item in calls
            ]
        return message

    def error(self, code: str | None, message: str, param: str | None) -> Event:
        """The last event of a stream that something from outside has ended."""
        return self._event("error", code=code, message=message, param=param)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _text(self, kind: str, delta: str, logprobs: list[Any] | None = None) -> Iterator[Event]:
        """A piece of the open item's text; another kind of item is closed first, and this one opened."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._add(_item(kind))
            yield self._event("response.content_part.added", **self._where(content=True), part=self._part(""))
        assert self._open is not None
        part = self._open["content"][0] if self._open["content"] else self._part("")
        self._open["content"] = [part]
        part["text"] += delta
        if kind == "message":
            part["logprobs"] += logprobs or []
            extra: dict[str, Any] = {"logprobs": logprobs or []}
            yield self._event("response.output_text.delta", **self._where(content=True), delta=delta, **extra)
        else:
            yield self._event("response.reasoning_text.delta", **self._where(content=True), delta=delta)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Nothing more comes to the open item."""
        item = self._open
        if item is None:
            return
        part = item["content"][0]
        extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        yield self._event(f"response.{name}.done", **self._where(content=True), text=part["text"], **extra)
        yield self._event("response.content_part.done", **self._where(content=True), part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": new_id("call"),
            "name": call.name,
            "arguments": "",
        }
        yield from self._add(item)
        yield self._event("response.function_call_arguments.delta", **self._where(), delta=call.arguments)
        item["arguments"], item["status"] = call.arguments, "completed"
        yield self._event("response.function_call_arguments.done", **self._where(), arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        self.body["output"].append(item)
        self._open = item
        yield self._event("response.output_item.added", output_index=self._index, item=item)

    def _end(self, finish: Finish, usage: Usage | None) -> Iterator[Event]:
        if not self.body["output"]:
            yield from self._text("message", "")
        status = _status(finish)
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.body["status"] = status
        if status == "completed":
            self.body["completed_at"] = int(time.time())
        elif status == "incomplete":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            self.body["error"] = {"code": "server_error", "message": finish.message or finish.reason}
        if usage is not None:
            self.body["usage"] = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        yield self._event(f"response.{'incomplete' if status == 'cancelled' else status}", response=self.body)

    @property
    def _index(self) -> int:
        return len(self.body["output"]) - 1

    def _where(self, *, content: bool = False) -> dict[str, Any]:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": self._index}
        return {**where, "content_index": 0} if content else where

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    return {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _status(finish: Finish) -> str:
    if finish.reason == "stop":
        return "completed"
    if finish.reason in ("length", "capacity", "timeout"):
        return "incomplete"
    return "cancelled" if finish.reason == "abort" else "failed"


def _body(serving: Serving, request: ResponseRequest) -> dict[str, Any]:
    """The response before its first token, with what the request said."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "model": serving.model_name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": request.reasoning or {"effort": None, "summary": None},
        "background": False,
        "store": request.store,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}, **request.text},
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
