"""From a prompt to pieces of text, for every protocol: tokenise, submit, turn tokens into text, count.

    Prompt -> engine -> Tokens -> Piece(choice, text, tokens, logprobs, finish)

A protocol module makes a `Prompt` of its request and writes `Piece`s as its clients expect them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.config import ServerArgs
from engine.errors import BadRequest, RungError
from engine.request import Finish, TokenLogprob
from engine.sampling.params import SamplingParams
from engine.server.engine_client import Answer, EngineClient
from engine.server.messages import Start, Tokens
from engine.server.metrics import Metrics
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer
from session.branching import SessionParams

LONG_TEXT_CHARS = 16_000
"""Longer ones are tokenised beside the event loop; this many take about 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt for the engine.

    Attributes:
        owner: whose it is; see `gate.owner_of`.
        keep: rewind the session's history to so many tokens first.
        is_chat: the answer begins a text of its own.
        counts: in the metrics; the server's own probes do not.
    """

    ids: list[int]
    params: SamplingParams
    owner: str = ""
    request_id: str | None = None
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    session: SessionParams | None = None
    keep: int | None = None
    is_chat: bool = False
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; see `engine.outputs.Usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    lost_to_alignment: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one answer.

    Attributes:
        text: that no later token can change; may be empty.
        finish, usage, prompt_logprobs: with the last piece.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: Finish | None = None
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(slots=True)
class Whole:
    """One answer, complete."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish is not None:
            self.finish, self.usage, self.prompt_logprobs = piece.finish, piece.usage, piece.prompt_logprobs


class AnswerFailed(RungError):
    """The engine gave up an answer: the model's output were no numbers, or its grammar could not go on."""


def check_finishes(finishes: Iterable[Finish | None]) -> None:
    """Raises AnswerFailed with the engine's reason."""
    for finish in finishes:
        if finish is not None and finish.reason == "error":
            raise AnswerFailed(finish.message or "the answer cannot go on")


class Generation:
    """An accepted request: iterate it once. Leaving early aborts it.

    Attributes:
        id: of the request as its client knows it, for aborts.
        prompt_tokens: with the session's history.
    """

    def __init__(self, serving: Serving, prompt: Prompt, name: str, answer: Answer) -> None:
        self.id = name
        self.prompt_tokens = answer.prompt_tokens
        self._serving = serving
        self._prompt = prompt
        self._answer = answer
        self._arrival_s = time.monotonic()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        prompt, metrics = self._prompt, self._serving.metrics
        shown = () if prompt.is_chat else prompt.ids
        texts = [self._serving.new_text(prompt.params, shown) for _ in range(prompt.params.n)]
        num_tokens = [0] * prompt.params.n
        previous_s = [0.0] * prompt.params.n
        async for message in self._answer:
            text, choice, now = texts[message.choice], message.choice, time.monotonic()
            num_tokens[choice] += len(message.token_ids)
            if prompt.counts and message.token_ids:
                metrics.generated.add(len(message.token_ids))
                if previous_s[choice]:
                    metrics.inter_token.observe(now - previous_s[choice])
                elif choice == 0:
                    metrics.time_to_first_token.observe(now - self._arrival_s)
                previous_s[choice] = now
            piece = _piece(message, text, num_tokens[choice])
            if prompt.counts and piece.usage is not None:
                metrics.finished(piece.usage, message.finish, now - self._arrival_s, message.queue_s)
            yield piece

    def drop(self) -> None:
        """Nobody reads it any longer; it is aborted if it has not finished."""
        self._serving.client.forget(self._answer.id, abort=True)

    @property
    def num_choices(self) -> int:
        """How many answers it has."""
        return self._prompt.params.n

    async def whole(self) -> list[Whole]:
        """All answers, complete, in the order of their choices."""
        return (await wholes([self]))[0]


async def wholes(generations: Sequence[Generation]) -> list[list[Whole]]:
    """All answers of several requests, complete. When one fails, or the caller leaves, all are aborted."""
    answers = [[Whole() for _ in range(generation.num_choices)] for generation in generations]
    async for index, piece in side_by_side(generations):
        answers[index][piece.choice].add(piece)
    return answers


async def side_by_side(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several requests as they come, each with its request's index. Leaving early aborts them all."""
    if len(generations) == 1:
        async for only in generations[0]:
            yield 0, only
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async for piece in generations[index]:
                await queue.put((index, piece))
        except Exception as error:  # raised below, where somebody waits for it
            await queue.put((index, error))
        await queue.put((index, None))

    readers = [asyncio.create_task(read(index)) for index in range(len(generations))]
    try:
        num_open = len(readers)
        while num_open:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                num_open -= 1
            else:
                yield index, piece
    finally:
        for reader in readers:
            reader.cancel()


def _piece(message: Tokens, text: TextStream, num_tokens: int) -> Piece:
    """Tokens as text; what ended an answer by its id is not in the text."""
    ids, finish = message.token_ids, message.finish
    is_ended = finish is not None and isinstance(finish.matched, int)
    shown = text.push(ids[:-1] if is_ended else ids)
    if finish is None:
        return Piece(message.choice, shown, ids, message.logprobs)
    shown += text.finish()
    usage = Usage(message.prompt_tokens, num_tokens, message.cached_tokens, message.lost_to_alignment)
    return Piece(message.choice, shown, ids, message.logprobs, finish, usage, message.prompt_logprobs)


class Serving:
    """Attributes:
    model_name: as clients know it.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, args: ServerArgs, metrics: Metrics) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.args = args
        self.metrics = metrics
        self.model_name = args.served_model_name or client.config.model.model
        self.started_s = int(time.time())

    @property
    def context_len(self) -> int:
        length: int = self.client.info["context_length"]
        return length

    async def generate(self, prompt: Prompt) -> Generation:
        """Queue a prompt. Raises BadRequest: nothing was queued; EngineDied."""
        session = prompt.session
        if session is not None:
            rid = None if session.rid is None else self.request_name(prompt.owner, session.rid)
            session = replace(session, id=self.session_name(prompt.owner, session.id), rid=rid)
        name = prompt.request_id or f"rung-{uuid.uuid4().hex}"
        message = Start(
            id=self.request_name(prompt.owner, name),
            prompt_ids=np.array(prompt.ids, dtype="<i4").tobytes(),
            params=prompt.params,
            priority=prompt.priority,
            extra_key=prompt.extra_key,
            cache_salt=self.salt_for(prompt.owner, prompt.cache_salt),
            session=session,
            keep=prompt.keep,
        )
        return Generation(self, prompt, name, await self.client.submit(message))

    def request_name(self, owner: str, name: str) -> str:
        """A request's name in the engine: clients with other keys neither meet it nor can end it."""
        return f"{owner}:{name}" if owner else name

    def session_name(self, owner: str, name: Any) -> str:
        """A session's name in the engine: it belongs to the key that opened it. Raises BadRequest: it is no name."""
        if not isinstance(name, str) or not name:
            raise BadRequest("session_id", name, "must be a string")
        return f"{owner}:{name}" if owner else name

    def salt_for(self, owner: str, wanted: str | None = None) -> str | None:
        """What keeps an owner's prefixes apart from those of others; `wanted`: the request's own salt."""
        return f"{owner}:{wanted or ''}" if owner and not self.args.share_prefix_across_keys else wanted

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, a long one in a thread. Raises BadRequest."""
        if len(text) <= LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        encode = self.tokenizer.encode
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens, without_gil=True)

    async def token_ids(self, field_name: str, prompt: Any, *, is_prompt: bool = True) -> list[int]:
        """A text or a list of ids as ids. Raises BadRequest: neither, or more for a prompt than the context holds."""
        if isinstance(prompt, str):
            return await self.encode(prompt)
        vocab_size: int = self.client.info["vocab_size"]
        if not isinstance(prompt, list) or not prompt:
            raise BadRequest(field_name, prompt, "must be a text or a list of token ids, not empty")
        if is_prompt and len(prompt) >= self.context_len:
            rule = f"tokens leave no room for an answer: the context is {self.context_len} tokens; shorten the prompt"
            raise BadRequest("prompt", len(prompt), rule)
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise BadRequest(field_name, token_id, f"is no token id of this model; they are 0..{vocab_size - 1}")
        return prompt

    def new_text(self, params: SamplingParams, shown: list[int] | tuple[()]) -> TextStream:
        return TextStream(
            self.tokenizer,
            tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prompt_ids=shown,
        )
