"""SGLang's non-streaming sessions: a tree of requests, of which a new one continues any.

    turn a --- turn b --- turn d         rid="b", offset=0      ->  d sees a, b and its own tokens
         `---- turn c                    rid="a", offset=5      ->  c sees 5 tokens of a's context

Nothing holds KV for such a session: each turn is a request like any other and finds in the prefix tree what is there.
The parameters mean exactly what they mean in SGLang 0.5.23, the stripped BOS included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from devices.pages import IntArray
from mem_cache.tree.keys import Namespace
from session.errors import SessionBusy, SessionError, SessionFull
from session.state import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParams:
    """How a request continues a session, with SGLang's names.

    Attributes:
        id: the session.
        rid: the request to continue; None starts a branch of its own. A streaming session has one end and ignores it.
        offset: not 0: keep so many tokens of that request's context (negative: all but so many) and drop the rest.
        replace: abort that request if it still runs, and forget what continued it; without `rid` forget every request.
        drop_previous_output: continue its prompt, not its answer.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False

    def __post_init__(self) -> None:
        """Raises SessionError that names the field and its type."""
        rules: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
            ("id", str, "a string"),
            ("rid", (str, type(None)), "a string or None"),
            ("offset", (int, type(None)), "a whole number or None"),
            ("replace", (bool, type(None)), "true or false"),
            ("drop_previous_output", (bool, type(None)), "true or false"),
        )
        for name, kind, what in rules:
            value = getattr(self, name)
            if not isinstance(value, kind) or (name == "offset" and isinstance(value, bool)):
                raise SessionError(f"session_params.{name}", value, f"must be {what}")

    def check_streaming(self) -> None:
        """Raises SessionError when a streaming session cannot do what is asked."""
        for name, use in (
            ("offset", "rewind() the session"),
            ("replace", "abort the turn, or rewind() the session"),
            ("drop_previous_output", "rewind() the session to the end of the prompt"),
        ):
            if getattr(self, name):
                rule = f"is not legal on a streaming session, whose history only grows: {use} instead"
                raise SessionError(f"session_params.{name}", getattr(self, name), rule)


class BranchTurn(Protocol):
    """What a session reads of a request; it stays readable when the request has ended."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> IntArray: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def finish(self) -> Any: ...


@dataclass(slots=True)
class _Node:
    """A turn; `max_new_tokens` bounds how much of its output a continuation sees."""

    turn: BranchTurn
    max_new_tokens: int
    children: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class BranchingSession:
    """A tree of requests. Attributes as those of `session.session.Session`."""

    id: str
    namespace: Namespace
    capacity: int
    timeout_s: float | None
    last_used_s: float
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _is_closing: bool = False

    @property
    def phase(self) -> Phase:
        is_busy = any(node.turn.finish is None for node in self._nodes.values())
        if self._is_closing:
            return Phase.CLOSING if is_busy else Phase.CLOSED
        return Phase.RUNNING if is_busy else Phase.IDLE

    def __len__(self) -> int:
        """Turns that can be continued."""
        return len(self._nodes)

    def check_begin(self, prompt_len: int) -> None:
        """Raises SessionBusy while it closes, SessionFull when the prompt leaves no room for an answer."""
        if self._is_closing:
            raise SessionBusy("session_params.id", self.id, "is being closed; it takes no further turn")
        if prompt_len >= self.capacity:
            rule = f"tokens leave no room for an answer: the session's capacity is {self.capacity} tokens"
            raise SessionFull("prompt", prompt_len, rule)

    def context(self, params: SessionParams) -> IntArray:
        """What a new request sees before its own tokens, int32 [n]. Changes nothing.

        Raises:
            SessionError: `rid` is unknown. SessionBusy: it has not finished and is not to be replaced.
        """
        if params.rid is None:
            return np.empty(0, dtype=np.int32)
        node = self._nodes.get(params.rid)
        if node is None:
            raise SessionError("session_params.rid", params.rid, f"is no request of session {self.id!r}")
        if node.turn.finish is None and not params.replace:
            raise SessionBusy("session_params.rid", params.rid, "has not finished; wait for it, or replace it")
        end = node.turn.prompt_len
        if not params.drop_previous_output:
            end = min(len(node.turn.tokens), end + node.max_new_tokens)
        context = node.turn.tokens[:end]
        return context[: params.offset] if params.offset else context

    def replace(self, params: SessionParams) -> str | None:
        """Forget what `replace` says; returns the id of the replaced request when it still runs and must be aborted."""
        if not params.replace:
            return None
        if params.rid is None:
            self._nodes.clear()
            return None
        node = self._nodes[params.rid]
        self._forget_below(node)
        return node.turn.id if node.turn.finish is None else None

    def add(self, params: SessionParams, turn: BranchTurn, max_new_tokens: int) -> None:
        """Remember a turn that was started from `context(params)`."""
        self._nodes[turn.id] = _Node(turn, max_new_tokens)
        if params.rid is not None and params.rid in self._nodes:
            self._nodes[params.rid].children.append(turn.id)

    def close(self) -> bool:
        """Take no further turn; True when none runs, False when the last one's end will close it."""
        self._is_closing = True
        return self.phase is Phase.CLOSED

    def expires_s(self, now_s: float) -> float:
        """As `Session.expires_s`."""
        if self.timeout_s is None:
            return math.inf
        return (self.last_used_s if self.phase is Phase.IDLE else now_s) + self.timeout_s

    def running(self) -> list[str]:
        """Ids of requests that have not finished."""
        return [name for name, node in self._nodes.items() if node.turn.finish is None]

    def _forget_below(self, node: _Node) -> None:
        children, node.children = node.children, []
        for name in children:
            child = self._nodes.pop(name, None)
            if child is not None:
                self._forget_below(child)
