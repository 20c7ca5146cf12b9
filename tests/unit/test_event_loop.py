"""What may hold the API process's event loop: a step of many answers, a long text, garbage collection."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from itertools import pairwise
from typing import Any

import pytest
from tiny_tokenizers import tiny_tokenizer

from engine.config import EngineConfig, ServerArgs
from engine.server import garbage
from engine.server.engine_client import ANSWERS_A_TURN, Answer, EngineClient
from engine.server.messages import Accepted, FromEngine, Progress, Tokens, encode
from engine.server.serving import LONG_TEXT_CHARS, Serving

NUM_ANSWERS = 5 * ANSWERS_A_TURN + 1


class Arrived:
    """An incoming socket on which everything has arrived already."""

    def __init__(self, messages: list[FromEngine]) -> None:
        self._messages = [encode(message) for message in messages]

    async def recv(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)


class Heard(Answer):
    """An answer that only counts what it is given."""

    def __init__(self, client: EngineClient, name: str) -> None:
        super().__init__(client, name, 1)
        self.num = 0

    def put(self, message: Any) -> None:
        self.num += 1


async def given_by_turn(messages: list[FromEngine]) -> list[int]:
    """How many messages the answers have been given after each turn of the event loop."""
    client = EngineClient(EngineConfig(), logging.WARNING)
    heard = [Heard(client, str(index)) for index in range(NUM_ANSWERS)]
    client._answers.update({one.id: one for one in heard})
    client._incoming.close()
    client._incoming = Arrived(messages)  # type: ignore[assignment]
    receiving = asyncio.create_task(client._receive())
    totals = [0]
    while totals[-1] < NUM_ANSWERS:
        await asyncio.sleep(0)
        totals.append(sum(one.num for one in heard))
    receiving.cancel()
    await client.stop()
    return totals


@pytest.mark.parametrize("is_one_step", [True, False], ids=["one step", "one by one"])
def test_a_turn_of_the_event_loop_serves_few_answers(is_one_step: bool) -> None:
    names = [str(index) for index in range(NUM_ANSWERS)]
    step: list[FromEngine] = [Progress([Tokens(name, 0, [1]) for name in names])]
    totals = asyncio.run(given_by_turn(step if is_one_step else [Accepted(name, 1) for name in names]))
    assert max(after - before for before, after in pairwise(totals)) == ANSWERS_A_TURN


def test_a_long_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("byte_level")
    text = "the thing 123, 你好 <|im_end|>" * (LONG_TEXT_CHARS // 20)
    expected = {size: tokenizer.encode(text[:size]) for size in (LONG_TEXT_CHARS, LONG_TEXT_CHARS + 1)}
    threads: list[int] = []
    encode_here = tokenizer.encode

    def noted(*args: Any, **kwargs: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode_here(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", noted)

    async def main() -> None:
        client = EngineClient(EngineConfig(), logging.WARNING)
        serving = Serving(client, tokenizer, ServerArgs(), metrics=None)  # type: ignore[arg-type]
        for size, ids in expected.items():
            assert await serving.encode(text[:size]) == ids
        await client.stop()

    asyncio.run(main())
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


def test_what_is_loaded_is_not_collected_again() -> None:
    loaded = [[index] for index in range(1000)]
    garbage.settle()
    try:
        known = {id(one) for one in gc.get_objects()}
        assert not any(id(one) in known for one in loaded)
    finally:
        gc.unfreeze()
