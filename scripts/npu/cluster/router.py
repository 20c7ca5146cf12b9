"""The router before a deployment's replicas: streams requests to them and answers back.

It asks each replica's `/ready` all the time and sends to those that say yes. `/health` is the router's own life, `/ready`
says whether any replica is ready. A replica that cannot be reached at all is passed over for the next one; once bytes
of an answer have come, an error is the client's to see. See `routing` for which replica gets what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cluster.routing import Backend, Sessions, choose, prefix_of, session_of

logger = logging.getLogger("rung.router")
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 8 << 20
HOP_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "proxy-connection",
        "host",
        "content-length",
    }
)


class Router:
    """The replicas, what is known of them, and the client that talks to them."""

    def __init__(
        self,
        urls: Sequence[str],
        prefix_chars: int = 256,
        max_load_factor: float = 1.5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.backends = [Backend(url.rstrip("/")) for url in urls]
        self.sessions = Sessions()
        self._prefix_chars = prefix_chars
        self._max_load_factor = max_load_factor
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, transport=transport)

    async def probe(self) -> None:
        """Ask every replica once whether it is ready."""
        await asyncio.gather(*(self._probe(backend) for backend in self.backends))

    async def _probe(self, backend: Backend) -> None:
        try:
            answer = await self.client.get(f"{backend.url}/ready", timeout=PROBE_TIMEOUT_S)
            is_ready = answer.status_code == 200
        except httpx.HTTPError:
            is_ready = False
        if is_ready != backend.is_ready:
            logger.info("%s is %s", backend.url, "ready" if is_ready else "not ready")
        backend.is_ready = is_ready

    async def probe_for_ever(self) -> None:
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_EVERY_S)

    async def send(self, request: Request) -> Response:
        """Forward a request and stream its answer."""
        content = await request.body()
        if len(content) > MAX_BODY_BYTES:
            return _refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        body = _json(content)
        session = session_of(request.url.path, body)
        if session is not None and (home := await self._home_of(session, request)) is not None:
            return await self._forward(request, content, home, session)
        tried: set[str] = set()
        while True:
            untried = [backend for backend in self.backends if backend.url not in tried]
            backend = choose(prefix_of(body, self._prefix_chars), untried, self._max_load_factor)
            if backend is None:
                return _refusal(503, "no replica is ready", {"retry-after": "1"})
            tried.add(backend.url)
            try:
                return await self._forward(request, content, backend, session)
            except httpx.ConnectError:
                backend.is_ready = False

    async def _home_of(self, session: str, request: Request) -> Backend | None:
        """The replica that has a session; asked around when it is not remembered (after a restart of the router)."""
        by_url = {backend.url: backend for backend in self.backends}
        if (url := self.sessions.home_of(session)) in by_url:
            return by_url[str(url)]
        if request.url.path == "/open_session":
            return None
        headers = {"authorization": request.headers["authorization"]} if "authorization" in request.headers else {}
        for backend in self.backends:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.client.get(
                    f"{backend.url}/sessions/{session}", headers=headers, timeout=PROBE_TIMEOUT_S
                )
                if answer.status_code == 200:
                    self.sessions.remember(session, backend.url)
                    return backend
        return None

    async def _forward(self, request: Request, content: bytes, backend: Backend, session: str | None) -> Response:
        headers = [(name, value) for name, value in request.headers.raw if name.decode().lower() not in HOP_HEADERS]
        url = httpx.URL(backend.url).copy_with(path=request.url.path, query=request.url.query.encode() or None)
        outgoing = self.client.build_request(request.method, url, headers=headers, content=content)
        backend.num_in_flight += 1
        try:
            answer = await self._until_headers(outgoing, request)
        except ClientDisconnect:
            backend.num_in_flight -= 1
            return Response(status_code=499)
        except httpx.ConnectError:
            backend.num_in_flight -= 1
            if session is not None and self.sessions.home_of(session) == backend.url:
                return _refusal(503, "the replica that has this session is out of reach", {"retry-after": "1"})
            raise
        except httpx.HTTPError as error:
            backend.num_in_flight -= 1
            return _refusal(502, f"the replica did not answer: {type(error).__name__}")
        if request.url.path in ("/open_session", "/close_session") or request.url.path.endswith("/fork"):
            return await self._session_answer(request, answer, backend, session)
        return StreamingResponse(self._body(answer, backend), answer.status_code, _kept(answer))

    async def _until_headers(self, outgoing: httpx.Request, request: Request) -> httpx.Response:
        """The answer's head, unless the client hangs up before; then the replica is told by closing its connection."""
        sending = asyncio.create_task(self.client.send(outgoing, stream=True))
        gone = asyncio.create_task(_client_gone(request))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            raise ClientDisconnect
        finally:
            for task in (sending, gone):
                if not task.done():
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task

    async def _session_answer(
        self, request: Request, answer: httpx.Response, backend: Backend, session: str | None
    ) -> Response:
        """Read a session's opening, fork or end, and remember where it lives."""
        try:
            content = await answer.aread()
        finally:
            await answer.aclose()
            backend.num_in_flight -= 1
        if answer.is_success:
            if request.url.path == "/close_session" and session is not None:
                self.sessions.forget(session)
            elif (opened := _session_in(_json(content))) is not None:
                self.sessions.remember(opened, backend.url)
        return Response(content, answer.status_code, _kept(answer))

    async def _body(self, answer: httpx.Response, backend: Backend) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            backend.num_in_flight -= 1
            await answer.aclose()


async def _client_gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content else None
    except ValueError:
        return None


def _session_in(body: Any) -> str | None:
    """The id in an answer that opens a session: the text itself, or a field of an object."""
    if isinstance(body, str):
        return body
    if isinstance(body, dict):
        found = body.get("session_id") or body.get("id")
        return found if isinstance(found, str) else None
    return None


def _kept(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "router_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


def create_app(router: Router, probing: bool = True) -> FastAPI:
    """The application; `probing` is off where a test probes by itself."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(router.probe_for_ever()) if probing else None
        yield
        if task is not None:
            task.cancel()
        await router.client.aclose()

    app = FastAPI(title="Rung router", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        replicas = {backend.url: backend.is_ready for backend in router.backends}
        return JSONResponse({"replicas": replicas}, 200 if any(replicas.values()) else 503)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def anything(request: Request) -> Response:
        return await router.send(request)

    return app
