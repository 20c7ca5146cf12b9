"""/v1/models, /v1/chat/completions, /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import BadRequest
from engine.request import Finish, TokenLogprob
from engine.sampling.params import SamplingParams
from engine.server.chat_plan import ChatPlan, DeltaWriter, message_of, plan_chat
from engine.server.connection import EventStream, while_connected
from engine.server.openai_types import OPENAI_DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest
from engine.server.refusals import sse_error
from engine.server.serving import Generation, Prompt, Serving, Usage, Whole, check_finishes, side_by_side, wholes

router = APIRouter(prefix="/v1")
DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""JSON has no -inf."""


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def owner_of(request: Request) -> str:
    """Whose request it is; see `gate`."""
    owner: str = getattr(request.state, "owner", "")
    return owner


def sse(data: Any) -> bytes:
    """One event of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(serving_of(request))]}


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    serving = serving_of(request)
    if name != serving.model_name:
        raise HTTPException(404, f"the model {name!r} is not here; {serving.model_name!r} is")
    return _model_card(serving)


def _model_card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.started_s,
        "owned_by": "rung",
        "max_model_len": serving.context_len,
    }


def check_model(serving: Serving, name: str | None) -> None:
    """Raises HTTPException 404 when the body names another model."""
    if name not in (None, "", serving.model_name, "default"):
        raise HTTPException(404, f"the model {name!r} is not here; {serving.model_name!r} is")


# Chat.


@router.post("/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    serving = serving_of(request)
    check_model(serving, body.model)
    body.check_supported()
    plan = plan_chat(serving, body)
    ids = await serving.encode(plan.text, add_special_tokens=False)
    room = max(1, serving.context_len - len(ids))
    others: dict[str, Any] = {"grammar": plan.grammar}
    if body.logprobs:
        others |= {"return_logprob": True, "top_logprobs_num": body.top_logprobs or 0}
    if plan.shows_special:
        body.skip_special_tokens = False
    params = body.sampling(room if body.wanted_tokens is None else body.wanted_tokens, **others)
    generation = await serving.generate(prompt_of(request, body, ids, params, is_chat=True))
    if body.stream:
        return EventStream(_chat_events(serving, generation, body, plan), [generation])
    answers = await while_connected(request, generation.whole())
    check_finishes(answer.finish for answer in answers)
    choices = []
    for index, answer in enumerate(answers):
        part = plan.parser().feed(answer.text, is_last=True)
        choices.append(
            {
                "index": index,
                "message": message_of(part),
                "logprobs": chat_logprobs(serving, answer.logprobs) if body.logprobs else None,
                "finish_reason": finish_name(answer.finish, has_calls=bool(part.calls)),
                "matched_stop": answer.finish.matched if answer.finish else None,
            }
        )
    usage = usage_of([answer.usage for answer in answers])
    return JSONResponse({**_head("chatcmpl", "chat.completion", serving), "choices": choices, "usage": usage})


async def _chat_events(
    serving: Serving, generation: Generation, body: ChatRequest, plan: ChatPlan
) -> AsyncIterator[bytes]:
    """Chunks as they come; the first of each choice names the role, the last says why it ended."""
    head = _head("chatcmpl", "chat.completion.chunk", serving)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    usages: list[Usage | None] = [None] * body.n
    finishes: list[Finish] = []
    usage_field = {"usage": None} if with_usage else {}

    writers = [DeltaWriter(plan) for _ in range(body.n)]

    def chunk(choice: int, delta: dict[str, Any], logprobs: Any = None, finish: Finish | None = None) -> bytes:
        has_calls = writers[choice].num_calls > 0
        reason = finish_name(finish, has_calls=has_calls) if finish is not None else None
        one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse({**head, "choices": [one], **usage_field})

    try:
        for choice in range(body.n):
            yield chunk(choice, {"role": "assistant", "content": ""})
        async for piece in generation:
            logprobs = chat_logprobs(serving, piece.logprobs) if body.logprobs and piece.logprobs else None
            deltas = writers[piece.choice].deltas(piece.text, is_last=piece.finish is not None)
            if logprobs is not None and not deltas:
                deltas = [{"content": ""}]
            for index, delta in enumerate(deltas):
                yield chunk(piece.choice, delta, None if index else logprobs)
            if piece.finish is not None:
                usages[piece.choice] = piece.usage
                finishes.append(piece.finish)
                yield chunk(piece.choice, {}, None, piece.finish)
        if with_usage:
            yield sse({**head, "choices": [], "usage": usage_of(usages)})
        check_finishes(finishes)
    except Exception as error:  # the stream has begun: the last event says what went wrong
        yield sse_error(error)
    yield DONE


def chat_logprobs(serving: Serving, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As the chat API writes them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = serving.tokenizer.token_bytes(token_id)
        text = spelled.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(spelled)}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*best) for best in one.top]} for one in logprobs
    ]
    return {"content": content}


# Completions.


@router.post("/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    serving = serving_of(request)
    check_model(serving, body.model)
    body.check_supported()
    prompts = [await serving.token_ids("prompt", prompt) for prompt in body.prompts()]
    generations: list[Generation] = []
    max_tokens = OPENAI_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    others: dict[str, Any] = {"grammar": body.grammar()}
    if body.logprobs is not None:
        others |= {"return_logprob": True, "top_logprobs_num": body.logprobs}
        if body.echo:
            others["logprob_start_len"] = 0
    try:
        for index, ids in enumerate(prompts):
            params = body.sampling(max(1, max_tokens), **others)
            generations.append(await serving.generate(prompt_of(request, body, ids, params, index=index)))
    except BaseException:
        for generation in generations:
            generation.drop()
        raise
    if body.stream:
        return EventStream(_completion_events(serving, generations, prompts, body), generations)
    per_prompt = await while_connected(request, wholes(generations))
    check_finishes(answer.finish for answers in per_prompt for answer in answers)
    choices: list[dict[str, Any]] = []
    usages = []
    for prompt_index, answers in enumerate(per_prompt):
        for answer in answers:
            kept = answer if max_tokens else _without_output(answer)
            choices.append(_completion_choice(serving, len(choices), prompts[prompt_index], kept, body))
            usages.append((prompt_index, kept.usage))
    head = _head("cmpl", "text_completion", serving)
    return JSONResponse({**head, "choices": choices, "usage": _usage_of_prompts(usages)})


def _without_output(answer: Whole) -> Whole:
    """`max_tokens=0`: the prompt alone was wanted. One token was computed all the same, and is not shown."""
    usage = answer.usage
    assert usage is not None
    shown = Usage(usage.prompt_tokens, 0, usage.cached_tokens, usage.lost_to_alignment)
    return Whole(finish=Finish("length"), usage=shown, prompt_logprobs=answer.prompt_logprobs)


def _completion_choice(
    serving: Serving, index: int, ids: list[int], answer: Whole, body: CompletionRequest
) -> dict[str, Any]:
    return {
        "index": index,
        "text": (serving.tokenizer.decode(ids) if body.echo else "") + answer.text,
        "logprobs": _completion_logprobs(serving, answer, body) if body.logprobs is not None else None,
        "finish_reason": finish_name(answer.finish),
        "matched_stop": answer.finish.matched if answer.finish else None,
    }


async def _completion_events(
    serving: Serving, generations: Sequence[Generation], prompts: Sequence[list[int]], body: CompletionRequest
) -> AsyncIterator[bytes]:
    head = _head("cmpl", "text_completion", serving)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    usage_field = {"usage": None} if with_usage else {}
    usages: list[tuple[int, Usage | None]] = []
    finishes: list[Finish] = []
    is_whole = body.max_tokens == 0 or (body.echo and body.logprobs is not None)
    write = _whole_choices if is_whole else _choices_in_pieces
    choices = write(serving, generations, prompts, body, usages, finishes)
    try:
        async for one in choices:
            yield sse({**head, "choices": [one], **usage_field})
        if with_usage:
            yield sse({**head, "choices": [], "usage": _usage_of_prompts(usages)})
        check_finishes(finishes)
    except Exception as error:  # the stream has begun: the last event says what went wrong
        yield sse_error(error)
    yield DONE


async def _choices_in_pieces(
    serving: Serving,
    generations: Sequence[Generation],
    prompts: Sequence[list[int]],
    body: CompletionRequest,
    usages: list[tuple[int, Usage | None]],
    finishes: list[Finish],
) -> AsyncIterator[dict[str, Any]]:
    """What is new of a choice, each with its index; `usages` and `finishes` grow as they end."""
    for index, ids in enumerate(prompts if body.echo else ()):
        for choice in range(body.n):
            one = {"index": index * body.n + choice, "text": serving.tokenizer.decode(ids)}
            yield {**one, "logprobs": None, "finish_reason": None}
    async for index, piece in side_by_side(generations):
        reason = finish_name(piece.finish) if piece.finish is not None else None
        logprobs = None
        if body.logprobs is not None and piece.logprobs:
            logprobs = _completion_logprobs(serving, Whole(logprobs=piece.logprobs), body)
        if piece.finish is not None:
            usages.append((index, piece.usage))
            finishes.append(piece.finish)
        if piece.text or reason or logprobs:
            one = {"index": index * body.n + piece.choice, "text": piece.text}
            yield {**one, "logprobs": logprobs, "finish_reason": reason}


async def _whole_choices(
    serving: Serving,
    generations: Sequence[Generation],
    prompts: Sequence[list[int]],
    body: CompletionRequest,
    usages: list[tuple[int, Usage | None]],
    finishes: list[Finish],
) -> AsyncIterator[dict[str, Any]]:
    """The same where the logprobs of the prompt are wanted, or nothing but the prompt: they are known at the end."""
    answers = [[Whole() for _ in range(body.n)] for _ in generations]
    async for index, piece in side_by_side(generations):
        answer = answers[index][piece.choice]
        answer.add(piece)
        if piece.finish is not None:
            kept = answer if body.max_tokens != 0 else _without_output(answer)
            usages.append((index, kept.usage))
            finishes.append(piece.finish)
            yield _completion_choice(serving, index * body.n + piece.choice, prompts[index], kept, body)


def _completion_logprobs(serving: Serving, answer: Whole, body: CompletionRequest) -> dict[str, Any]:
    """Tokens, their logprobs and the best ones beside them; the prompt's first token has none."""
    entries: list[TokenLogprob | None] = list(answer.logprobs)
    if body.echo:
        entries = [*(answer.prompt_logprobs or []), *entries]

    def text(token_id: int) -> str:
        return serving.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    texts = [text(one.token_id) if one is not None else "" for one in entries]
    offsets = [0]
    for spelled in texts:
        offsets.append(offsets[-1] + len(spelled))
    return {
        "tokens": texts,
        "token_logprobs": [None if one is None else max(one.logprob, LOWEST_LOGPROB) for one in entries],
        "top_logprobs": [
            None if one is None else {text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in one.top}
            for one in entries
        ],
        "text_offset": offsets[:-1],
    }


# Shared.


def prompt_of(
    request: Request,
    body: ChatRequest | CompletionRequest,
    ids: list[int],
    params: SamplingParams,
    *,
    is_chat: bool = False,
    index: int = 0,
) -> Prompt:
    """A prompt with what the body says about it. Raises BadRequest: a malformed id."""
    if body.rid is not None and not 0 < len(body.rid) <= 256:
        raise BadRequest("rid", body.rid, "must have 1 to 256 characters")
    return Prompt(
        ids=ids,
        params=params,
        owner=owner_of(request),
        request_id=None if body.rid is None else f"{body.rid}-{index}" if index else body.rid,
        priority=body.priority,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        is_chat=is_chat,
    )


def _head(prefix: str, kind: str, serving: Serving) -> dict[str, Any]:
    name = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": serving.model_name}


def finish_name(finish: Finish | None, *, has_calls: bool = False) -> str:
    """OpenAI's words: an answer that its limits or the pool cut is "length"; our own ends keep their names."""
    reason = finish.reason if finish is not None else "abort"
    if has_calls and reason == "stop":
        return "tool_calls"
    return "length" if reason in ("length", "capacity", "timeout") else reason


def usage_of(usages: Sequence[Usage | None]) -> dict[str, Any]:
    """Of answers to one prompt: it counts once."""
    return _usage_of_prompts([(0, usage) for usage in usages])


def _usage_of_prompts(usages: Sequence[tuple[int, Usage | None]]) -> dict[str, Any]:
    first = {index: usage for index, usage in reversed(usages) if usage is not None}
    prompt = sum(usage.prompt_tokens for usage in first.values())
    completion = sum(usage.completion_tokens for _, usage in usages if usage is not None)
    cached = sum(usage.cached_tokens for usage in first.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
