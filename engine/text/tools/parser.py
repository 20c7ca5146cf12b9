"""Finds tool calls in a text that arrives in pieces.

    content ... |<tool_call>|  {"name": ...}  |</tool_call>|  content ...

Content is shown when it can no longer be markup, and a call when it is whole. The whitespace between content and calls
belongs to neither. What looks like a call and is none (no JSON, a function that was not offered) is content, without
its markup; a call that the end of the reply cuts has the arguments that were written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.text.markers import num_held
from engine.text.tools.style import CallScan, Schemas, ToolCall, ToolFormat


@dataclass(slots=True)
class Parsed:
    """What is certain: content, and calls behind it."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class ToolCallParser:
    """One reply.

    Attributes:
        num_calls: found so far.
    """

    def __init__(self, style: ToolFormat, schemas: Schemas) -> None:
        """`schemas`: of the functions that were offered."""
        self.num_calls = 0
        self._style = style
        self._schemas = schemas
        self._mode: Literal["text", "call", "closing"] = "text"
        self._may_be_bare = style.is_bare
        self._is_bare = False
        self._is_behind_call = False
        self._pending = ""
        self._scan = self._new_scan()

    def feed(self, text: str) -> Parsed:
        """What is certain after `text` arrived."""
        self._pending += text
        parsed = Parsed()
        while {"text": self._text, "call": self._call, "closing": self._closing}[self._mode](parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What was held, when the reply ends."""
        held, self._pending = self._pending, ""
        parsed = Parsed()
        if self._mode == "call":
            call = self._style.read_part(held, self._schemas)
            if call is not None and call.name in self._schemas:
                self._found(parsed, call)
            else:
                parsed.content = self._no_call(held)
        elif self._mode == "text" and not (self._is_behind_call and self._begins_markup(held.strip())):
            parsed.content = held
        return parsed

    def _begins_markup(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._style.markers)

    def _found(self, parsed: Parsed, call: ToolCall) -> None:
        self.num_calls += 1
        self._is_behind_call = True
        parsed.calls.append(call)

    def _no_call(self, body: str) -> str:
        """What stood where a call should, without markup."""
        for marker in (*self._style.markers, self._style.end):
            while marker and marker in body:
                body = body.replace(marker, "")
        return body if self._is_bare else body.strip()

    def _new_scan(self) -> CallScan:
        return self._style.scan() if self._style.scan is not None else _ObjectScan()

    def _enter_call(self, text: str, *, is_bare: bool) -> bool:
        self._mode, self._pending, self._is_bare = "call", text, is_bare
        self._scan = self._new_scan()
        return True

    def _text(self, parsed: Parsed) -> bool:
        """Content up to the next call or what may become one; True to go on."""
        text, style = self._pending, self._style
        if self._may_be_bare:
            ahead = text.lstrip(" \t\r\n;" if self.num_calls else None)
            if not ahead:
                return False
            if ahead[0] == "{":
                return self._enter_call(ahead if self.num_calls else text, is_bare=True)
        places = [(place, marker) for marker in style.markers if (place := text.find(marker)) >= 0]
        if places:
            place, marker = min(places)
            shown = text[:place].rstrip()
            parsed.content += shown
            self._is_behind_call = self._is_behind_call and not shown
            rest = text[place + len(marker) :]
            self._may_be_bare = self._may_be_bare and not shown
            if marker == style.begin:
                return self._enter_call(rest, is_bare=False)
            self._pending = rest
            return True
        shown = text[: len(text) - num_held(text, style.markers)].rstrip()
        parsed.content += shown
        self._is_behind_call = self._is_behind_call and not shown
        self._may_be_bare = self._may_be_bare and not shown
        self._pending = text[len(shown) :]
        return False

    def _call(self, parsed: Parsed) -> bool:
        body, style = self._pending, self._style
        start = len(body) - len(body.lstrip())
        if style.is_json and start == len(body):
            return False
        if style.is_json and body[start] == "{":
            end = behind = self._scan.end_of(body)
        elif style.end:
            end = self._scan.end_of(body) if style.scan is not None else body.find(style.end)
            behind = end + len(style.end)
        else:
            end = behind = 0
        if end < 0:
            return False
        call = style.read(body[:end], self._schemas)
        if call is not None and call.name in self._schemas:
            self._found(parsed, call)
            self._may_be_bare = style.is_bare
        else:
            parsed.content += self._no_call(body[:end])
            self._may_be_bare = False
        self._pending = body[behind:]
        self._mode = "closing" if style.end and behind == end else "text"
        return True

    def _closing(self, _: Parsed) -> bool:
        """Leave out the markup behind a call, where it is."""
        text, end = self._pending.lstrip(), self._style.end
        if text.startswith(end):
            self._mode, self._pending = "text", text[len(end) :]
            return True
        if end.startswith(text):
            return False
        self._mode = "text"
        return True


class _ObjectScan:
    """Where a JSON object ends, in a text that grows; each character is looked at once."""

    def __init__(self) -> None:
        self._place = self._depth = 0
        self._in_string = self._is_escaped = False

    def end_of(self, text: str) -> int:
        """Index behind the first object's last brace; -1 while there is none."""
        for place in range(self._place, len(text)):
            char = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._place = place
                    return place + 1
        self._place = len(text)
        return -1
