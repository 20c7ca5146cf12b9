"""What stands before every route: keys, sizes and how many at once. Plain ASGI, so that streams pass untouched.

Health is open. Metrics and control are for admin keys, everything else for API keys; without keys everything is open,
which is why the server listens on 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.config import ServerArgs
from engine.server import page_api
from engine.server.metrics import Metrics
from engine.server.refusals import error_body

OPEN_PATHS = frozenset({"/health", "/ready", "/health_generate", *page_api.FILES})
ADMIN_PATHS = frozenset(
    {"/metrics", "/flush_cache", "/pause_generation", "/continue_generation", "/server_info", page_api.PICTURE_PATH}
)
RETRY_AFTER_S = "1"


def owner_of(key: str | None) -> str:
    """Whom a key stands for: names sessions and salts prefixes, and does not give the key away. "" without a key."""
    return "" if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]


class Gate:
    """ASGI middleware; `scope["state"]["owner"]` says who a request is from."""

    def __init__(self, app: ASGIApp, args: ServerArgs, metrics: Metrics) -> None:
        self._app = app
        self._api_keys = args.api_keys
        self._admin_keys = args.admin_api_keys
        self._max_body = args.max_body_bytes
        self._max_concurrent = args.max_concurrent_requests
        self._shown = metrics.num_http_requests
        self.num_in_flight = 0
        self._door = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], {name.lower(): value for name, value in scope["headers"]}
        key = _key_in(headers)
        if (refusal := self._refuse(path, key)) is not None:
            await _answer(send, *refusal)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body:
            await _answer(send, 413, f"the body has more than {self._max_body} bytes", code="body_too_large")
            return
        if path in OPEN_PATHS or path in ADMIN_PATHS:
            await self._app(scope, receive, send)
            return
        if self.num_in_flight >= self._max_concurrent:
            message = f"{self._max_concurrent} requests are being served, as many as may; try again"
            await _answer(send, 503, message, code="overloaded", headers=[(b"retry-after", RETRY_AFTER_S.encode())])
            return
        scope.setdefault("state", {})["owner"] = owner_of(key if self._api_keys else None)
        self.num_in_flight += 1
        self._shown.set(self.num_in_flight)
        try:
            async with self._door:  # requests that arrive together begin one a turn of the event loop
                await asyncio.sleep(0)
            await self._app(scope, _limited(receive, self._max_body), send)
        finally:
            self.num_in_flight -= 1
            self._shown.set(self.num_in_flight)

    def _refuse(self, path: str, key: str | None) -> tuple[int, str] | None:
        """Status and reason when this key may not use this path."""
        if path in OPEN_PATHS:
            return None
        if path in ADMIN_PATHS:
            allowed: tuple[str, ...] = self._admin_keys
            if not allowed and self._api_keys:
                return 403, "no admin key is configured: start the server with --admin-api-key"
        else:
            allowed = self._api_keys
        if not allowed or (key is not None and _is_one_of(key, allowed)):
            return None
        what = "an API key" if key is None else "a key that may do this"
        return 401, f"give {what} in the header Authorization: Bearer ..."


def _key_in(headers: dict[bytes, bytes]) -> str | None:
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _is_one_of(key: str, allowed: Iterable[str]) -> bool:
    """Compared in constant time with every allowed key, also after one was found."""
    found = False
    for one in allowed:
        found |= hmac.compare_digest(key.encode(), one.encode())
    return found


def _limited(receive: Receive, limit: int) -> Receive:
    """A body without a length that grows beyond the limit is refused while it is read."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        return message

    return limited


async def _answer(
    send: Send, status: int, message: str, *, code: str | None = None, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps(error_body(status, message, code=code)).encode()
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
