"""Splits a model's thinking from its answer: `<think> ... </think> answer`, in a text that arrives in pieces.

    |<think>|  reasoning ...  |</think>|  content ...        the whitespace around the markers belongs to neither

A template may have written `<think>` already. Thinking that does not end is reasoning to the end. Markers later in the
answer are its text.
"""

from __future__ import annotations

from typing import Literal

from engine.text.markers import num_held

BEGIN, END = "<think>", "</think>"
REASONING_PARSERS = ("none", "qwen3", "deepseek")


class ReasoningSplitter:
    """One reply."""

    def __init__(self, *, is_inside: bool) -> None:
        """`is_inside`: the reply begins in the middle of thinking; a `<think>` at its start is dropped all the same."""
        self._state: Literal["start", "open", "thinking", "gap", "answer"] = "start"
        self._is_inside = is_inside
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What is certain after `text` arrived: reasoning, content."""
        self._pending += text
        reasoning = content = ""
        if self._state == "start":
            self._begin()
        if self._state == "open":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "thinking"
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "answer"
        if self._state == "answer":
            content, self._pending = self._pending, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held, when the reply ends."""
        held, self._pending = self._pending, ""
        if self._state == "start" and not self._is_inside:
            return "", held
        return (held, "") if self._state in ("start", "thinking") else ("", "")

    def _begin(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(BEGIN):
            self._pending = text[len(BEGIN) :]
            self._state = "open"
        elif not BEGIN.startswith(text):
            self._state = "thinking" if self._is_inside else "answer"
            self._pending = text if self._is_inside else self._pending

    def _think(self) -> str:
        """Reasoning up to what may be its end, less the whitespace before that."""
        text, _, answer = self._pending.partition(END)
        if len(text) < len(self._pending):
            self._state, self._pending = "gap", answer
            return text.rstrip()
        shown = text[: len(text) - num_held(text, (END,))].rstrip()
        self._pending = text[len(shown) :]
        return shown


def begins_inside(parser: str, prompt: str) -> bool:
    """Whether a reply to this prompt begins in the middle of thinking: the template opened it, or the model always
    thinks (deepseek) and the template did not close it."""
    end = prompt.rstrip()
    return end.endswith(BEGIN) or (parser == "deepseek" and not end.endswith(END))
