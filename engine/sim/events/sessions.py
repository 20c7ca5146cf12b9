"""Conversations: turns on a kept row, and what happens to one between and during its turns.

The world keeps each history as the oracle knows it: prompts, and the answers of turns that ended by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devices.pages import floor_page, page_count
from engine.errors import BadRequest
from engine.sampling.params import SamplingParams
from engine.sim.events.kinds import Kind, Swarm
from engine.sim.events.requests import NUM_HEADS, text_of
from engine.sim.failures import BrokenPromise
from engine.sim.world import World, name_of
from session.errors import SessionError

NUM_SESSIONS = 4
"""Few, so that most turns continue a history and most events meet somebody."""


def _opened(world: World, session: int, history: list[int], timeout_s: float | None) -> None:
    """Write down a session that was opened now."""
    world.histories[session] = history
    world.last_used_s[session] = world.clock.now_s
    world.timeouts.pop(session, None)
    if timeout_s is not None:
        world.timeouts[session] = timeout_s


@dataclass(frozen=True, slots=True)
class TakeTurn:
    """A turn of a session, which is opened when it is not open.

    Attributes:
        key: of the request, like that of an arrival.
        keep: the history is rewound to so many tokens first, where it is longer; None keeps all.
        timeout_s: of the session, when this opens it.
    """

    key: int
    session: int
    tail: int
    own: int
    max_new: int
    seed: int | None = None
    keep: int | None = None
    timeout_s: float | None = None

    def apply(self, world: World) -> str:
        if len(world.tickets) >= world.config.max_live or self.key in world.texts or world.find(self.key):
            return f"full#{self.key}"
        if self.session not in world.histories:
            world.core.sessions.open(name_of(self.session), timeout_s=self.timeout_s)
            _opened(world, self.session, [], self.timeout_s)
        history = world.histories[self.session][: self.keep]
        keep = len(history) if len(history) < len(world.histories[self.session]) else None
        prompt = history + text_of(NUM_HEADS + self.tail)[: self.own]
        is_busy = world.turn_of(self.session) is not None or self.session in world.closing
        params = SamplingParams(
            max_new_tokens=self.max_new, temperature=0.0 if self.seed is None else 1.0, seed=self.seed
        )
        try:
            new_ids = np.array(prompt[len(history) :], dtype=np.int32)
            request = world.core.add_turn(name_of(self.session), new_ids, params, keep=keep)
        except BadRequest as error:
            if not is_busy and not self._is_impossible(world, len(prompt)):
                raise BrokenPromise("turn", f"{len(prompt)} tokens were refused: {error}") from error
            world.marks["turn refused"] += 1
            return f"turn?{self.session}"
        if is_busy or self._is_impossible(world, len(prompt)):
            raise BrokenPromise("turn", f"of {len(prompt)} tokens was taken; the session is busy: {is_busy}")
        world.histories[self.session] = history
        world.expect(self.key, [request], prompt, None)
        world.tickets[-1].session = self.session
        world.marks["turn"] += 1
        return f"turn#{self.key}@{self.session}"

    def _is_impossible(self, world: World, length: int) -> bool:
        config = world.config
        return not 0 < length < config.context_len or page_count(length, config.page_size) > config.num_pages


def draw_turn(swarm: Swarm) -> TakeTurn:
    rng, key = swarm.rng, swarm.num_keys
    swarm.num_keys += 1
    return TakeTurn(
        key=key,
        session=rng.randrange(NUM_SESSIONS),
        tail=rng.choice((key, rng.randrange(3))),
        own=rng.randrange(0, 2 * swarm.config.page_size + 2),
        max_new=rng.choice((1, 2, 3, 5, 8)),
        seed=rng.randrange(1000) if "sampled" in swarm.traits and rng.random() < 0.5 else None,
        keep=rng.randrange(swarm.config.capacity) if rng.random() < 0.3 else None,
        timeout_s=rng.uniform(0.001, 0.05) if "timeout" in swarm.traits and rng.random() < 0.5 else None,
    )


@dataclass(frozen=True, slots=True)
class Rewind:
    """Forget the last `tokens` of a history; refused while a turn is under way."""

    session: int
    tokens: int

    def apply(self, world: World) -> str:
        history = world.histories.get(self.session)
        if history is None:
            return "rewind?"
        length = max(0, len(history) - self.tokens)
        is_busy = world.turn_of(self.session) is not None
        try:
            world.core.sessions.rewind(name_of(self.session), length)
        except SessionError as error:
            if not is_busy:
                raise BrokenPromise("rewind", f"to {length} of {len(history)} tokens was refused: {error}") from error
            return f"rewind?{self.session}"
        if is_busy:
            raise BrokenPromise("rewind", "moved a history under its turn")
        del history[length:]
        world.marks["rewind"] += 1
        return f"rewind@{self.session}-{self.tokens}"


@dataclass(frozen=True, slots=True)
class Fork:
    """A new session from the history of another, without its last `tokens`; the other may be in a turn."""

    session: int
    child: int
    tokens: int

    def apply(self, world: World) -> str:
        history = world.histories.get(self.session)
        if history is None or world.turn_of(self.child) is not None:
            return "fork?"
        world.core.close_session(name_of(self.child))
        world.histories.pop(self.child, None)
        length = max(0, len(history) - self.tokens)
        owed = self._owed(world, length)
        child = world.core.sessions.fork(name_of(self.session), length=length, new_id=name_of(self.child))
        if child.log.tokens.tolist() != history[:length]:
            raise BrokenPromise("fork", f"the child of {self.session} has another history than its {length} tokens")
        if child.held_tokens < owed:
            raise BrokenPromise("fork", f"the child of {self.session} has {child.held_tokens} tokens of KV, not {owed}")
        _opened(world, self.child, history[:length], world.timeouts.get(self.session))
        world.row_versions[self.child] = world.row_versions.get(self.session, -1)
        world.marks["session fork"] += 1
        world.marks["session fork with a row"] += child.slot.has_row
        return f"fork@{self.session}>{self.child}"

    def _owed(self, world: World, length: int) -> int:
        """Tokens of KV that the child gets at least: all that the row holds, where a row and a page are to spare."""
        record, page_size = world.core.sessions.get(name_of(self.session)).slot.record, world.config.page_size
        is_spare = world.allocator.rows.num_free > 0 and all(pool.num_free for pool in world.families.pools.values())
        if record.req_pool_idx is None or not is_spare or world.families.fails_in is not None:
            return 0
        length = min(length, record.kv_committed_len)
        if world.config.resume_unit == "page":
            length = floor_page(length, page_size)
        return length if length >= record.cache_protected_len and world.has_window(record, length) else 0


@dataclass(frozen=True, slots=True)
class Hold:
    """A wish to keep a row; it must never keep anybody else from running."""

    session: int
    seconds: float

    def apply(self, world: World) -> str:
        if self.session not in world.histories:
            return "hold?"
        world.core.sessions.hold(name_of(self.session), self.seconds)
        return f"hold@{self.session}"


@dataclass(frozen=True, slots=True)
class Close:
    """A session is closed: now, or at the end of its turn, which `abort` ends."""

    session: int
    abort: bool

    def apply(self, world: World) -> str:
        if self.session not in world.histories:
            return "close?"
        ticket = world.turn_of(self.session)
        if ticket is not None and self.abort:
            ticket.is_abort_asked = True
        is_closed = world.core.close_session(name_of(self.session), abort=self.abort)
        is_over = ticket is None or ticket.request.finish is not None
        if is_closed is not is_over:
            raise BrokenPromise("close", f"session {self.session} is closed: {is_closed}, its turn over: {is_over}")
        if is_closed:
            world.histories.pop(self.session)
            world.closing.discard(self.session)
        else:
            world.closing.add(self.session)
        world.marks["close" if is_closed else "close in a turn"] += 1
        return f"close@{self.session}"


def draw_fork(swarm: Swarm) -> Fork:
    session, child = swarm.rng.sample(range(NUM_SESSIONS), 2)
    return Fork(session, child, swarm.rng.randrange(2 * swarm.config.page_size))


BETWEEN_TURNS = (
    Kind("rewind", lambda s: Rewind(s.rng.randrange(NUM_SESSIONS), s.rng.randrange(3 * s.config.page_size))),
    Kind("fork", draw_fork),
    Kind("hold", lambda s: Hold(s.rng.randrange(NUM_SESSIONS), s.rng.uniform(0, 0.1))),
    Kind("close", lambda s: Close(s.rng.randrange(NUM_SESSIONS), s.rng.random() < 0.5)),
)
KINDS = (Kind("turn", draw_turn), *BETWEEN_TURNS)
