"""What a way of writing tool calls is: how a call is found in a text, read, forced and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Schemas = Mapping[str, Any]
"""Of the parameters of each function that was offered, by its name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. `arguments`: JSON text; cut short where the reply was."""

    name: str
    arguments: str


class CallScan(Protocol):
    """Where a call ends, in a text that grows."""

    def end_of(self, text: str) -> int:
        """Index where it ends; -1 while it does not. `text` is that of the last time with more behind it."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        begin, end: markup around a call; `end` may be missing in a reply.
        noise: markup around calls that says nothing.
        is_json: a call is one JSON object.
        is_bare: a reply that begins with `{` may be a call, without markup.
        scan: finds `end` where a call may hold the same text; None where it may not.
        read: a whole call's text as name and arguments; None when it is no call.
        read_part: the same for a call that the end of the reply cut.
        forced: markup in front of and behind the arguments of a call of that name, for grammars.
        content_style: of the arguments, as xgrammar names it.
        written: arguments, JSON text, as this format writes them; `example`: of arguments, as JSON.
        around: markup around all calls, for grammars; between: and between two, None when there is at most one.
    """

    begin: str
    end: str
    read: Callable[[str, Schemas], ToolCall | None]
    read_part: Callable[[str, Schemas], ToolCall | None]
    forced: Callable[[str], tuple[str, str]]
    noise: tuple[str, ...] = ()
    is_json: bool = True
    is_bare: bool = False
    scan: Callable[[], CallScan] | None = None
    content_style: Literal["json", "qwen_xml"] = "json"
    written: Callable[[str], str] = str
    example: str = "{...}"
    around: tuple[str, str] = ("", "")
    between: str | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, *self.noise)
