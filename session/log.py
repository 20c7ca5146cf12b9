"""A conversation's tokens: what finished turns said, and behind it the tail of the turn that runs.

    0                    finished                 tail
    |  turn 1  |  turn 2  |  prompt of turn 3, its output so far ...|      one buffer
                          `- nothing before this is ever written again while the turn runs

A turn writes into the buffer behind the finished part and nowhere else, so it costs its new tokens only. Finishing
moves the border, aborting leaves it where it was.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from devices.pages import IntArray
from session.errors import SessionError

FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """One turn of the history: the log's tokens `[start, prompt_end)` were given, `[prompt_end, end)` generated."""

    request_id: str
    start: int
    prompt_end: int
    end: int


class TokenLog:
    """Attributes:
    turns: finished turns, oldest first; they cover the log without a gap.
    """

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(FIRST_CAPACITY, dtype=np.int32)
        self.turns: list[FinishedTurn] = []

    def __len__(self) -> int:
        """Tokens of finished turns."""
        return self.turns[-1].end if self.turns else 0

    @property
    def tokens(self) -> IntArray:
        """Finished tokens, int32 [len]; read only."""
        return self.readable(len(self))

    def readable(self, length: int) -> IntArray:
        """The first `length` tokens, those of a running turn's tail included; int32, read only."""
        view = self._buffer[:length]
        view.flags.writeable = False
        return view

    def open_tail(self, new_ids: IntArray, max_len: int) -> IntArray:
        """Put a turn's prompt behind the finished part.

        Args:
            new_ids: int32 [n], what the turn adds to the history.
            max_len: most tokens that history, prompt and output together may have.
        Returns:
            Room for all of them, int32 [max_len]; the turn writes behind its prompt only.
        """
        start = len(self)
        if max_len > len(self._buffer):
            # Copied to twice what is needed: a turn pays for the history once in a while, not each time.
            grown = np.empty(2 * max_len, dtype=np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start : start + len(new_ids)] = new_ids
        return self._buffer[:max_len]

    def finish(self, request_id: str, prompt_end: int, end: int) -> None:
        """The turn whose tail ends at `end` becomes history."""
        start = len(self)
        assert start <= prompt_end <= end <= len(self._buffer)
        self.turns.append(FinishedTurn(request_id, start, prompt_end, end))

    def truncate(self, length: int) -> None:
        """Forget what lies behind `length`; a turn that is cut in two keeps its front.

        Raises SessionError when the history is shorter.
        """
        if not 0 <= length <= len(self):
            raise SessionError("to", length, f"is not within the history of {len(self)} tokens")
        del self.turns[bisect_left(self.turns, length, key=lambda turn: turn.end) + 1 :]
        if self.turns and self.turns[-1].end > length:
            last = self.turns.pop()
            if last.start < length:
                self.turns.append(FinishedTurn(last.request_id, last.start, min(last.prompt_end, length), length))

    def copy(self, length: int) -> TokenLog:
        """A log of its own with the first `length` tokens of this one. Raises SessionError as `truncate` does."""
        other = TokenLog()
        other.turns = list(self.turns)
        other._buffer = self._buffer
        other.truncate(length)
        other._buffer = self._buffer[: max(length, FIRST_CAPACITY)].copy()
        return other

    def end_of_turn(self, turn: int) -> int:
        """Length of the history after its first `turn` turns. Raises SessionError when there were fewer."""
        if not 0 <= turn <= len(self.turns):
            raise SessionError("turn", turn, f"is not within the history of {len(self.turns)} turns")
        return self.turns[turn - 1].end if turn else 0
