"""Tools and their calls in the prompt: through the model's chat template, or, where that knows no tools, as text in the
system message and in the turns (Hermes' words, which most small models have seen)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import BadRequest
from engine.text.tokenizer import Tokenizer
from engine.text.tools.choice import ToolUse
from engine.text.tools.style import ToolFormat

_SYSTEM = """You may call functions. They are, one a line, within <tools></tools>:
<tools>
{tools}
</tools>
To call one, write its name and arguments in this form and nothing else:
{example}"""


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Any], use: ToolUse | None, style: ToolFormat | None, **kwargs: Any
) -> str:
    """The conversation as text, with the tools. Raises BadRequest."""
    has_calls = any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages)
    if (use is not None or has_calls) and not tokenizer.template_takes_tools:
        return tokenizer.chat_text(_as_text(messages, use, style), **kwargs)
    if use is not None:
        kwargs["tools"] = use.definitions
    if not has_calls:
        return tokenizer.chat_text(messages, **kwargs)
    try:
        return tokenizer.chat_text([_with_objects(message) for message in messages], **kwargs)
    except BadRequest:  # most templates want the arguments as an object, some as the text that clients send
        return tokenizer.chat_text(messages, **kwargs)


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call in a message. Raises BadRequest."""
    found = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments", "{}") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, str | Mapping):
            raise BadRequest("messages.tool_calls", call, "must be {'function': {'name': ..., 'arguments': '{...}'}}")
        found.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return found


def _with_objects(message: Any) -> Any:
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = []
    for call, (name, arguments) in zip(message["tool_calls"], _calls(message), strict=True):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        calls.append({**call, "function": {**call["function"], "name": name, "arguments": value}})
    return {**message, "tool_calls": calls}


def _as_text(messages: Sequence[Any], use: ToolUse | None, style: ToolFormat | None) -> list[Any]:
    """The same conversation for a template that knows roles and text only."""
    written: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            written.append(message)
        elif message.get("tool_calls"):
            calls = [_call_text(style, name, arguments) for name, arguments in _calls(message)]
            written.append({"role": "assistant", "content": "\n".join([*_texts(message), *calls])})
        elif message.get("role") == "tool":
            answer = f"<tool_response>\n{message.get('content')}\n</tool_response>"
            written.append({"role": "user", "content": answer})
        else:
            written.append(message)
    if use is None:
        return written
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.definitions)
    system = _SYSTEM.format(
        tools=tools, example=_call_text(style, "NAME", style.example if style is not None else "{...}")
    )
    first = written[0] if written else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        return [{**first, "content": "\n\n".join([*_texts(first), system])}, *written[1:]]
    return [{"role": "system", "content": system}, *written]


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    return [content] if isinstance(content, str) and content else []


def _call_text(style: ToolFormat | None, name: str, arguments: str) -> str:
    if style is None:
        return f'{{"name": "{name}", "arguments": {arguments}}}'
    begin, end = style.forced(name)
    return begin + style.written(arguments) + end
