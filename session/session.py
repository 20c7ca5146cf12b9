"""One conversation: its log, where its turn is, and its slot, moved together.

    begin -> resume -> (retract -> resume)* -> finish | abort

Every move names the turn. A finish appends to the history; an abort returns to the last finished turn, whose committed
KV stays. Between turns the session is nothing but a log and, as long as nobody needs the memory, a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from devices.base import Capabilities
from devices.pages import IntArray, align_resume
from mem_cache.allocation import KvAllocator
from mem_cache.kv_info import Turn
from mem_cache.tree.keys import Namespace
from session.errors import SessionBusy, SessionFull
from session.log import TokenLog
from session.slot import SessionSlot
from session.state import Phase, SessionState


@dataclass(slots=True)
class SessionStats:
    """Counts since the session was opened, tokens unless the name says otherwise.

    Attributes:
        reused_tokens: prompt tokens of turns that came from the row or the tree.
        computed_tokens: prompt tokens of turns that were computed.
        lost_to_alignment_tokens: written tokens of the row that were computed again because the device resumes at page
            borders only.
        num_turns: finished turns.
    """

    reused_tokens: int = 0
    computed_tokens: int = 0
    lost_to_alignment_tokens: int = 0
    num_turns: int = 0
    num_retractions: int = 0
    num_demotions: int = 0
    num_forks: int = 0


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What sessions may use.

    Attributes:
        max_sessions: open at once.
        max_total_tokens: in all histories together, running turns' prompts included; None is no limit.
    """

    max_sessions: int = 1024
    max_total_tokens: int | None = None


@dataclass(slots=True)
class Hold:
    """A wish to keep a row: `priority` fades to nothing over `seconds`. It orders, it never pins."""

    since_s: float = 0.0
    seconds: float = 0.0
    priority: float = 0.0

    def weight(self, now_s: float) -> float:
        left = self.since_s + self.seconds - now_s
        return self.priority * left / self.seconds if left > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """What a request needs of its session.

    Attributes:
        tokens: the request's buffer, int32 [most tokens it may reach]: history and prompt, then room.
        prompt_len: tokens of history and new prompt.
    """

    turn: Turn
    tokens: IntArray
    prompt_len: int


@dataclass(slots=True, eq=False)
class Session:
    """Attributes:
    id, generation: a name that was closed may be opened again, with the next generation.
    capacity: most tokens that the history may have.
    timeout_s: idle seconds after which the session closes; None keeps it.
    last_used_s: scheduler time of the last begin or end of a turn.
    turn_lost_tokens: of the latest turn, see `SessionStats.lost_to_alignment_tokens`.
    """

    id: str
    generation: int
    allocator: KvAllocator
    capabilities: Capabilities
    namespace: Namespace
    capacity: int
    timeout_s: float | None
    last_used_s: float
    log: TokenLog = field(default_factory=TokenLog)
    state: SessionState = field(default_factory=SessionState)
    stats: SessionStats = field(default_factory=SessionStats)
    hold: Hold = field(default_factory=Hold)
    turn_lost_tokens: int = 0
    slot: SessionSlot = field(init=False)

    def __post_init__(self) -> None:
        owner_id = f"{self.id}#{self.generation}"
        self.slot = SessionSlot(self.allocator, self.capabilities, owner_id, self.namespace)

    # A turn.

    def begin(self, request_id: str, new_ids: IntArray, max_new_tokens: int, *, keep: int | None = None) -> BegunTurn:
        """IDLE -> QUEUED: history and `new_ids` become a prompt. The row may still give way until the turn is admitted.

        Args:
            keep: rewind to so many tokens of the history first.
        Raises:
            SessionBusy: a turn is under way.
            SessionFull: the history has no room for the prompt and one token of an answer.
            SessionError: the history is shorter than `keep`. Nothing changed in each case.
        """
        history = len(self.log) if keep is None else keep
        prompt_len = history + len(new_ids)
        if prompt_len >= self.capacity and self.state.phase is Phase.IDLE:
            rule = (
                f"new tokens on {history} of history leave no room for an answer: the session's capacity is "
                f"{self.capacity} tokens; rewind it, open a new one, or raise its capacity"
            )
            raise SessionFull("prompt", len(new_ids), rule)
        if keep is not None and self.state.phase is Phase.IDLE:
            self.rewind(keep)
        turn = self.state.queue(request_id)
        self.turn_lost_tokens = 0
        tokens = self.log.open_tail(new_ids, min(prompt_len + max_new_tokens, self.capacity))
        return BegunTurn(turn, tokens, prompt_len)

    def resume(self, turn: Turn, wanted: int, known: int, namespace: Namespace) -> int:
        """Lend the row to its turn, cut to what it may continue from; the state moves with `start` only.

        Args:
            wanted: most tokens that the turn may take over.
            known: tokens that it has.
        Returns:
            Tokens of the row that it continues from; 0: the record is empty, and matched against the tree like any.
        """
        readable = min(wanted, self.slot.record.kv_committed_len)
        reused = self.slot.lend(turn, wanted, self.log.readable(known), namespace)
        lost = readable - align_resume(readable, self.allocator.geometry.page_size, self.capabilities)
        self.turn_lost_tokens += lost
        self.stats.lost_to_alignment_tokens += lost
        return reused

    def put_back(self, turn: Turn) -> None:
        """The turn could not be admitted: it waits on, and its row is idle again."""
        self.slot.give_back(turn)

    def start(self, turn: Turn, reused: int, wanted: int) -> None:
        """The turn was admitted: QUEUED or RETRACTED -> RUNNING.

        Args:
            reused: tokens that it continues from, of the row or the tree.
            wanted: tokens that are not computed at best: all that it knows but the last.
        """
        if self.state.activity is Phase.QUEUED:
            self.stats.reused_tokens += reused
            self.stats.computed_tokens += wanted + 1 - reused
        started = self.state.start(turn)
        assert started, f"{turn} was admitted and the session is {self.state}"

    def retract(self, turn: Turn) -> Turn | None:
        """RUNNING -> RETRACTED: the row is idle and keeps all that is committed. None for a foreign turn."""
        following = self.state.retract(turn)
        if following is not None:
            self.allocator.trim(self.slot.record)
            self.slot.give_back(turn)
            self.stats.num_retractions += 1
        return following

    def finish(self, turn: Turn, prompt_len: int, known: int, now_s: float) -> bool:
        """The turn's `known` tokens are history. False, changing nothing, for a foreign turn."""
        if not self._end(turn, now_s):
            return False
        self.log.finish(turn.request_id, prompt_len, known)
        self.stats.num_turns += 1
        self.slot.rewind(known, self.log.tokens)
        self._closed_if_due()
        return True

    def abort(self, turn: Turn, known: int, now_s: float, *, trust_kv: bool = True) -> bool:
        """Back to the last finished turn, whose committed KV stays. False, changing nothing, for a foreign turn.

        Args:
            known: tokens that the turn had.
            trust_kv: False when the turn's forward went wrong: what the row holds is given up.
        """
        if not self._end(turn, now_s):
            return False
        if trust_kv:
            self.slot.rewind(len(self.log), self.log.readable(known))
        else:
            self.slot.drop()
        self._closed_if_due()
        return True

    def _end(self, turn: Turn, now_s: float) -> bool:
        was_running = self.state.activity is Phase.RUNNING
        if not self.state.end(turn):
            return False
        if was_running:
            self.slot.give_back(turn)
        self.slot.publishes_prompt = False
        self.last_used_s = now_s
        return True

    # Between turns.

    def demote(self) -> None:
        """Leave the row's pages to the tree; the log stays, and the next turn finds in the tree what is left of it."""
        self.slot.demote(self.log.readable(self.slot.record.kv_committed_len))
        self.stats.num_demotions += 1

    def rewind(self, length: int) -> None:
        """Forget the history behind `length`.

        Raises SessionBusy while a turn is under way, SessionError when the history is shorter.
        """
        if self.state.turn is not None:
            raise SessionBusy("to", length, f"cannot rewind: the session is {self.state}; wait for its end or abort it")
        written = self.log.tokens
        self.log.truncate(length)
        self.slot.rewind(length, written)

    def close(self) -> bool:
        """Legal in every phase. True when it is closed now, False when it will be at the end of its turn."""
        self.state.close()
        return self._closed_if_due()

    def _closed_if_due(self) -> bool:
        if self.state.phase is not Phase.CLOSED:
            return False
        if self.slot.has_row:
            self.slot.demote(self.log.readable(self.slot.record.kv_committed_len))
        return True

    def expires_s(self, now_s: float) -> float:
        """When it closes by itself if nothing happens; a turn that is under way counts as use."""
        if self.timeout_s is None:
            return math.inf
        return (self.last_used_s if self.state.phase is Phase.IDLE else now_s) + self.timeout_s

    @property
    def held_tokens(self) -> int:
        """Tokens of KV that the row holds and that are written."""
        return self.slot.record.kv_committed_len
