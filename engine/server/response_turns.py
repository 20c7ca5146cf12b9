"""A response's prompt on the cheapest ground there is: the row of its conversation, a fork of it, or a session anew.

    previous is the tip, and idle     a turn on the held row, rewound to what is still right
    previous is older, or busy        a fork of the session at the last token that both share
    nothing to continue               a session of its own; without `store`, and where sessions are refused, none

What is shared is found by comparing tokens, so a template that rewrites older turns, new instructions or an answer that
a stop string cut cost what they change, and never a wrong token.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from devices.pages import IntArray
from engine.errors import SessionRefused
from engine.server.chat_plan import ChatPlan
from engine.server.response_store import Line, ResponseStore, StoredResponse, digest_of
from engine.server.response_types import Message
from engine.server.serving import Generation, Prompt, Serving, Whole
from session.branching import SessionParams

logger = logging.getLogger("rung")


@dataclass(slots=True)
class ResponseTurn:
    """A response that is being generated; `drop` it when it is over, however it ends.

    Attributes:
        keep: tokens of the predecessor's history that the prompt begins with; `ids`: what follows, int32.
        line: the session it runs on, if any.
    """

    generation: Generation
    previous: StoredResponse | None
    keep: int
    ids: IntArray
    text: str
    line: Line | None
    _store: ResponseStore

    def drop(self) -> None:
        """Nobody waits for it any longer. Twice is no error."""
        self.generation.drop()
        line, self.line = self.line, None
        if line is not None:
            self._store.release(line)

    def stored(
        self,
        owner: str,
        body: dict[str, Any],
        input_items: list[dict[str, Any]],
        messages: list[Message],
        whole: Whole,
        serving: Serving,
    ) -> None:
        """Keep the finished response as a point from which to go on."""
        finish = whole.finish
        assert finish is not None
        is_ended = isinstance(finish.matched, int)
        shown = whole.token_ids[:-1] if is_ended else whole.token_ids
        text = self.text + whole.text
        if is_ended:
            text += serving.tokenizer.token_bytes(whole.token_ids[-1]).decode(errors="replace")
        is_exact = serving.tokenizer.decode(shown, skip_special_tokens=False) == whole.text
        response = StoredResponse(
            owner=owner,
            body=body,
            input_items=input_items,
            messages=messages,
            previous=self.previous,
            keep=self.keep,
            ids=np.concatenate([self.ids, np.array(whole.token_ids, dtype=np.int32)]),
            text_len=len(text) if is_exact else 0,
            text_digest=digest_of(text) if is_exact else b"",
            line=self.line,
        )
        if self.line is not None and finish.reason in ("stop", "length"):
            self.line.tip = response
        self._store.put(response)


async def start_turn(
    serving: Serving, store: ResponseStore, previous: StoredResponse | None, plan: ChatPlan, prompt: Prompt, keeps: bool
) -> ResponseTurn:
    """Queue a response.

    Args:
        previous: what it continues.
        prompt: all but the place where it runs.
        keeps: it will be stored, so its session stays.
    Raises:
        BadRequest, EngineDied: nothing was queued, and no session is left behind.
    """
    history = previous.history() if previous is not None else np.empty(0, dtype=np.int32)
    ids = await _tokens(serving, previous, history, plan)
    keep = _shared(history, ids)
    for line in _lines(serving, store, previous, ids, prompt, keeps):
        where = replace(prompt, ids=ids.tolist())
        if line is not None:
            start = _shared(line.tip.history(), ids) if line.tip is not None else 0
            where = replace(where, ids=ids[start:].tolist(), session=SessionParams(id=line.name), keep=start)
        try:
            generation = await serving.generate(where)
        except BaseException as error:
            if line is not None:
                store.release(line)
                if isinstance(error, SessionRefused):
                    line.tip = line.tip if error.kind == "busy" else None
                    logger.debug("a response runs elsewhere: %s", error)
                    continue
            raise
        return ResponseTurn(generation, previous, keep, ids[keep:], plan.text, line, store)
    raise AssertionError("a prompt without a session cannot be refused by one")


async def _tokens(serving: Serving, previous: StoredResponse | None, history: IntArray, plan: ChatPlan) -> IntArray:
    """The whole prompt, int32 [n]: the history's own tokens where its text is what the template writes again."""
    if previous is None or not previous.is_spelled(plan.text):
        return np.array(await serving.encode(plan.text, add_special_tokens=False), dtype=np.int32)
    rest = await serving.encode(plan.text[previous.text_len :], add_special_tokens=False)
    return np.concatenate([history, np.array(rest, dtype=np.int32)])


def _shared(history: IntArray, ids: IntArray) -> int:
    """Tokens that both begin with, less than all of `ids`."""
    n = min(len(history), len(ids) - 1)
    differs = np.flatnonzero(history[:n] != ids[:n])
    return int(differs[0]) if len(differs) else n


def _lines(
    serving: Serving, store: ResponseStore, previous: StoredResponse | None, ids: IntArray, prompt: Prompt, keeps: bool
) -> Iterator[Line | None]:
    """Where to try, best first. The commands are sent on the way: the engine takes them before the prompt."""
    client = serving.client
    namespace = (prompt.extra_key, serving.salt_for(prompt.owner, prompt.cache_salt))

    def named() -> Line:
        name = f"responses:{uuid.uuid4().hex}"
        return Line(name, serving.session_name(prompt.owner, name), namespace)

    found = previous.line if previous is not None else None
    if found is not None and store.is_open(found) and found.tip is not None and found.namespace == namespace:
        if found.tip is previous and not found.is_busy and keeps:
            store.borrow(found)
            yield found
        if found.tip is not None:  # still there, and busy after all: an aborted turn's last step is on its way
            start = _shared(found.tip.history(), ids)
            if start:
                fork = named()
                fork.tip = found.tip
                store.add_line(fork)
                client.tell(
                    "fork_session", session_id=found.engine_name, tokens=start, turns=None, new_id=fork.engine_name
                )
                yield fork
    if keeps:
        line = named()
        store.add_line(line)
        client.tell(
            "open_session",
            session_id=line.engine_name,
            streaming=True,
            capacity=None,
            timeout=serving.args.stored_response_ttl_s,
            extra_key=namespace[0],
            cache_salt=namespace[1],
        )
        yield line
    yield None
