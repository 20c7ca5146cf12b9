"""The whole server inside a test: every part is real but the device, the model and the process between the two ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from hash_engine import make_core
from tiny_tokenizers import tiny_tokenizer

from engine.config import EngineConfig, server_config
from engine.core import EngineCore
from engine.server.app import create_app
from engine.server.engine_client import EngineClient
from engine.server.engine_process import EngineLoop
from engine.server.messages import Beat, Progress, Ready, ToEngine, decode_from_engine, decode_to_engine
from engine.server.metrics import Metrics
from engine.server.serving import Serving
from engine.text.tokenizer import Tokenizer


class InsideClient(EngineClient):
    """The API process's end with the engine's loop behind it: messages are bytes, but nothing carries them.

    Attributes:
        sent: what the engine was told, in order.
    """

    def __init__(self, config: EngineConfig, core: EngineCore, tokenizer: Tokenizer) -> None:
        super().__init__(config, logging.WARNING)
        self.sent: list[ToEngine] = []
        self.core = core
        parts: Any = SimpleNamespace(
            core=core,
            tokenizer=tokenizer,
            config=config,
            model_config=SimpleNamespace(architecture="Hash"),
            device=SimpleNamespace(name="hash", description="nothing"),
        )
        wire: Any = self
        self.engine = EngineLoop(parts, wire, wire)
        self._outgoing.close(linger=0)
        self._outgoing: Any = SimpleNamespace(send=self._carry, close=lambda linger: None)
        self._take(Ready(self.engine.commands.info()))
        self._take(Beat(0.0, self.engine.stats()))

    def send(self, data: bytes) -> None:
        """The engine's socket."""
        message = decode_from_engine(data)
        for one in message.answers if isinstance(message, Progress) else [message]:
            self._take(one)

    def _carry(self, data: bytes, flags: int) -> None:
        message = decode_to_engine(data)
        self.sent.append(message)
        self.engine._take(message)

    async def step(self) -> None:
        """For ever, where there is something to do; a beat after each step."""
        while True:
            if self.core.has_work and not self.engine.commands.is_paused:
                self.engine._step()
            self._take(Beat(0.0, dict(self.engine.stats())))
            await asyncio.sleep(0)


SHORT = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@dataclass(frozen=True)
class Inside:
    """A server without a process."""

    app: FastAPI
    client: InsideClient
    serving: Serving
    http: httpx.AsyncClient

    async def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, **more: Any
    ) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.request(method, path, json=body, headers={**headers, **more.pop("headers", {})}, **more)

    async def post(self, path: str, body: Any, status: int = 200, key: str | None = None) -> Any:
        answer = await self.ask("POST", path, body, key)
        assert answer.status_code == status, answer.text
        return answer.json()

    def told(self, kind: type[Any]) -> list[Any]:
        """Messages of one kind that the engine got."""
        return [message for message in self.client.sent if isinstance(message, kind)]

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels."""
        lines = self.serving.metrics.text().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.removeprefix("rung:"): float(value) for name, value in pairs}


@cache
def byte_tokenizer() -> Tokenizer:
    """Every byte is a token."""
    return tiny_tokenizer("byte_level")


def core_for_text() -> EngineCore:
    """A core that takes every id of the tiny tokenizers, and a chat."""
    core = make_core(num_pages=256, context_len=256, num_rows=8)
    core.vocab_size = 400
    return core


@asynccontextmanager
async def inside(
    tokenizer: Tokenizer | None = None, core: EngineCore | None = None, **flags: Any
) -> AsyncIterator[Inside]:
    """Serve until the block ends. Texts need a core with a vocabulary for them: `core_for_text`."""
    tokenizer = tokenizer or byte_tokenizer()
    config, args = server_config(**flags)
    client = InsideClient(config, core or make_core(num_pages=64, num_rows=8), tokenizer)
    serving = Serving(client, tokenizer, args, Metrics(client))
    app = create_app(serving)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    steps = asyncio.create_task(client.step())
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://inside", timeout=20.0) as http:
            yield Inside(app, client, serving, http)
    finally:
        steps.cancel()
        await client.stop()


def served(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def say(ids: list[int], **fields: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": SHORT, **fields}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing happened")


def waiting(server: Inside) -> Callable[[int], Callable[[], bool]]:
    return lambda count: lambda: len(server.client.core.scheduler.waiting) == count
