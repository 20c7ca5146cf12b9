"""A client that has gone: its request ends, whether it streams or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class Droppable(Protocol):
    """Something that ends with its reader."""

    def drop(self) -> None: ...


class EventStream(StreamingResponse):
    """Server-sent events about some requests, which end with it, also when the client goes before the first event."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Droppable]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                generation.drop()


T = TypeVar("T")
STATUS_CLIENT_GONE = 499
"""Nobody reads it; it is nginx's number for the log."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up first. (Streams notice it by themselves.)"""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(STATUS_CLIENT_GONE, "the client has hung up")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
