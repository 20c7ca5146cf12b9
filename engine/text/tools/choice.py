"""What a request says of tools, checked; and the grammar that makes a model call one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engine.errors import BadRequest
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_worker import MAX_WHITESPACE
from engine.text.tools.style import ToolFormat

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        definitions: as they were given.
        schemas: of each function's parameters, by its name.
        forced: names of which one must be called; empty leaves it to the model.
        is_parallel: several calls in one reply are welcome.
    """

    definitions: list[dict[str, Any]]
    schemas: dict[str, Any]
    forced: tuple[str, ...] = ()
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.schemas)


def tool_use(tools: Any, choice: Any, *, is_parallel: bool = True) -> ToolUse | None:
    """The tools that a request offers; None when there are none, or none may be called. Raises BadRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice", choice, "needs tools")
        return None
    if len(tools) > MAX_TOOLS:
        raise BadRequest("tools", len(tools), f"at most {MAX_TOOLS} are allowed")
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) and tool.get("type") == "function" else None
        where = f"tools[{index}]"
        if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
            rule = "must be {'type': 'function', 'function': {'name': 1 to 64 of A-Z a-z 0-9 _ . -, ...}}"
            raise BadRequest(where, tool, rule)
        if name in schemas:
            raise BadRequest(where, name, "is there twice")
        schema = function.get("parameters")
        schemas[name] = {"type": "object", "properties": {}} if schema is None else schema
        if not isinstance(schemas[name], dict):
            raise BadRequest(f"{where}.function.parameters", schema, "must be a JSON schema, an object")
    return _chosen(ToolUse(list(tools), schemas, is_parallel=is_parallel), choice)


def _chosen(use: ToolUse, choice: Any) -> ToolUse | None:
    forced: tuple[str, ...] = ()
    if choice == "none":
        return None
    if choice == "required":
        forced = tuple(use.schemas)
    elif isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
        if name not in use.schemas:
            raise BadRequest("tool_choice", choice, f"names no function; there are {', '.join(use.schemas)}")
        forced = (name,)
    elif choice not in (None, "auto"):
        rule = "must be auto, none, required or {'type': 'function', 'function': {'name': ...}}"
        raise BadRequest("tool_choice", choice, rule)
    return ToolUse(use.definitions, use.schemas, forced, use.is_parallel and choice == "required")


def forced_calls(use: ToolUse, style: ToolFormat) -> Grammar | None:
    """A text that is one call of the forced functions, or several; None when nothing is forced."""
    if not use.forced:
        return None
    tags = []
    for name in use.forced:
        begin, end = style.forced(name)
        content = {
            "type": "json_schema",
            "json_schema": use.schemas[name],
            "style": style.content_style,
            "max_whitespace_cnt": MAX_WHITESPACE,
        }
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls: dict[str, Any] = {"type": "or", "elements": tags} if len(tags) > 1 else tags[0]
    if use.is_parallel and style.between is not None:
        calls = {"type": "tags_with_separator", "tags": tags, "separator": style.between, "at_least_one": True}
    before, behind = style.around
    if before:
        ends = [{"type": "const_string", "value": before}, calls, {"type": "const_string", "value": behind}]
        calls = {"type": "sequence", "elements": ends}
    return _tagged("tools", calls)


def after_thinking(grammar: Grammar) -> Grammar:
    """The same text behind thinking, for a reply that begins inside it."""
    form: dict[str, Any]
    if grammar.kind == "structural_tag":
        form = json.loads(grammar.text)["format"]
    elif grammar.kind == "regex":
        form = {"type": "regex", "pattern": grammar.text}
    elif grammar.kind == "ebnf":
        form = {"type": "grammar", "grammar": grammar.text}
    else:
        any_object = {"type": "object", "additionalProperties": True}
        schema = any_object if grammar.kind == "json_object" else json.loads(grammar.text)
        form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
    thinking = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    gap = {"type": "regex", "pattern": "\\n{0,2}"}
    return _tagged("response_format", {"type": "sequence", "elements": [thinking, gap, form]})


def _tagged(field: str, form: dict[str, Any]) -> Grammar:
    try:
        return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    except RecursionError:
        raise BadRequest(field, "...", "is nested too deep") from None
    except BadRequest as error:
        raise BadRequest(field, error.value, error.rule) from None
