"""What a stream of events leaves behind when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.server.connection import EventStream


class Request:
    def __init__(self) -> None:
        self.num_drops = 0

    def drop(self) -> None:
        self.num_drops += 1


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_stream_ends_its_requests_whenever_its_client_goes(num_events):
    """Also before the first event, when nothing has begun to read their answers."""
    requests, begun = [Request(), Request()], []

    async def events() -> AsyncIterator[bytes]:
        for index in range(10):
            begun.append(index)
            yield b"data: x\n\n"

    async def run() -> None:
        gone, num_sent = asyncio.Event(), -1  # the head comes first

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent == num_events:
                gone.set()
                await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await EventStream(events(), requests)(scope, receive, send)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(begun) == num_events
    assert [request.num_drops for request in requests] == [1, 1]
