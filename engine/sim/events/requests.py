"""Arrivals, and what can happen to one request: abort, forced retraction, a result that is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from devices.pages import page_count
from engine.errors import BadRequest
from engine.request import RequestStatus
from engine.sampling.params import SamplingParams
from engine.sim.events.kinds import Kind, Swarm
from engine.sim.failures import BrokenPromise
from engine.sim.oracle import continuation
from engine.sim.world import EOS_TOKEN_IDS, VOCAB_SIZE, Ticket, World

NUM_HEADS = 4
"""Shared texts that prompts begin with."""

HEAD_TOKENS = 4096


@lru_cache(maxsize=1024)
def text_of(seed: int) -> list[int]:
    """A text that everybody with the same number shares; no token of it ends a sequence."""
    tokens: list[int] = np.random.default_rng(seed).integers(len(EOS_TOKEN_IDS), VOCAB_SIZE, HEAD_TOKENS).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """`shared` tokens of a common text, or all of a finished arrival's text, then `own` tokens.

    Attributes:
        after: key of that arrival; when its text is not there, the common text stands for it.
        tail: which text the own tokens are; equal tails make equal prompts.
    """

    head: int = 0
    shared: int = 0
    tail: int = 0
    own: int = 0
    after: int | None = None

    def tokens(self, world: World) -> list[int]:
        start = world.texts.get(self.after) if self.after is not None else None
        if start is None:
            start = text_of(self.head)[: self.shared]
        return start + text_of(NUM_HEADS + self.tail)[: self.own]


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request.

    Attributes:
        stop_after: its own answer's token at this place becomes a stop id, so it stops there or before.
        seed: of its sampling; None is greedy.
        scored_from: logprobs are wanted from this prompt token on, the last one where it is shorter; -1: of the answer
            only; None: none.
    """

    key: int
    prompt: Prompt
    max_new: int
    n: int = 1
    seed: int | None = None
    stop_after: int | None = None
    priority: int = 0
    salt: str | None = None
    time_limit_s: float | None = None
    scored_from: int | None = None

    def apply(self, world: World) -> str:
        if len(world.tickets) >= world.config.max_live or self.key in world.texts or world.find(self.key):
            return f"full#{self.key}"
        prompt = self.prompt.tokens(world)
        try:
            requests = world.core.add(
                np.array(prompt, dtype=np.int32),
                self._params(world, prompt),
                priority=self.priority,
                cache_salt=self.salt,
            )
        except BadRequest as error:
            if not self._is_impossible(world, len(prompt)):
                raise BrokenPromise("arrive", f"{len(prompt)} tokens were refused: {error}") from error
            world.marks["refused"] += 1
            return f"refused#{self.key}"
        if self._is_impossible(world, len(prompt)):
            raise BrokenPromise("arrive", f"a prompt of {len(prompt)} tokens can never run and was taken")
        world.expect(self.key, requests, prompt, self.salt)
        world.marks["arrive"] += 1
        return f"arrive#{self.key}"

    def _is_impossible(self, world: World, length: int) -> bool:
        config = world.config
        return not 0 < length < config.context_len or page_count(length, config.page_size) > config.num_pages

    def _params(self, world: World, prompt: list[int]) -> SamplingParams:
        stops: tuple[int, ...] = ()
        if self.stop_after is not None:
            num_new, window = self.stop_after + 1, world.config.window
            answer = continuation(prompt, num_new, self.seed, world.weights_version, VOCAB_SIZE, window=window)
            stops = (answer[-1],)
        return SamplingParams(
            n=self.n,
            max_new_tokens=self.max_new,
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            stop_token_ids=stops,
            time_limit_s=self.time_limit_s,
            return_logprob=self.scored_from is not None,
            logprob_start_len=-1 if self.scored_from is None else min(self.scored_from, len(prompt) - 1),
            top_logprobs_num=0 if self.scored_from is None else self.key % 3,
            token_ids_logprob=() if self.scored_from is None else (self.key % VOCAB_SIZE,),
        )


def draw_arrival(swarm: Swarm) -> Arrive:
    rng, config, traits = swarm.rng, swarm.config, swarm.traits
    key = swarm.num_keys
    swarm.num_keys += 1
    again = swarm.last_prompt if rng.random() < 0.15 else None
    prompt = swarm.last_prompt = again if isinstance(again, Prompt) else _draw_prompt(swarm, key)
    return Arrive(
        key=key,
        prompt=prompt,
        max_new=rng.choice((1, 2, 3, 5, 8, 13, 21)) if rng.random() < 0.9 else config.context_len,
        n=rng.choice((2, 3, 4)) if "n" in traits and rng.random() < 0.25 else 1,
        seed=rng.randrange(1000) if "sampled" in traits and rng.random() < 0.5 else None,
        stop_after=rng.randrange(12) if "stop" in traits and rng.random() < 0.4 else None,
        priority=rng.randrange(-2, 3) if "priority" in traits else 0,
        salt=rng.choice((None, "a", "b")) if "salt" in traits else None,
        time_limit_s=rng.uniform(0, 0.05) if "time limit" in traits and rng.random() < 0.2 else None,
        scored_from=_draw_scored(swarm) if "logprobs" in traits and rng.random() < 0.3 else None,
    )


def _draw_scored(swarm: Swarm) -> int:
    return swarm.rng.choice((-1, 0, swarm.rng.randrange(4 * swarm.config.page_size)))


def _draw_prompt(swarm: Swarm, key: int) -> Prompt:
    """Lengths around page borders, and now and then around what the pool holds."""
    rng, config = swarm.rng, swarm.config
    page = config.page_size
    longest = min(config.capacity, config.context_len, 24 * page, 512)
    if "long" in swarm.traits and rng.random() < 0.1:
        longest, length = 4096, config.capacity + rng.randrange(-2 * page, page + 1)
    elif rng.random() < 0.5:
        length = page * rng.randrange(1, 9) + rng.choice((-1, 0, 0, 1))
    else:
        length = rng.randrange(1, 1 + max(1, longest // rng.choice((1, 2, 4))))
    length = max(1, min(length, longest))
    if "after" in swarm.traits and key and rng.random() < 0.4:
        return Prompt(own=rng.randrange(0, 2 * page + 1), tail=key, after=swarm.recent_key())
    shared = length if rng.random() < 0.3 else rng.choice((0, min(page, length), rng.randrange(length + 1)))
    return Prompt(rng.randrange(NUM_HEADS), shared, rng.choice((key, rng.randrange(3))), length - shared)


@dataclass(frozen=True, slots=True)
class Abort:
    """An arrival's answer is not wanted any more; twice is as good as once."""

    key: int
    index: int = 0

    def apply(self, world: World) -> str:
        ticket = world.find(self.key, self.index)
        if ticket is None or ticket.request.finish is not None:
            return f"abort#{self.key}?"
        state = world.state_of(ticket)
        world.marks[f"abort {state}"] += 1
        ticket.is_abort_asked = True
        for member in world.tickets:
            if member.request.status is RequestStatus.FORKING and member.request in ticket.request.siblings:
                member.is_abort_asked = True
        if not world.core.abort(ticket.request.id):
            raise BrokenPromise("abort", f"{state} request {ticket.request.id} is not known")
        has_ended = ticket.request.finish is not None
        if has_ended is state.endswith("in-flight"):
            raise BrokenPromise("abort", f"{state} request {ticket.request.id} has ended: {has_ended}")
        if has_ended and world.core.abort(ticket.request.id):
            raise BrokenPromise("abort", f"{state} request {ticket.request.id} was aborted twice")
        return f"abort#{self.key}"


def draw_abort(swarm: Swarm) -> Abort:
    return Abort(swarm.recent_key(), swarm.rng.choice((0, 0, 1, 1, 2)))


@dataclass(frozen=True, slots=True)
class AbortRunning:
    """The same for a running request, which a key seldom meets. `place`: among the running ones."""

    place: int

    def apply(self, world: World) -> str:
        ticket = world.running(self.place)
        return "abort?" if ticket is None else Abort(ticket.key, ticket.index).apply(world)


@dataclass(frozen=True, slots=True)
class AbortRetracted:
    """The same for one that was sent back to the queue. `place`: among those."""

    place: int

    def apply(self, world: World) -> str:
        sent_back = [t for t in world.tickets if t.request.finish is None and world.state_of(t) == "retracted"]
        if not sent_back:
            return "abort?"
        ticket = sent_back[self.place % len(sent_back)]
        return Abort(ticket.key, ticket.index).apply(world)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The client of a running request is gone: every answer that it waits for is aborted. `place`: as above."""

    place: int

    def apply(self, world: World) -> str:
        ticket = world.running(self.place)
        if ticket is None:
            return "gone?"
        for index in sorted(t.index for t in world.tickets if t.key == ticket.key):
            Abort(ticket.key, index).apply(world)
        world.marks["disconnect in flight"] += world.core.num_in_flight > 0
        return f"gone#{ticket.key}"


@dataclass(frozen=True, slots=True)
class Retract:
    """A running request goes back to the queue, as it does when pages lack. `place`: among the running ones."""

    place: int

    def apply(self, world: World) -> str:
        ticket = world.running(self.place)
        if ticket is None or ticket.request.abort_requested or not _fits(world, ticket):
            return "retract?"
        world.marks["retract in flight"] += world.state_of(ticket).endswith("in-flight")
        known = ticket.request.num_known
        world.core.scheduler.retract(ticket.request)
        request = ticket.request
        keeps_row = ticket.session is None and (request.kv.req_pool_idx is not None or request.lock is not None)
        if keeps_row or request.num_known != known:
            raise BrokenPromise("retract", f"{request.id} kept its row or lost tokens: {request.kv}")
        world.marks["retract forced"] += 1
        return f"retract#{ticket.key}"


def _fits(world: World, ticket: Ticket) -> bool:
    """One that knows more tokens than the pool holds is about to end; it could never come back from the queue."""
    return page_count(ticket.request.num_known, world.config.page_size) <= world.config.num_pages


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The result of a launched step is no number for one of its requests.

    Attributes:
        place: among the running ones.
        aborted: it is aborted just before, when nothing else can be seen of that result any more.
    """

    place: int
    aborted: bool = False

    def apply(self, world: World) -> str:
        ticket = world.running(self.place)
        if ticket is None or world.core.num_in_flight == 0:
            return "nan?"
        if self.aborted:
            Abort(ticket.key, ticket.index).apply(world)
            if ticket.request.finish is not None:
                return "nan?"
        world.runner.nan_row = ticket.request.kv.row
        ticket.is_nan_due = True
        world.marks["not finite"] += 1
        return f"nan#{ticket.key}"


KINDS = (
    Kind("arrive", draw_arrival, is_disturbance=False),
    Kind("abort", draw_abort),
    Kind("abort running", lambda swarm: AbortRunning(swarm.rng.randrange(8))),
    Kind("abort retracted", lambda swarm: AbortRetracted(swarm.rng.randrange(8))),
    Kind("disconnect", lambda swarm: Disconnect(swarm.rng.randrange(8))),
    Kind("retract", lambda swarm: Retract(swarm.rng.randrange(8))),
    Kind("not finite", lambda s: NotFinite(s.rng.randrange(8), s.rng.random() < 0.3), in_flight=1.0),
)
