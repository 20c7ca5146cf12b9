"""Tool calls as Qwen3-Coder writes them: a parameter an element, its value as it is.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value's type is not written, so the function's schema says it. The line breaks around a value belong to the markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.text.markers import num_held
from engine.text.tools.style import Schemas, ToolCall, ToolFormat

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_ENDS = re.compile(rf"\s*{_FUNCTION_END}\s*(?:{_CALL_END})?\s*$")
_MAX_REFERENCES = 16
_NOT_JSON = object()


class FunctionScan:
    """Where a function's element ends, in a text that grows; a value may hold any markup but the end of its own."""

    def __init__(self) -> None:
        self._place = 0
        self._in_value = False

    def end_of(self, text: str) -> int:
        """Index of the closing tag; -1 while there is none."""
        while True:
            if self._in_value:
                found = text.find(_PARAMETER_END, self._place)
                if found < 0:
                    return self._wait(text, _PARAMETER_END)
                self._place, self._in_value = found + len(_PARAMETER_END), False
            end, begin = (text.find(marker, self._place) for marker in (_FUNCTION_END, _PARAMETER))
            if end < 0 and begin < 0:
                return self._wait(text, _FUNCTION_END, _PARAMETER)
            if begin < 0 or 0 <= end < begin:
                self._place = end
                return end
            self._place, self._in_value = begin + len(_PARAMETER), True

    def _wait(self, text: str, *markers: str) -> int:
        """Look again from where a marker may have begun."""
        self._place = max(self._place, len(text) - num_held(text, markers))
        return -1


def _parts(text: str) -> tuple[str, list[tuple[str, str]], str] | None:
    """Name, whole parameters and what is behind them, of a function's element without its tags; None without a name."""
    name, close, rest = text.partition(">")
    if not close:
        return None
    found = []
    while (begun := rest.lstrip()).startswith(_PARAMETER) and _PARAMETER_END in begun:
        element, _, rest = begun.removeprefix(_PARAMETER).partition(_PARAMETER_END)
        key, close, value = element.partition(">")
        if not close:
            return None
        found.append((key, value))
    return name.strip(), found, rest


def _read(text: str, schemas: Schemas) -> ToolCall | None:
    parts = _parts(text)
    if parts is None or parts[2].strip():
        return None
    name, found, _ = parts
    schema = schemas.get(name)
    return ToolCall(name, _json_of({key: _value(schema, key, value) for key, value in found}))


def _read_part(text: str, schemas: Schemas) -> ToolCall | None:
    """An open value leaves its JSON open, unless all that is missing is its closing tag."""
    parts = _parts(text)
    if parts is None:
        return None
    name, found, rest = parts
    whole = _read(text[: len(text) - len(rest)], schemas)
    begun = rest.strip()
    if whole is None or _PARAMETER.startswith(begun) or _FUNCTION_END.startswith(begun):
        return whole
    key, close, value = begun.removeprefix(_PARAMETER).partition(">")
    if not begun.startswith(_PARAMETER):
        return None
    if not close:
        return ToolCall(name, whole.arguments.removesuffix("}"))
    ended = _ENDS.sub("", value)
    if ended != value:
        return _read(f"{text[: len(text) - len(rest)]}{_PARAMETER}{key}>{ended}{_PARAMETER_END}", schemas)
    shown = value.removeprefix("\n")
    shown = shown[: len(shown) - num_held(shown, (_PARAMETER_END, f"\n{_PARAMETER_END}"))]
    is_text = _kinds(*_of_property(schemas.get(name), key)) in (frozenset(), frozenset({"string"}))
    opened = json.dumps(shown, ensure_ascii=False).removesuffix('"') if is_text else shown.strip()
    comma = ", " if found else ""
    return ToolCall(name, f"{whole.arguments.removesuffix('}')}{comma}{_json_of(key)}: {opened}")


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Values.


def _value(schema: Any, key: str, written: str) -> Any:
    """A parameter as its schema wants it; the text itself where it is nothing like that."""
    text = written.removeprefix("\n").removesuffix("\n")
    own, root = _of_property(schema, key)
    kinds = _kinds(own, root)
    if kinds == {"string"}:
        return _string(text, own if isinstance(own, Mapping) else {})
    bare = text.strip()
    if kinds & {"boolean", "null"} and bare.lower() in ("true", "false", "null", "none"):
        bare = {"none": "null"}.get(bare.lower(), bare.lower())
    value = _parsed(bare)
    if value is _NOT_JSON or _kind(value) not in (kinds or {"object", "array"}):
        return text
    return value


def _string(text: str, schema: Mapping[str, Any]) -> str:
    """Whitespace around a text is its own, unless the schema says that there is none."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        return text if text in choices else text.strip()
    limit = schema.get("maxLength")
    is_too_long = isinstance(limit, int) and len(text) > limit
    return text.strip() if is_too_long or "pattern" in schema or "format" in schema else text


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NOT_JSON
    return value


def _of_property(schema: Any, key: str) -> tuple[Any, Any]:
    """The schema of a function's parameter, and the root that its references are about."""
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    return _followed(known.get(key) if isinstance(known, Mapping) else None, schema), schema


def _followed(schema: Any, root: Any) -> Any:
    """What a local reference names."""
    for _ in range(_MAX_REFERENCES):
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(where, str) or not where.startswith("#/"):
            return schema
        schema = root
        for step in where.removeprefix("#/").split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return None


def _kinds(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows; empty when it does not say."""
    schema = _followed(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str | list):
        named = {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)}
        return frozenset(named | {"integer"} if "number" in named else named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_kind(value) for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            each = [_kinds(branch, root, depth + 1) for branch in branches]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset({"object"} if "properties" in schema else {"array"} if "items" in schema else ())


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


# Writing.


def _written(arguments: str) -> str:
    """A call's arguments, JSON, as parameters; as they are where they are no object."""
    value = _parsed(arguments)
    if not isinstance(value, dict):
        return arguments
    texts = ((key, one if isinstance(one, str) else _json_of(one)) for key, one in value.items())
    return "\n".join(f"{_PARAMETER}{key}>\n{text}\n{_PARAMETER_END}" for key, text in texts)


QWEN3_CODER = ToolFormat(
    begin=_FUNCTION,
    end=_FUNCTION_END,
    read=_read,
    read_part=_read_part,
    forced=lambda name: (f"{_CALL}\n{_FUNCTION}{name}>\n", f"\n{_FUNCTION_END}\n{_CALL_END}"),
    noise=(_CALL, _CALL_END),
    is_json=False,
    scan=FunctionScan,
    written=_written,
    example='{"PARAMETER": "VALUE"}',
    content_style="qwen_xml",
    between="\n",
)
