"""What a user calls: text or token ids in, text out, in the caller's own process.

    llm = LLM(model="smollm2-135m-instruct")
    print(llm.generate("The capital of France is", SamplingParams(max_new_tokens=8)).text)

`LLM` turns text into tokens and back; everything between is `EngineCore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeGuard, overload

import numpy as np

from devices.pages import IntArray
from engine.assembly import assemble
from engine.chat_session import ChatSession
from engine.config import EngineConfig
from engine.delivery import Delivery, Live
from engine.errors import BadRequest, session_rules
from engine.outputs import GenerationResult, StreamPiece
from engine.sampling.params import SamplingParams
from engine.text.stream import TextStream
from mem_cache.audit import Violation
from mem_cache.tree.keys import Namespace
from session.branching import SessionParams

Prompt = str | Sequence[int]
Prompts = Prompt | list[str] | list[list[int]]


class LLM:
    """An engine with one model.

    Keyword arguments are SGLang's server arguments (see `engine.config`), for example `model`, `device`, `dtype`,
    `page_size`, `max_total_tokens`, `mem_fraction_static`, `max_running_requests`, `chunked_prefill_size`,
    `disable_radix_cache`, `schedule_policy`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a model and take the memory for its KV, once.

        Args:
            progress: called with (tensors loaded, tensors in all) while weights load.
        Raises:
            ConfigError, ModelLoadError: with what to change.
        """
        if model is not None:
            kwargs["model"] = model
        self._parts = assemble(EngineConfig.from_kwargs(**kwargs), progress)
        self.core = self._parts.core
        self.device = self._parts.device
        self.tokenizer = self._parts.tokenizer
        self.config = self._parts.config
        self.model_config = self._parts.model_config
        self._delivery = Delivery(self.core)

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        session_params: SessionParams | Mapping[str, Any] | None = None,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        session_params: SessionParams | Mapping[str, Any] | None = None,
    ) -> Iterator[StreamPiece]: ...

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        session_params: SessionParams | Mapping[str, Any] | None = None,
    ) -> GenerationResult | list[GenerationResult] | Iterator[StreamPiece]:
        """Continue one prompt or many; they run together.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each.
            session_params: the session that one prompt continues, and where; see `session.branching`.
            stream: yield pieces as they come. Leaving the iterator early aborts what is not finished.
        Returns:
            One result for one prompt, a list for a list, an iterator with `stream=True`. With `n` above 1 the other
            answers are the result's `alternatives`.
        Raises:
            BadRequest: a prompt or parameter is wrong; none of the prompts is started then.
        """
        is_one = isinstance(prompts, str) or _is_token_ids(prompts)
        many: list[Any] = [prompts] if is_one else _listed(prompts)
        if session_params is not None:
            if not is_one:
                raise BadRequest("prompts", prompts, "must be one prompt when it continues a session")
            live = self._continue(session_params, prompts, self._params_for(params, 1)[0], streams=stream)
            return self._delivery.stream(live) if stream else self._delivery.collect(live, 1)[0]
        ids = [self.token_ids(prompt) for prompt in many]
        live = self._start(ids, self._params_for(params, len(many)), streams=stream, is_chat=False)
        if stream:
            return self._delivery.stream(live)
        results = self._delivery.collect(live, len(many))
        return results[0] if is_one else results

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **template_kwargs: Any,
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **template_kwargs: Any,
    ) -> Iterator[StreamPiece]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **template_kwargs: Any,
    ) -> GenerationResult | Iterator[StreamPiece]:
        """Answer a conversation through the model's own chat template.

        Args:
            messages: dictionaries with `role` and `content`, oldest first.
            template_kwargs: handed to the template.
        Raises:
            BadRequest: messages are malformed, or the model has no chat template (use `generate`).
        """
        ids = self.token_ids(self.tokenizer.render_chat(messages, **template_kwargs))
        live = self._start([ids], [params or SamplingParams()], streams=stream, is_chat=True)
        return self._delivery.stream(live) if stream else self._delivery.collect(live, 1)[0]

    def open_session(
        self,
        session_id: str | None = None,
        *,
        capacity: int | None = None,
        timeout: float | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> ChatSession:
        """Start a conversation that keeps its KV between turns; use it as a context manager, or close it.

        Args:
            session_id: its name; one is made when None.
            capacity: most tokens that its history may have; the context's when None.
            timeout: seconds without a turn after which it closes by itself.
            extra_key, cache_salt: keep its prefixes apart from those of others.
        Raises:
            SessionRefused: the name is in use, a number is out of range, or `max_sessions` are open.
        """
        with session_rules():
            session = self.core.sessions.open(
                session_id, capacity=capacity, timeout_s=timeout, namespace=Namespace(extra_key, cache_salt)
            )
        return ChatSession(self, session)

    def open_branching_session(
        self,
        session_id: str | None = None,
        *,
        capacity: int | None = None,
        timeout: float | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Open a session of SGLang's non-streaming kind, in which `generate(session_params=...)` continues any request.

        Arguments and errors as those of `open_session`. Returns its name, for `session_params` and `close_session`.
        """
        with session_rules():
            namespace = Namespace(extra_key, cache_salt)
            return self.core.sessions.open_branching(
                session_id, capacity=capacity, timeout_s=timeout, namespace=namespace
            ).id

    def close_session(self, session_id: str, *, abort: bool = False) -> bool:
        """Close a session of either kind, now or when its turns have ended; `abort` ends them. True: it is closed."""
        return self.core.close_session(session_id, abort=abort)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False when the id is unknown or finished."""
        return self.core.abort(request_id)

    def audit(self) -> list[Violation]:
        """What is wrong with the books of pages, rows and locks; empty when they are right."""
        return self.core.audit()

    def stats(self) -> Mapping[str, int]:
        """The pools by owner, and counters."""
        return self.core.stats()

    def flush_cache(self) -> None:
        """Forget every cached prefix. Raises BadRequest while requests run."""
        self.core.flush_cache()

    def token_ids(self, prompt: Any, *, add_special_tokens: bool = True) -> IntArray:
        """A prompt as token ids, int32 [n]. Raises BadRequest: neither text nor ids of this model.

        Args:
            add_special_tokens: let the tokenizer add to a text what it adds (BOS).
        """
        if isinstance(prompt, str):
            return np.array(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), dtype=np.int32)
        if not _is_token_ids(prompt):
            raise BadRequest("prompt", prompt, "must be a text or a list of token ids")
        for token_id in prompt:
            if not 0 <= token_id < self.core.vocab_size:
                raise BadRequest("prompt", token_id, f"is no token id of this model: 0..{self.core.vocab_size - 1}")
        return np.array(prompt, dtype=np.int32)

    @staticmethod
    def _params_for(params: Any, n: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * n
        many = list(params) if isinstance(params, Sequence) else [params]
        for one in many:
            if not isinstance(one, SamplingParams):
                raise BadRequest("params", one, "must be SamplingParams, for all prompts or a list with one for each")
        if len(many) != n:
            raise BadRequest("params", len(many), f"must be one for all prompts or one for each of {n}")
        return many

    def _start(
        self,
        prompts: list[IntArray],
        params: list[SamplingParams],
        *,
        streams: bool,
        is_chat: bool,
    ) -> list[Live]:
        """Queue all prompts, or none when one is refused. `is_chat`: the answer begins a text of its own."""
        live: list[Live] = []
        try:
            for index, (ids, sampling) in enumerate(zip(prompts, params, strict=True)):
                texts = [self._text(sampling, prompt_ids=() if is_chat else ids.tolist()) for _ in range(sampling.n)]
                watched = texts if streams or sampling.stop else ()
                requests = self.core.add(ids, sampling, texts=watched)
                live += self._delivery.add(requests, texts, index=index, streams=streams)
        except BadRequest:
            self._delivery.drop(live)
            raise
        return live

    def start_turn(
        self,
        session_id: str,
        new_ids: IntArray,
        params: SamplingParams,
        *,
        keep: int | None = None,
        streams: bool,
        is_chat: bool,
    ) -> Iterator[StreamPiece]:
        """Queue a turn of a session; its pieces come as the engine steps, which it does while they are taken.

        Args:
            keep: rewind the history to so many tokens first.
            is_chat: the answer begins a text of its own.
        Raises:
            BadRequest: nothing was queued.
        """
        text = self._text(params, prompt_ids=() if is_chat else new_ids.tolist())
        return self._delivery.stream(self._start_turn(session_id, new_ids, params, text, keep=keep, streams=streams))

    def _start_turn(
        self,
        session_id: str,
        new_ids: IntArray,
        params: SamplingParams,
        text: TextStream,
        *,
        keep: int | None = None,
        streams: bool,
    ) -> list[Live]:
        watched = text if streams or params.stop else None
        request = self.core.add_turn(session_id, new_ids, params, keep=keep, text=watched)
        return self._delivery.add([request], [text], streams=streams)

    def _continue(self, session_params: Any, prompt: Any, params: SamplingParams, *, streams: bool) -> list[Live]:
        """Queue a request that continues a session of either kind. Its own BOS goes when there is something before."""
        with session_rules():
            where = _session_params(session_params)
            branching = self.core.sessions.get_branching(where.id)
            if branching is None:
                where.check_streaming()
                before = self.core.sessions.get(where.id).log.tokens
            else:
                before = branching.context(where)
        ids = self.token_ids(prompt, add_special_tokens=not len(before))
        if len(before) and len(ids) and ids[0] == self.tokenizer.bos_token_id:
            ids = ids[1:]
        shown = [*before[-1:].tolist(), *ids.tolist()]
        texts = [self._text(params, prompt_ids=shown) for _ in range(params.n)]
        if branching is None:
            return self._start_turn(where.id, ids, params, texts[0], streams=streams)
        requests = self.core.add_branch(where, ids, params, texts=texts if streams or params.stop else ())
        return self._delivery.add(requests, texts, streams=streams)

    def _text(self, params: SamplingParams, prompt_ids: Sequence[int]) -> TextStream:
        return TextStream(
            self.tokenizer,
            tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prompt_ids=prompt_ids,
        )


def _session_params(given: Any) -> SessionParams:
    """Raises SessionError, BadRequest: not what `SessionParams` takes."""
    if isinstance(given, SessionParams):
        return given
    known = [field.name for field in fields(SessionParams)]
    if not isinstance(given, Mapping) or "id" not in given or not set(given) <= set(known):
        raise BadRequest("session_params", given, f"must be an object with id and maybe {', '.join(known[1:])}")
    return SessionParams(**given)


def _is_token_ids(prompt: Any) -> TypeGuard[Sequence[int]]:
    """A list of integers; an empty one is a list of tokens as well."""
    if isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Sequence):
        return False
    return all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt)


def _listed(prompts: Any) -> list[Any]:
    if not isinstance(prompts, Sequence):
        raise BadRequest("prompts", prompts, "must be a text, a list of token ids, or a list of either")
    return list(prompts)
