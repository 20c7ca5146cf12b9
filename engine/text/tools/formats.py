"""How models write tool calls, and which of the ways a model uses.

hermes, qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>
qwen3_coder    <tool_call><function=...><parameter=...>...</parameter></function></tool_call>, see `xml`
llama3         {"name": ..., "parameters": {...}}, at the start of the reply or behind <|python_tag|>
deepseek       <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...<｜tool▁sep｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from engine.errors import BadRequest
from engine.text.tools.style import Schemas, ToolCall, ToolFormat
from engine.text.tools.xml import QWEN3_CODER

TOOL_CALL_PARSERS = ("auto", "hermes", "qwen", "qwen3_coder", "llama3", "deepseek")

_CUT_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL)


def _read_json(text: str, _: Schemas) -> ToolCall | None:
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments: Any = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(call["name"], arguments)
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _read_json_part(text: str, _: Schemas) -> ToolCall | None:
    found = _CUT_CALL.match(text)
    return ToolCall(json.loads(found[1], strict=False), text[found.end() :]) if found else None


_SEP, _FENCE = "<｜tool▁sep｜>", "```json\n"


def _read_deepseek(text: str, schemas: Schemas) -> ToolCall | None:
    call = _read_deepseek_part(text, schemas)
    if call is None:
        return None
    try:
        is_object = isinstance(json.loads(call.arguments, strict=False), dict)
    except (ValueError, RecursionError):
        return None
    return call if is_object else None


def _read_deepseek_part(text: str, _: Schemas) -> ToolCall | None:
    """Version 3 writes `function<sep>name`, a newline and a fenced block; 3.1 writes `name<sep>` and the arguments."""
    head, sep, rest = text.partition(_SEP)
    if not sep:
        return None
    if head.strip() != "function":
        return ToolCall(head.strip(), rest.strip())
    name, newline, arguments = rest.partition("\n")
    if not newline:
        return None
    arguments = arguments.removeprefix(_FENCE).strip()
    return ToolCall(name.strip(), arguments.removesuffix("```").strip())


def _forced_json(begin: str, key: str, end: str) -> Callable[[str], tuple[str, str]]:
    return lambda name: (f'{begin}{{"name": {json.dumps(name)}, "{key}": ', f"}}{end}")


_HERMES = ToolFormat(
    begin="<tool_call>",
    end="</tool_call>",
    read=_read_json,
    read_part=_read_json_part,
    forced=_forced_json("<tool_call>\n", "arguments", "\n</tool_call>"),
    between="\n",
)
_LLAMA3 = ToolFormat(
    begin="<|python_tag|>",
    end="",
    read=_read_json,
    read_part=_read_json_part,
    forced=_forced_json("", "parameters", ""),
    is_bare=True,
)
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = ToolFormat(
    begin=_CALL_BEGIN,
    end=_CALL_END,
    read=_read_deepseek,
    read_part=_read_deepseek_part,
    forced=lambda name: (f"{_CALL_BEGIN}function{_SEP}{name}\n{_FENCE}", f"\n```{_CALL_END}"),
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    is_json=False,
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    between="\n",
)
_DEEPSEEK_31 = ToolFormat(
    begin=_CALL_BEGIN,
    end=_CALL_END,
    read=_read_deepseek,
    read_part=_read_deepseek_part,
    forced=lambda name: (f"{_CALL_BEGIN}{name}{_SEP}", _CALL_END),
    noise=_DEEPSEEK.noise,
    is_json=False,
    around=_DEEPSEEK.around,
    between="",
)


def tool_format(parser: str, template: str) -> ToolFormat:
    """The format of a parser's name; "auto" looks into the model's chat template, and takes hermes where that says
    nothing. Raises BadRequest: the template shows a format that is not known."""
    if parser == "auto":
        parser = "hermes"
        if "<function=" in template:
            if "<parameter=" not in template:
                rule = "this model's template writes tool calls in a form that is not known; give --tool-call-parser"
                raise BadRequest("tools", "...", rule)
            parser = "qwen3_coder"
        elif "<｜tool▁call" in template:
            parser = "deepseek"
        elif "<|python_tag|>" in template or "ipython" in template:
            parser = "llama3"
    if parser == "deepseek":
        return _DEEPSEEK if "```json" in template else _DEEPSEEK_31
    return {"llama3": _LLAMA3, "qwen3_coder": QWEN3_CODER}.get(parser, _HERMES)
