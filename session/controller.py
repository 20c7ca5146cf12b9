"""All sessions of an engine: who is open, what they may use, and whose row gives way when pages are short.

Everything here happens in the scheduler's thread and on its clock, so with several ranks one of them decides. Idle
rows are the allocator's last reserve: they come after unlocked leaves of the tree, longest unused first, a `hold`
making a row count as more recently wanted while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from devices.base import Capabilities
from devices.page_pool import OutOfPages
from devices.pages import IntArray
from mem_cache.allocation import KvAllocator
from mem_cache.audit import Violation
from mem_cache.holding import Holding
from mem_cache.kv_info import Turn
from mem_cache.rows import OutOfRows
from mem_cache.tree.keys import Namespace
from session.branching import BranchingSession
from session.errors import SessionBusy, SessionError, SessionFull, UnknownSession
from session.session import BegunTurn, Hold, Session, SessionLimits
from session.state import Phase

MAX_ID_CHARS = 256
MAX_HOLD_S = 24 * 3600.0


class SessionController:
    """Attributes:
    limits: enforced when a session is opened and when a turn begins.
    context_len: most tokens that any history may have.
    """

    def __init__(
        self,
        allocator: KvAllocator,
        capabilities: Capabilities,
        *,
        context_len: int,
        limits: SessionLimits,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.context_len = context_len
        self._allocator = allocator
        self._capabilities = capabilities
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._branching: dict[str, BranchingSession] = {}
        self._num_opened = 0
        self._next_expiry_s = math.inf
        allocator.idle = self

    def __len__(self) -> int:
        """Sessions of both kinds that are not closed."""
        self._forget_closed()
        return len(self._sessions) + len(self._branching)

    def sessions(self) -> Iterator[Session]:
        """Those that hold a row between turns, or may."""
        return (session for session in self._sessions.values() if session.state.phase is not Phase.CLOSED)

    # Opening and closing.

    def open(
        self,
        session_id: str | None = None,
        *,
        capacity: int | None = None,
        timeout_s: float | None = None,
        namespace: Namespace | None = None,
    ) -> Session:
        """A new, empty session.

        Args:
            session_id: its name; one is made when None.
            capacity: most tokens that its history may have; the context's when None.
            timeout_s: idle seconds after which it closes.
            namespace: of its KV in the tree.
        Raises:
            SessionError: the id is in use or malformed, a number is out of range.
            SessionFull: `max_sessions` are open.
        """
        name = self._admit(session_id, capacity, timeout_s)
        session = Session(
            id=name,
            generation=self._num_opened,
            allocator=self._allocator,
            capabilities=self._capabilities,
            namespace=namespace or Namespace(),
            capacity=capacity or self.context_len,
            timeout_s=timeout_s,
            last_used_s=self._clock(),
        )
        self._sessions[name] = session
        self._next_expiry_s = min(self._next_expiry_s, session.expires_s(self._clock()))
        return session

    def open_branching(
        self,
        session_id: str | None = None,
        *,
        capacity: int | None = None,
        timeout_s: float | None = None,
        namespace: Namespace | None = None,
    ) -> BranchingSession:
        """A new session in which any request may be continued; see `session.branching`. Otherwise as `open`."""
        name = self._admit(session_id, capacity, timeout_s)
        now = self._clock()
        session = BranchingSession(name, namespace or Namespace(), capacity or self.context_len, timeout_s, now)
        self._branching[name] = session
        self._next_expiry_s = min(self._next_expiry_s, session.expires_s(now))
        return session

    def _admit(self, session_id: str | None, capacity: int | None, timeout_s: float | None) -> str:
        """Check what a new session asks for; returns its name."""
        if capacity is not None and not 2 <= capacity <= self.context_len:
            raise SessionError("capacity", capacity, f"must be 2 to the context's {self.context_len} tokens")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise SessionError("timeout", timeout_s, "must be above 0 seconds; leave it out for a session without one")
        if len(self) >= self.limits.max_sessions:
            rule = "sessions are open, as many as max_sessions allows; close one or raise --max-sessions"
            raise SessionFull("open_session", len(self), rule)
        self._num_opened += 1
        name = self._new_id() if session_id is None else session_id
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
            raise SessionError("session_id", name, f"must be a string of 1 to {MAX_ID_CHARS} characters")
        if name in self._sessions or name in self._branching:
            raise SessionError("session_id", name, "is open already; close it first or choose another")
        return name

    def get(self, session_id: Any) -> Session:
        """Raises UnknownSession when there is no open one of this id."""
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None or session.state.phase is Phase.CLOSED:
            raise UnknownSession("session_id", session_id, "is not open: never opened, closed or timed out")
        return session

    def get_branching(self, session_id: Any) -> BranchingSession | None:
        """The open branching session of this id, if there is one."""
        session = self._branching.get(session_id) if isinstance(session_id, str) else None
        return None if session is None or session.phase is Phase.CLOSED else session

    def close(self, session_id: str) -> bool:
        """Close a session, now or when its turns have ended; True when it is closed. An unknown one is closed."""
        session = self._sessions.get(session_id) or self._branching.get(session_id)
        closed = session is None or session.close()
        self._forget_closed()
        return closed

    def running(self, session_id: str) -> list[str]:
        """Ids of a session's requests that have not ended."""
        branching = self._branching.get(session_id)
        if branching is not None:
            return branching.running()
        turn = self._sessions[session_id].state.turn if session_id in self._sessions else None
        return [turn.request_id] if turn is not None else []

    def expire(self) -> None:
        """Close what has been idle for longer than its timeout; called once a step, by the rank that decides."""
        now = self._clock()
        if now <= self._next_expiry_s:
            return
        both: list[Session | BranchingSession] = [*self._sessions.values(), *self._branching.values()]
        late = [session for session in both if session.expires_s(now) < now]
        for session in late:
            session.close()
        self._forget_closed()
        # No session can be due before this: use only moves its time to later.
        self._next_expiry_s = min((session.expires_s(now) for session in both if session not in late), default=math.inf)

    # Turns.

    def begin(
        self, session_id: str, request_id: str, new_ids: IntArray, max_new_tokens: int, *, keep: int | None = None
    ) -> BegunTurn:
        """Start a turn of a session; see `Session.begin`.

        Raises:
            UnknownSession, SessionBusy, SessionFull: nothing changed.
        """
        session = self.get(session_id)
        if session.state.phase is Phase.CLOSING:
            raise SessionBusy("session_id", session_id, "is being closed; it takes no further turn")
        most = self.limits.max_total_tokens
        dropped = 0 if keep is None else len(session.log) - keep
        if most is not None and (total := self.num_log_tokens - dropped + len(new_ids)) > most:
            rule = (
                f"tokens would be in all histories together and {most} may (--max-session-tokens); close or rewind some"
            )
            raise SessionFull("prompt", total, rule)
        begun = session.begin(request_id, new_ids, max_new_tokens, keep=keep)
        session.last_used_s = self._clock()
        return begun

    @property
    def num_log_tokens(self) -> int:
        return sum(len(session.log) for session in self.sessions())

    # Between turns.

    def fork(self, session_id: str, *, length: int | None = None, new_id: str | None = None) -> Session:
        """A new session that starts from the first `length` tokens of another's history, all when None.

        Full pages of the row are shared, a partial last one is copied; nothing is computed. The other is not touched,
        and may be in a turn: only finished turns can be forked. Without pages or a row to spare the new session starts
        from its log alone.

        Raises:
            UnknownSession, SessionFull, SessionError: nothing changed.
        """
        parent = self.get(session_id)
        length = len(parent.log) if length is None else length
        log = parent.log.copy(length)
        child = self.open(new_id, capacity=parent.capacity, timeout_s=parent.timeout_s, namespace=parent.namespace)
        child.log = log
        keeper = Turn(f"fork of {parent.id}", 0)
        was_idle = parent.slot.is_idle
        if was_idle:  # making room for the child must not take the parent's row
            parent.slot.record.lend(keeper)
        try:
            parent.slot.fork_into(child.slot, length)
        except (OutOfRows, OutOfPages):
            pass  # the log is enough: the next turn finds in the tree what is there
        finally:
            if was_idle:
                parent.slot.give_back(keeper)
        parent.stats.num_forks += 1
        return child

    def rewind(self, session_id: str, length: int) -> None:
        """Forget the history behind `length` tokens. Raises UnknownSession, SessionBusy, SessionError."""
        self.get(session_id).rewind(length)

    def hold(self, session_id: str, seconds: float, priority: float = 1.0) -> None:
        """Ask that the session's row give way late: the wish fades over `seconds` and never blocks anybody.

        Raises UnknownSession, SessionError.
        """
        session = self.get(session_id)
        if not 0 <= seconds <= MAX_HOLD_S:
            raise SessionError("seconds", seconds, f"must be 0 to {MAX_HOLD_S:.0f}")
        if not 0 < priority < math.inf:
            raise SessionError("priority", priority, "must be above 0 and finite")
        session.hold = Hold(self._clock(), seconds, priority)

    def demote_all(self) -> None:
        """Take every idle row back; histories stay."""
        for session in self.sessions():
            if session.slot.is_idle:
                session.demote()

    # `mem_cache.allocation.IdleRows`.

    def __iter__(self) -> Iterator[Holding]:
        now = self._clock()
        idle = [session for session in self._sessions.values() if session.slot.is_idle]
        idle.sort(key=lambda session: (session.hold.weight(now), session.last_used_s))
        return (session.slot.held for session in idle)

    def demote(self, holding: Holding) -> None:
        next(session for session in self._sessions.values() if session.slot.held is holding).demote()

    # The books.

    def holdings(self) -> list[Holding]:
        """What sessions hold, lent or not, for the audit."""
        return [session.slot.held for session in self.sessions()]

    def census(self) -> tuple[int, int, int]:
        """Pages that idle rows alone hold beside the tree's, open sessions, and written tokens in their rows."""
        held = [session.held_tokens for session in self.sessions()]
        return self._allocator.num_held_only_by(self), len(held), sum(held)

    def audit(self) -> list[Violation]:
        """Sessions whose parts disagree; pages, rows and locks are the census's business."""
        return [
            Violation("session", session.id, text) for session in self.sessions() for text in _disagreements(session)
        ]

    def _forget_closed(self) -> None:
        self._sessions = {session.id: session for session in self.sessions()}
        open_ones = (one for one in self._branching.values() if one.phase is not Phase.CLOSED)
        self._branching = {session.id: session for session in open_ones}

    def _new_id(self) -> str:
        while (name := f"s{self._num_opened}") in self._sessions or name in self._branching:
            self._num_opened += 1
        return name


def _disagreements(session: Session) -> Iterator[str]:
    """What is wrong between a session's state, its record and its log."""
    state, record = session.state, session.slot.record
    turn_now, activity = state.turn, state.activity
    if record.borrower != (turn_now if activity is Phase.RUNNING else None):
        yield f"the session is {state} and {record.borrower} borrows {record}"
    if (turn_now is None) is not (activity is Phase.IDLE):
        yield f"the session is {activity.value} with turn {turn_now}"
    if turn_now is None and record.kv_committed_len > len(session.log):
        yield f"{record} has more than the {len(session.log)} tokens of the history"
    end = 0
    for turn in session.log.turns:
        if turn.start != end:
            yield f"turns {session.log.turns} do not cover the history"
        end = turn.end
