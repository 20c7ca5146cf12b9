"""Stop strings, matched on a request's text while it arrives in pieces of any size.

    text so far:   ... already shown ... | held |        held = the longest suffix that is a proper prefix of a stop

The stop strings form one automaton (Aho and Corasick, 1975) whose depth is the length of that suffix, so a piece costs
its own length and nothing of the text before it. A request ends where the first stop string is *completed*: that
point, and so the whole text, is the same however the text was cut. Completed by one character at once, the longest
stop string wins.
"""

from __future__ import annotations

from typing import Any

from engine.errors import BadRequest
from engine.text.template import require_text

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024


def validate_stop_strings(stops: Any) -> tuple[str, ...]:
    """The stop strings of a request: none, one string, or a list of them.

    Raises:
        BadRequest: of field "stop": more than 32, an empty or overlong one, or one that is not text.
    """
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list | tuple):
        raise BadRequest("stop", stops, "must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest("stop", stops, f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for stop in stops:
        if not 1 <= len(require_text("stop", stop)) <= MAX_STOP_CHARS:
            raise BadRequest("stop", stop, f"has {len(stop)} characters, a stop string has 1 to {MAX_STOP_CHARS}")
    return tuple(stops)


class StopStrings:
    """The stop strings of one request and how far its text is into them.

    Attributes:
        matched: the stop string that ended the text, None while there is none.
        held: text that is not shown yet because it may be the beginning of a stop string.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """
        Args:
            stops: as `validate_stop_strings` returns them.
            include_stop: show the stop string too, instead of ending in front of it.
        """
        self.matched: str | None = None
        self.held = ""
        self._include_stop = include_stop
        self._automaton = _Automaton(stops)
        self._state = 0

    def feed(self, text: str) -> str:
        """What can be shown after `text` arrived. Look at `matched` afterwards; text behind a match is dropped."""
        if self.matched is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not state and automaton.first_chars.isdisjoint(text):
            return text
        pending = self.held + text
        for end, char in enumerate(text, start=len(self.held) + 1):
            state = automaton.step(state, char)
            stop = automaton.completes[state]
            if stop is not None:
                self.matched, self.held = stop, ""
                return pending[: end if self._include_stop else end - len(stop)]
        self._state = state
        shown = len(pending) - automaton.depth[state]
        self.held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The held text, when the request ended for another reason and it is no stop string after all."""
        held, self.held, self._state = self.held, "", 0
        return held


class _Automaton:
    """All stop strings as one tree; a state is the longest suffix of the text that is a path in it. State 0 is empty.

    `depth` is a state's length, `completes` the longest stop string that ends there.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the next longest suffix that is also a path
        self.depth = [0]
        self.completes: list[str | None] = [None]
        for stop in stops:
            self.completes[self._insert(stop)] = stop
        self._link()
        self.first_chars = frozenset(self._children[0])

    def step(self, state: int, char: str) -> int:
        """The state after one more character: constant time on average over a text."""
        while True:
            child = self._children[state].get(char)
            if child is not None:
                return child
            if not state:
                return 0
            state = self._shorter[state]

    def _insert(self, stop: str) -> int:
        state = 0
        for char in stop:
            child = self._children[state].get(char)
            if child is None:
                child = len(self.depth)
                self._children[state][char] = child
                self._children.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.completes.append(None)
            state = child
        return state

    def _link(self) -> None:
        """Give each state its next shorter one, by growing depth, and what that one completes."""
        queue = list(self._children[0].values())
        for state in queue:
            for char, child in self._children[state].items():
                self._shorter[child] = shorter = self.step(self._shorter[state], char)
                if self.completes[child] is None:
                    self.completes[child] = self.completes[shorter]
                queue.append(child)
