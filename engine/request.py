"""One request on its way through the engine: its tokens, its record, and when it is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

import numpy as np

from devices.pages import IntArray
from engine.sampling.grammar import GrammarState
from engine.sampling.params import SamplingParams
from mem_cache.holding import Holding
from mem_cache.kv_info import Owner, OwnerKind, ReqKvInfo, RowGeometry, Turn
from mem_cache.tree.keys import Namespace
from mem_cache.tree.prefix_tree import LockReceipt
from session.session import BegunTurn, Session

if TYPE_CHECKING:
    from engine.text.stream import TextStream

FinishReason = Literal["stop", "length", "abort", "timeout", "capacity", "error"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended.

    Attributes:
        reason: "stop" (a stop string, a stop id or the model's end), "length" (its own limit or the context's end),
            "abort", "timeout" (its time limit), "capacity" (alone in the pool and still too large), "error" (the
            model's output was not finite).
        matched: the stop string or token id that was met.
        message: for people, where the reason alone does not say enough.
    """

    reason: FinishReason
    matched: str | int | None = None
    message: str = ""


class RequestStatus(Enum):
    """Where a request is. A chunked prefill is running like any other; a sibling of an answer with n > 1 waits until
    the first has computed their prompt."""

    WAITING = "waiting"
    FORKING = "forking"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Timings:
    """Seconds on the engine's monotonic clock; 0.0 means "not yet"."""

    arrival_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability at its place, by the model's own logits.

    Attributes:
        top: the best tokens there, (token id, logprob), best first.
        extra: the tokens that the request asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenScores:
    """Logprobs of a request so far; the prompt's first token has none."""

    prompt: list[TokenLogprob | None] = field(default_factory=list)
    output: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """Attributes:
    held: its record and lock; a session's turn has those of the session. kv: the record.
    session, turn: the conversation that it belongs to, and its current attempt there.
    prompt_len: tokens of the prompt; what follows in `tokens` was generated.
    max_tokens: most tokens that prompt and output together may have.
    stop_ids: token ids that end it.
    seed: of its sampling.
    text: detokeniser and stop strings, for requests that stream or have stop strings.
    cached_tokens: prompt tokens that were not computed when it was first admitted.
    lost_to_alignment: tokens whose KV its session had and that the device could not continue from.
    num_known: valid entries of the token buffer; last_id: the last of them.
    num_ahead: tokens behind those that launched steps sample, and nobody on the host has seen.
    siblings: further answers to the same prompt that start from this one's KV.
    scores: logprobs, when they are wanted.
    grammar: where its output stands in the grammar that it must keep, if any.
    passed_over: younger requests that were admitted before this one.
    """

    id: str
    params: SamplingParams
    held: Holding
    prompt_len: int
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    namespace: Namespace
    priority: int
    arrival: int
    text: TextStream | None
    _buffer: IntArray
    num_known: int
    session: Session | None = None
    turn: Turn | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish: Finish | None = None
    abort_requested: bool = False
    cached_tokens: int | None = None
    lost_to_alignment: int = 0
    num_ahead: int = 0
    num_retractions: int = 0
    siblings: tuple[Request, ...] = ()
    passed_over: int = 0
    scores: TokenScores | None = None
    grammar: GrammarState | None = None
    _counts: dict[int, int] | None = None
    timings: Timings = field(default_factory=Timings)
    kv: ReqKvInfo = field(init=False)
    last_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.kv, self.last_id = self.held.record, int(self._buffer[self.num_known - 1])

    @property
    def lock(self) -> LockReceipt | None:
        return self.held.lock

    @property
    def tokens(self) -> IntArray:
        """Prompt and output so far, int32; a view."""
        return self._buffer[: self.num_known]

    @property
    def num_output(self) -> int:
        return self.num_known - self.prompt_len

    @property
    def must_be_seen(self) -> bool:
        """Whether its next token can only be chosen by a host that knows the one before."""
        return self.num_ahead > 0 and (self.params.has_penalty or self.grammar is not None)

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self._buffer[self.prompt_len : self.num_known].tolist()
        return ids

    @property
    def deadline_s(self) -> float:
        limit = self.params.time_limit_s
        return math.inf if limit is None else self.timings.arrival_s + limit

    @property
    def output_counts(self) -> dict[int, int]:
        """How often the output holds each token that prompt or output hold, for penalties."""
        if self._counts is None:
            self._counts = dict.fromkeys(self._buffer[: self.prompt_len].tolist(), 0)
            for token_id in self.output_ids:
                self._counts[token_id] = self._counts.get(token_id, 0) + 1
        return self._counts

    @property
    def next_scored(self) -> int:
        """Position of the first prompt token whose logprob is wanted and not known; `prompt_len` when none is."""
        start = self.params.logprob_start_len
        if self.scores is None or start < 0:
            return self.prompt_len
        return min(self.prompt_len, start + len(self.scores.prompt))

    @property
    def max_cached_len(self) -> int:
        """How much may come from the cache: the last known token is computed, and whatever scores a prompt token."""
        scoring_from = self.next_scored - 1 if self.next_scored < self.prompt_len else self.num_known
        return min(self.num_known - 1, scoring_from)

    def append(self, token_id: int) -> Finish | None:
        """Take a sampled token; returns why the request ends with it, or None.

        A stop id goes before a stop string, since its text is not shown, and both before the length: the token that
        completes a stop is the last. What ends a grammar's text is a stop id, whatever the request thinks of it.
        """
        self._buffer[self.num_known] = self.last_id = token_id
        self.num_known += 1
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        is_stop_id, is_whole, grammar = token_id in self.stop_ids, False, self.grammar
        if grammar is not None:
            grammar.take(token_id)
            if grammar.problem:
                return Finish("error", message=grammar.problem)
            is_whole = grammar.is_complete
            is_stop_id = is_stop_id or (is_whole and token_id in grammar.end_ids)
        if self.text is not None and not is_stop_id:
            self.text.push((token_id,))
            if self.text.matched is not None:
                return Finish("stop", self.text.matched)
        if is_stop_id:
            return Finish("stop", token_id)
        if is_whole:
            return Finish("stop")
        if self.num_known >= self.max_tokens:
            return Finish("length")
        return None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a request starts: its buffer, int32 [most tokens it may reach], of which `length` tokens are given."""

    buffer: IntArray
    length: int
    held: Holding
    session: Session | None = None
    turn: Turn | None = None

    @classmethod
    def alone(cls, request_id: str, ids: IntArray, max_new_tokens: int, limit: int, geometry: RowGeometry) -> Prompt:
        """A prompt of its own: int32 [at least 1, fewer than `limit`], with an empty record."""
        buffer = np.zeros(min(len(ids) + max_new_tokens, limit), dtype=np.int32)
        buffer[: len(ids)] = ids
        return cls(buffer, len(ids), Holding(ReqKvInfo(geometry, Owner(OwnerKind.REQUEST, request_id))))

    @classmethod
    def of_turn(cls, session: Session, begun: BegunTurn) -> Prompt:
        """The turn of a session: buffer and record are the session's."""
        return cls(begun.tokens, begun.prompt_len, session.slot.held, session, begun.turn)


def new_request(
    *,
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    seed: int,
    arrival: int,
    namespace: Namespace,
    priority: int = 0,
    text: TextStream | None = None,
    grammar: GrammarState | None = None,
    status: RequestStatus = RequestStatus.WAITING,
) -> Request:
    """A request that waits."""
    eos = frozenset() if params.ignore_eos else eos_token_ids
    return Request(
        id=request_id,
        params=params,
        held=prompt.held,
        prompt_len=prompt.length,
        max_tokens=len(prompt.buffer),
        stop_ids=eos | frozenset(params.stop_token_ids) if params.stop_token_ids else eos,
        seed=seed,
        namespace=namespace,
        priority=priority,
        arrival=arrival,
        text=text,
        _buffer=prompt.buffer,
        num_known=prompt.length,
        session=prompt.session,
        turn=prompt.turn,
        status=status,
        grammar=grammar,
        # Nothing comes before the first token, so it has no logprob.
        scores=TokenScores([None] if params.logprob_start_len == 0 else []) if params.wants_scores else None,
    )
