"""/v1/responses: answers with an id, from which a conversation goes on without being sent again.

Read `response_store.py` for what is kept and `response_turns.py` for where an answer is computed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import BadRequest, SessionRefused
from engine.server.chat_plan import plan_chat
from engine.server.connection import EventStream, while_connected
from engine.server.openai_api import check_model, owner_of, prompt_of, serving_of
from engine.server.refusals import as_error
from engine.server.response_events import Event, ResponseWriter
from engine.server.response_store import ResponseStore, StoredResponse
from engine.server.response_turns import ResponseTurn, start_turn
from engine.server.response_types import ResponseRequest, call_ids, items_of, messages_of
from engine.server.serving import Serving, Whole

router = APIRouter(prefix="/v1/responses")
MAX_LISTED = 100
_FIELDS = {
    "prompt": "input",
    "max_new_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format",
    "structural_tag": "text.format",
}
"""Names of a chat request's fields in a response's."""


def open_store(serving: Serving) -> ResponseStore:
    """A server's store. Half of the sessions are left to those who open their own."""
    args, client = serving.args, serving.client
    return ResponseStore(
        max_responses=args.max_stored_responses,
        ttl_s=args.stored_response_ttl_s,
        max_lines=max(1, client.config.session.max_sessions // 2),
        close_session=lambda name: client.tell("close_session", session_id=name, abort=True),
    )


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@router.post("")
async def create(request: Request, body: ResponseRequest) -> Response:
    serving, store, owner = serving_of(request), _store_of(request), owner_of(request)
    check_model(serving, body.model)
    body.check_supported()
    previous = _previous(store, owner, body.previous_response_id)
    before = previous.conversation() if previous is not None else []
    items = items_of(body.input)
    if not items:
        raise BadRequest("input", body.input, "is empty; say something")
    new = messages_of(items, call_ids(before))
    with _named_as_here():
        chat = body.as_chat([*before, *new])
        chat.check_supported()
        plan = plan_chat(serving, chat)
        if plan.shows_special:
            chat.skip_special_tokens = False
        others: dict[str, Any] = {"grammar": plan.grammar}
        if body.wants_logprobs:
            others |= {"return_logprob": True, "top_logprobs_num": body.top_logprobs or 0}
        wanted = serving.context_len if body.max_output_tokens is None else body.max_output_tokens
        prompt = prompt_of(request, chat, [], chat.sampling(wanted, **others), is_chat=True)
        turn = await start_turn(serving, store, previous, plan, prompt, body.store)
    writer = ResponseWriter(serving, body, plan)
    job = _Job(serving, writer, turn, owner, items, new, keeps=body.store)
    if body.stream:
        return EventStream(job.stream(), [turn])
    try:
        await while_connected(request, job.run())
    finally:
        turn.drop()
    return JSONResponse(writer.body)


class _Job:
    """One response from its first piece to the store."""

    def __init__(
        self,
        serving: Serving,
        writer: ResponseWriter,
        turn: ResponseTurn,
        owner: str,
        items: list[dict[str, Any]],
        messages: list[dict[str, Any]],
        *,
        keeps: bool,
    ) -> None:
        self._serving, self._writer, self._turn = serving, writer, turn
        self._owner, self._items, self._messages, self._keeps = owner, items, messages, keeps

    async def events(self) -> AsyncIterator[Event]:
        """Every event; a response that has ended well is kept before its last event is seen."""
        writer, whole = self._writer, Whole()
        for event in writer.begin():
            yield event
        async for piece in self._turn.generation:
            whole.add(piece)
            for event in writer.feed(piece):
                if "response" in event:
                    self._keep(whole)
                yield event

    def _keep(self, whole: Whole) -> None:
        writer = self._writer
        if self._keeps and writer.body["status"] in ("completed", "incomplete"):
            messages = [*self._messages, writer.message()]
            self._turn.stored(self._owner, writer.body, self._items, messages, whole, self._serving)
        self._turn.drop()

    async def run(self) -> None:
        async for _ in self.events():
            pass

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            async for event in self.events():
                yield _sse(event)
        except Exception as error:  # the stream has begun: the last event says what went wrong
            said = as_error(error)[1]["error"]
            yield _sse(self._writer.error(said["code"], said["message"], said["param"]))


def _sse(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def _previous(store: ResponseStore, owner: str, response_id: str | None) -> StoredResponse | None:
    if response_id is None:
        return None
    found = store.get(owner, response_id)
    if found is None:
        raise BadRequest("previous_response_id", response_id, "is not stored: unknown, deleted or too old")
    return found


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Errors name the fields as this endpoint does."""
    try:
        yield
    except SessionRefused:
        raise
    except BadRequest as error:
        field = "input" if error.field.startswith("messages") else _FIELDS.get(error.field, error.field)
        raise BadRequest(field, error.value, error.rule) from error


# What is kept.


@router.get("/{response_id}")
async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
    if stream:
        raise BadRequest("stream", True, "a stored response comes whole")
    return JSONResponse(_stored(request, response_id).body)


@router.delete("/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget an answer; those that continued it stay."""
    _store_of(request).delete(_stored(request, response_id))
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/{response_id}/input_items")
async def input_items(
    request: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
) -> dict[str, Any]:
    """What the response answered, a page of it."""
    items = _stored(request, response_id).input_items
    if not 1 <= limit <= MAX_LISTED:
        raise BadRequest("limit", limit, f"must be 1 to {MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise BadRequest("order", order, "must be asc or desc")
    items = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise BadRequest("after", after, "is the id of none of these items")
        items = items[at + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


@router.post("/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> None:
    _stored(request, response_id)
    raise BadRequest("response_id", response_id, "has ended; a running one is cancelled by hanging up")


def _stored(request: Request, response_id: str) -> StoredResponse:
    found = _store_of(request).get(owner_of(request), response_id)
    if found is None:
        raise HTTPException(404, f"the response {response_id[:80]!r} is not stored: unknown, deleted or too old")
    return found
