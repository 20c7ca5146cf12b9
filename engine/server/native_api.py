"""SGLang's own endpoints: /generate, sessions, /abort_request, /tokenize; and what is ours beneath /sessions."""

from __future__ import annotations

import difflib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from engine.errors import BadRequest, session_rules
from engine.request import TokenLogprob
from engine.sampling.grammar import Grammar, GrammarKind
from engine.sampling.params import SamplingParams
from engine.server.body_types import FIRST_ONLY, Ids, Objects, Texts
from engine.server.connection import EventStream, while_connected
from engine.server.openai_api import DONE, LOWEST_LOGPROB, owner_of, serving_of, sse
from engine.server.refusals import sse_error
from engine.server.serving import Generation, Prompt, Serving, Whole, check_finishes, wholes
from session.branching import SessionParams

router = APIRouter()
MAX_BATCH = 256
_RENAMED = {"sampling_seed": "seed"}
_GRAMMARS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
_KNOWN_SAMPLING = frozenset(f.name for f in fields(SamplingParams) if f.init) - {"grammar"} | {*_RENAMED, *_GRAMMARS}


class GenerateRequest(BaseModel):
    """Body of /generate. `text`, `input_ids`, `rid` and `sampling_params` may be lists: a batch."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    text: str | Texts | None = None
    input_ids: Ids | Annotated[list[Ids], FIRST_ONLY] | None = None
    sampling_params: dict[str, Any] | Objects | None = None
    rid: str | Texts | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Ids | None = None
    return_text_in_logprobs: bool = False
    session_params: dict[str, Any] | None = None
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None

    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """The prompts, and whether they were given as a batch."""
        if (self.text is None) is (self.input_ids is None):
            raise BadRequest("text", self.text, "give text or input_ids, one of them")
        given: Any = self.text if self.text is not None else self.input_ids
        if isinstance(given, list) and given and isinstance(given[0], str | list):
            if len(given) > MAX_BATCH:
                raise BadRequest("text", len(given), f"prompts in one request; at most {MAX_BATCH}")
            return given, True
        return [given], False

    def sampling(self, index: int, count: int) -> SamplingParams:
        """Raises BadRequest: an unknown name, with the nearest; a value out of range."""
        given = self.sampling_params
        if isinstance(given, list):
            if len(given) != count:
                raise BadRequest(
                    "sampling_params", len(given), f"must be one for all or one for each of {count} prompts"
                )
            given = given[index]
        values = dict(given or {})
        for name, value in values.items():
            if name not in _KNOWN_SAMPLING:
                near = difflib.get_close_matches(name, _KNOWN_SAMPLING, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise BadRequest(f"sampling_params.{name}", value, f"is not known{hint}")
        values = {_RENAMED.get(name, name): value for name, value in values.items() if value is not None}
        texts = [(name, values.pop(name)) for name in _GRAMMARS if name in values]
        if len(texts) > 1:
            raise BadRequest("sampling_params", [name for name, _ in texts], "give one of these")
        made = {"json_schema": Grammar.of_schema, "structural_tag": Grammar.of_structural_tag}
        for name, text in texts:
            values["grammar"] = made[name](text) if name in made else Grammar(name, text)
        if self.return_logprob:
            values |= {
                "return_logprob": True,
                "logprob_start_len": self.logprob_start_len,
                "top_logprobs_num": self.top_logprobs_num,
                "token_ids_logprob": self.token_ids_logprob or (),
            }
        return SamplingParams(**values)


@router.put("/generate", include_in_schema=False)
@router.post("/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    serving = serving_of(request)
    prompts, is_batch = body.prompts()
    if is_batch and body.stream:
        raise BadRequest("stream", True, "streams one prompt; send a batch without it")
    started = time.monotonic()
    generations: list[Generation] = []
    try:
        for index, prompt in enumerate(prompts):
            params = body.sampling(index, len(prompts))
            generations.append(await _start(request, serving, body, prompt, params, index))
    except BaseException:
        for generation in generations:
            generation.drop()
        raise
    if body.stream:
        return EventStream(_events(serving, generations[0], body, started), generations)
    answers_of = await while_connected(request, wholes(generations))
    if not is_batch:
        check_finishes(answer.finish for answer in answers_of[0])
    results = [
        _result(serving, generation.id, answer, body, started)
        for generation, answers in zip(generations, answers_of, strict=True)
        for answer in answers
    ]
    return JSONResponse(results if is_batch or len(results) > 1 else results[0])


async def _start(
    request: Request, serving: Serving, body: GenerateRequest, prompt: Any, params: SamplingParams, index: int
) -> Generation:
    owner = owner_of(request)
    where: SessionParams | None = None
    if body.session_params is not None:
        where = _session_params(body.session_params)
    ids = await _token_ids(serving, owner, prompt, where)
    rid = body.rid[index] if isinstance(body.rid, list) and index < len(body.rid) else body.rid
    if rid is not None and not (isinstance(rid, str) and 0 < len(rid) <= 256):
        raise BadRequest("rid", rid, "must have 1 to 256 characters, one for each prompt")
    return await serving.generate(
        Prompt(
            ids=ids,
            params=params,
            owner=owner,
            request_id=rid,
            priority=body.priority,
            extra_key=body.extra_key,
            cache_salt=body.cache_salt,
            session=where,
        )
    )


async def _token_ids(serving: Serving, owner: str, prompt: Any, where: SessionParams | None) -> list[int]:
    """A prompt as ids. What continues something gets no BOS of its own."""
    if where is None:
        return await serving.token_ids("text" if isinstance(prompt, str) else "input_ids", prompt)
    continues = where.rid is not None
    if not continues:
        name = serving.session_name(owner, where.id)
        continues = bool(await serving.client.call("history_length", session_id=name))
    if isinstance(prompt, str):
        return await serving.encode(prompt, add_special_tokens=not continues)
    ids = await serving.token_ids("input_ids", prompt) if prompt else []
    return ids[1:] if continues and ids[:1] == [serving.tokenizer.bos_token_id] else ids


def _session_params(given: dict[str, Any]) -> SessionParams:
    names = {f.name for f in fields(SessionParams)}
    if "id" not in given or not set(given) <= names:
        raise BadRequest("session_params", given, f"must be an object with id and maybe {', '.join(sorted(names))}")
    with session_rules():
        return SessionParams(**given)


async def _events(
    serving: Serving, generation: Generation, body: GenerateRequest, started: float
) -> AsyncIterator[bytes]:
    """Each event holds the whole answer so far, as SGLang's do."""
    answers: dict[int, Whole] = {}
    try:
        async for piece in generation:
            answer = answers.setdefault(piece.choice, Whole())
            answer.add(piece)
            yield sse({**_result(serving, generation.id, answer, body, started), "index": piece.choice})
        check_finishes(answer.finish for answer in answers.values())
    except Exception as error:  # the stream has begun: the last event says what went wrong
        yield sse_error(error)
    yield DONE


def _result(serving: Serving, rid: str, answer: Whole, body: GenerateRequest, started: float) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": rid, "finish_reason": None, "completion_tokens": len(answer.token_ids)}
    if answer.finish is not None and answer.usage is not None:
        finish = answer.finish
        meta["finish_reason"] = {
            "type": finish.reason,
            **({"matched": finish.matched} if finish.matched is not None else {}),
            **({"length": answer.usage.completion_tokens} if finish.reason == "length" else {}),
            **({"message": finish.message} if finish.message else {}),
        }
        meta |= {
            "prompt_tokens": answer.usage.prompt_tokens,
            "cached_tokens": answer.usage.cached_tokens,
            "lost_to_alignment_tokens": answer.usage.lost_to_alignment,
            "e2e_latency": time.monotonic() - started,
        }
    if body.return_logprob:

        def entry(token_id: int, logprob: float) -> list[Any]:
            text = serving.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            return [max(logprob, LOWEST_LOGPROB), token_id, text if body.return_text_in_logprobs else None]

        def one(found: TokenLogprob | None) -> list[Any] | None:
            return None if found is None else entry(found.token_id, found.logprob)

        meta["output_token_logprobs"] = [one(found) for found in answer.logprobs]
        meta["output_top_logprobs"] = [[entry(*best) for best in found.top] for found in answer.logprobs]
        if answer.prompt_logprobs is not None:
            meta["input_token_logprobs"] = [one(found) for found in answer.prompt_logprobs]
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


class AbortRequest(BaseModel):
    rid: str = ""
    abort_all: bool = False


@router.post("/abort_request")
async def abort_request(request: Request, body: AbortRequest) -> dict[str, bool]:
    """End a request of this key by its id; an unknown one is no error. `abort_all` is for servers without keys."""
    serving = serving_of(request)
    if body.abort_all and serving.args.api_keys:
        raise BadRequest("abort_all", True, "would end other clients' requests; give a rid")
    serving.client.abort(None if body.abort_all else serving.request_name(owner_of(request), body.rid))
    return {"success": True}


class TokenizeRequest(BaseModel):
    prompt: str
    add_special_tokens: bool = True


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    serving = serving_of(request)
    ids = await serving.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    return {"tokens": ids, "count": len(ids), "max_model_len": serving.context_len}


class DetokenizeRequest(BaseModel):
    tokens: Ids
    skip_special_tokens: bool = True


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
    serving = serving_of(request)
    ids = await serving.token_ids("tokens", body.tokens, is_prompt=False)
    return {"text": serving.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens)}


# Sessions.


class OpenSession(BaseModel):
    """`capacity_of_str_len` bounds the history in tokens; SGLang takes the number and never reads it."""

    capacity_of_str_len: int | None = None
    session_id: str | None = None
    streaming: bool = True
    timeout: float | None = None


@router.get("/open_session", include_in_schema=False)
@router.post("/open_session")
async def open_session(request: Request, body: OpenSession) -> str:
    serving, owner = serving_of(request), owner_of(request)
    limit = serving.context_len
    name = body.session_id or uuid.uuid4().hex
    await serving.client.call(
        "open_session",
        session_id=serving.session_name(owner, name),
        streaming=body.streaming,
        capacity=None if body.capacity_of_str_len is None else min(body.capacity_of_str_len, limit),
        timeout=body.timeout,
        cache_salt=serving.salt_for(owner),
    )
    return name


class SessionName(BaseModel):
    session_id: str
    abort: bool = False


@router.get("/close_session", include_in_schema=False)
@router.post("/close_session")
async def close_session(request: Request, body: SessionName) -> dict[str, bool]:
    """Close now, or at the end of the turn; `abort` ends the turn."""
    name = serving_of(request).session_name(owner_of(request), body.session_id)
    return {"closed": await serving_of(request).client.call("close_session", session_id=name, abort=body.abort)}


@router.get("/sessions/{session_id}")
async def session(request: Request, session_id: str) -> dict[str, Any]:
    """State, held tokens and reuse."""
    name = serving_of(request).session_name(owner_of(request), session_id)
    view: dict[str, Any] = await serving_of(request).client.call("session", session_id=name)
    return {**view, "id": session_id}


class Length(BaseModel):
    """How much of a history: its first `tokens` tokens or its first `turns` turns."""

    tokens: int | None = None
    turns: int | None = None
    session_id: str | None = None


@router.post("/sessions/{session_id}/fork")
async def fork(request: Request, session_id: str, body: Length) -> dict[str, str]:
    serving, owner = serving_of(request), owner_of(request)
    new = body.session_id or uuid.uuid4().hex
    await serving.client.call(
        "fork_session",
        session_id=serving.session_name(owner, session_id),
        tokens=body.tokens,
        turns=body.turns,
        new_id=serving.session_name(owner, new),
    )
    return {"session_id": new}


@router.post("/sessions/{session_id}/rewind")
async def rewind(request: Request, session_id: str, body: Length) -> dict[str, Any]:
    serving = serving_of(request)
    name = serving.session_name(owner_of(request), session_id)
    await serving.client.call("rewind_session", session_id=name, tokens=body.tokens, turns=body.turns)
    return await session(request, session_id)


class Hold(BaseModel):
    seconds: float
    priority: float = 1.0


@router.post("/sessions/{session_id}/hold")
async def hold(request: Request, session_id: str, body: Hold) -> dict[str, bool]:
    serving = serving_of(request)
    name = serving.session_name(owner_of(request), session_id)
    await serving.client.call("hold_session", session_id=name, seconds=body.seconds, priority=body.priority)
    return {"success": True}
