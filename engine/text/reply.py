"""A reply's text taken apart while it arrives: reasoning, content, tool calls, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.text.reasoning import ReasoningSplitter
from engine.text.tools.parser import ToolCallParser
from engine.text.tools.style import ToolCall


@dataclass(slots=True)
class ReplyPart:
    """What is certain of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __iadd__(self, other: ReplyPart) -> ReplyPart:
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls
        return self


class ReplyParser:
    """One reply. Content goes through where there is nothing to look for."""

    def __init__(self, splitter: ReasoningSplitter | None, tools: ToolCallParser | None) -> None:
        self._splitter = splitter
        self._tools = tools

    def feed(self, text: str, *, is_last: bool = False) -> ReplyPart:
        """What is certain after `text` arrived; with `is_last` all that is left."""
        part = ReplyPart(content=text)
        if self._splitter is not None:
            part.reasoning, part.content = self._splitter.feed(text)
            if is_last:
                reasoning, content = self._splitter.finish()
                part.reasoning, part.content = part.reasoning + reasoning, part.content + content
        if self._tools is not None:
            parsed = self._tools.feed(part.content)
            part.content, part.calls = parsed.content, parsed.calls
            if is_last:
                rest = self._tools.finish()
                part.content, part.calls = part.content + rest.content, part.calls + rest.calls
        return part
