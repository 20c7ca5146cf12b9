"""uvicorn's HTTP/1.1 with an end to its patience: a request must be whole, and an answer be taken, within a time.

    connected, or first byte ... request whole          longer than the limit: closed
    buffer full ... half of it taken by the client      longer than the limit: cut off, which aborts the request

Without it, a client that sends a byte a minute, or reads none, keeps a connection and its request for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 << 10


class BoundedHttp(H11Protocol):
    """One connection. The limit is `ServerArgs.client_timeout_s`."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], **others: Any) -> None:
        super().__init__(config, server_state, app_state, **others)
        assert isinstance(config.app, FastAPI)
        self._limit_s: float = config.app.state.serving.args.client_timeout_s
        self._sending: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending = self.loop.call_later(self._limit_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._sending = _cancel(self._sending)
        elif self._sending is None:
            self._sending = self.loop.call_later(self._limit_s, self._give_up)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self.loop.call_later(self._limit_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking = _cancel(self._taking)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending, self._taking = _cancel(self._sending), _cancel(self._taking)
        super().connection_lost(exc)

    def _give_up(self) -> None:
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer any longer."""
    if timer is not None:
        timer.cancel()
    return None
