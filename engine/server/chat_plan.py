"""A chat request made ready: its prompt with the tools, what its text must be, and how its reply is taken apart."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from engine.errors import BadRequest
from engine.sampling.grammar import Grammar
from engine.server.openai_types import ChatRequest
from engine.server.serving import Serving
from engine.text.reasoning import ReasoningSplitter, begins_inside
from engine.text.reply import ReplyParser, ReplyPart
from engine.text.tools.choice import ToolUse, after_thinking, forced_calls, tool_use
from engine.text.tools.formats import tool_format
from engine.text.tools.parser import ToolCallParser
from engine.text.tools.prompt import chat_prompt
from engine.text.tools.style import ToolCall, ToolFormat


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """Attributes:
    text: the prompt, as the template writes it.
    grammar: what the reply must be, if anything.
    shows_special: markup of calls is special tokens of this model, so the text must show them.
    """

    text: str
    grammar: Grammar | None
    shows_special: bool
    _use: ToolUse | None
    _style: ToolFormat | None
    _splits: bool
    _is_inside: bool

    def parser(self) -> ReplyParser:
        """For one reply."""
        splitter = ReasoningSplitter(is_inside=self._is_inside) if self._splits else None
        tools = None
        if self._use is not None and self._style is not None:
            tools = ToolCallParser(self._style, self._use.schemas)
        return ReplyParser(splitter, tools)


def plan_chat(serving: Serving, body: ChatRequest) -> ChatPlan:
    """Raises BadRequest."""
    tokenizer, args = serving.tokenizer, serving.args
    use = tool_use(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls)
    has_calls = any(message.get("tool_calls") for message in body.messages)
    style = tool_format(args.tool_call_parser, tokenizer.template_source) if use is not None or has_calls else None
    kwargs = dict(body.chat_template_kwargs)
    if body.continue_final_message:
        kwargs |= {"continue_final_message": True}
    kwargs["add_generation_prompt"] = body.add_generation_prompt and not body.continue_final_message
    text = chat_prompt(tokenizer, body.messages, use, style, **kwargs)
    grammar = body.grammar()
    if use is not None and style is not None and use.forced:
        if grammar is not None:
            raise BadRequest("tool_choice", body.tool_choice, f"cannot be kept together with {grammar.kind}")
        grammar = forced_calls(use, style)
    splits = args.reasoning_parser != "none"
    is_inside = splits and begins_inside(args.reasoning_parser, text)
    if grammar is not None and is_inside:
        grammar = after_thinking(grammar)
    markers = (*style.markers, style.end) if use is not None and style is not None else ()
    return ChatPlan(
        text=text,
        grammar=grammar,
        shows_special=bool(tokenizer.special_texts.intersection(markers)),
        _use=use,
        _style=style,
        _splits=splits and body.separate_reasoning,
        _is_inside=is_inside,
    )


def message_of(part: ReplyPart) -> dict[str, Any]:
    """A whole reply as the API's message."""
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["content"] = part.content or None
        message["tool_calls"] = [call_of(call) for call in part.calls]
    return message


def call_of(call: ToolCall) -> dict[str, Any]:
    """A call with an id of its own."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class DeltaWriter:
    """The deltas of one streamed reply, whose calls are numbered."""

    def __init__(self, plan: ChatPlan) -> None:
        self.num_calls = 0
        self._parser = plan.parser()

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What can be shown after `text` arrived, each kind in a delta of its own."""
        part = self._parser.feed(text, is_last=is_last)
        deltas: list[dict[str, Any]] = []
        if part.reasoning:
            deltas.append({"reasoning_content": part.reasoning})
        if part.content:
            deltas.append({"content": part.content})
        for call in part.calls:
            deltas.append({"tool_calls": [{"index": self.num_calls, **call_of(call)}]})
            self.num_calls += 1
        return deltas
