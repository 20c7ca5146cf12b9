"""Where a session's turn is: one machine, whose moves all name the turn they belong to.

    IDLE -> QUEUED(turn) -> RUNNING(turn) -> IDLE
                 ^               |  ^
              put back        RETRACTED(turn)          CLOSING(turn) and CLOSED lie beside it

A turn is the token `(request id, attempt)`. A move with another turn's token returns False and changes nothing, so
whoever was refused, retracted or aborted long ago cannot touch the turn that runs now. A retraction is not a finish:
only `finish` moves the point to which an abort returns.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from mem_cache.kv_info import Turn
from session.errors import SessionBusy


class Phase(Enum):
    """What a session is doing."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    RETRACTED = "retracted"
    CLOSING = "closing"
    CLOSED = "closed"


class SessionState:
    """Attributes:
    turn: the turn that is under way, None when none is.
    """

    def __init__(self) -> None:
        self.turn: Turn | None = None
        self._activity = Phase.IDLE
        self._is_closing = False

    @property
    def phase(self) -> Phase:
        """CLOSING hides whether the turn that is waited for is queued, running or retracted: `activity` says it."""
        if not self._is_closing:
            return self._activity
        return Phase.CLOSED if self.turn is None else Phase.CLOSING

    @property
    def activity(self) -> Phase:
        """IDLE, QUEUED, RUNNING or RETRACTED."""
        return self._activity

    def queue(self, request_id: str) -> Turn:
        """IDLE -> QUEUED. Raises SessionBusy when a turn is under way, whoever asks."""
        if self.turn is not None or self._is_closing:
            raise SessionBusy("request_id", request_id, f"overlaps: the session is {self}; wait for it or abort it")
        self.turn, self._activity = Turn(request_id, 0), Phase.QUEUED
        return self.turn

    def start(self, turn: Turn) -> bool:
        """QUEUED or RETRACTED -> RUNNING."""
        return self._move(turn, (Phase.QUEUED, Phase.RETRACTED), Phase.RUNNING)

    def retract(self, turn: Turn) -> Turn | None:
        """RUNNING -> RETRACTED; the next attempt's token, or None for a foreign one. The turn keeps the session."""
        if not self._move(turn, (Phase.RUNNING,), Phase.RETRACTED):
            return None
        self.turn = replace(turn, attempt=turn.attempt + 1)
        return self.turn

    def end(self, turn: Turn) -> bool:
        """QUEUED, RUNNING or RETRACTED -> IDLE, or CLOSED when that was waited for."""
        if not self._move(turn, (Phase.QUEUED, Phase.RUNNING, Phase.RETRACTED), Phase.IDLE):
            return False
        self.turn = None
        return True

    def close(self) -> bool:
        """Any phase; True when nothing needs to be waited for. A second close changes nothing."""
        self._is_closing = True
        return self.turn is None

    def _move(self, turn: Turn, sources: tuple[Phase, ...], target: Phase) -> bool:
        if turn != self.turn or self._activity not in sources:
            return False
        self._activity = target
        return True

    def __str__(self) -> str:
        turn = f" (turn {self.turn.request_id}, attempt {self.turn.attempt})" if self.turn else ""
        return f"{self.phase.value}{turn}"
