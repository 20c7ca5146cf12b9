"""The router before a deployment's replicas: streams requests to them and answers back.

It asks each replica's `/ready` all the time and sends to those that say yes. `/health` is the router's own life,
`/ready` says whether any replica is ready. A replica that cannot be reached is passed over for the next one; once it
has the request, an error is the client's to see. See `routing` for which replica gets what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence, Set
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.routing import Backend, Sessions, choose, prefix_of, session_of

logger = logging.getLogger("rung.router")
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 8 << 20
EVERY_REPLICA = frozenset({"/abort_request", "/flush_cache", "/pause_generation", "/continue_generation"})
"""What is about all replicas: sent to each, answered by the worst."""
ONE_REPLICA = frozenset({"/metrics", "/server_info", "/health_generate"})
"""What is about one replica, and would be about a random one here."""
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
        path = request.url.path
        if path in ONE_REPLICA:
            urls = ", ".join(backend.url for backend in self.backends)
            return _refusal(404, f"{path} is about one replica; ask each: {urls}")
        content = await request.body()
        if len(content) > MAX_BODY_BYTES:
            return _refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if path in EVERY_REPLICA:
            return await self._send_to_all(request, content)
        body = _json(content)
        session = session_of(_raw_path(request), body)
        if session is not None:
            session = f"{request.headers.get('authorization', '')}\0{session}"
            home = await self._home_of(session, request)
            if home is not None:
                return await self._send_home(request, content, home, session)
        return await self._send_to_best(request, content, body, session)

    async def _send_to_best(self, request: Request, content: bytes, body: Any, session: str | None) -> Response:
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

    async def _send_home(self, request: Request, content: bytes, home: Backend, session: str) -> Response:
        try:
            return await self._forward(request, content, home, session)
        except httpx.ConnectError:
            return _refusal(503, "the replica that has this session is out of reach", {"retry-after": "1"})

    async def _send_to_all(self, request: Request, content: bytes) -> Response:
        sent = (self.client.send(self._outgoing(request, content, backend)) for backend in self.backends)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        came = [answer for answer in answers if isinstance(answer, httpx.Response)]
        if len(came) < len(answers):
            return _refusal(502, f"{len(answers) - len(came)} of {len(answers)} replicas did not answer")
        worst = max(came, key=lambda answer: answer.status_code)
        return Response(worst.content, worst.status_code, _kept(worst, {"content-encoding"}))

    async def _home_of(self, session: str, request: Request) -> Backend | None:
        """The replica that has a session; asked around when it is not remembered (after a restart of the router)."""
        by_url = {backend.url: backend for backend in self.backends}
        if (url := self.sessions.home_of(session)) in by_url:
            return by_url[str(url)]
        headers = {"authorization": request.headers["authorization"]} if "authorization" in request.headers else {}
        name = quote(session.partition("\0")[2], safe="")
        for backend in self.backends:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.client.get(
                    f"{backend.url}/sessions/{name}", headers=headers, timeout=PROBE_TIMEOUT_S
                )
                if answer.status_code == 200:
                    self.sessions.remember(session, backend.url)
                    return backend
        return None

    def _outgoing(self, request: Request, content: bytes, backend: Backend) -> httpx.Request:
        headers = [(name, value) for name, value in request.headers.raw if name.decode().lower() not in HOP_HEADERS]
        query = f"?{request.url.query}" if request.url.query else ""
        url = f"{backend.url}{_raw_path(request)}{query}"
        return self.client.build_request(request.method, url, headers=headers, content=content)

    async def _forward(self, request: Request, content: bytes, backend: Backend, session: str | None) -> Response:
        """Send to this replica.

        Raises:
            httpx.ConnectError: it cannot be reached, so it does not have the request.
        """
        backend.num_in_flight += 1
        try:
            answer = await self._until_headers(self._outgoing(request, content, backend), request)
        except httpx.HTTPError as error:
            backend.num_in_flight -= 1
            if isinstance(error, httpx.ConnectError):
                raise
            return _refusal(502, f"the replica did not answer: {type(error).__name__}")
        except ClientDisconnect:
            backend.num_in_flight -= 1
            return Response(status_code=499)
        path = request.url.path
        if path in ("/open_session", "/close_session") or path.endswith("/fork"):
            return await self._session_answer(request, answer, backend, session)
        return _Relayed(answer, backend)

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
        except httpx.HTTPError as error:
            return _refusal(502, f"the replica's answer broke off: {type(error).__name__}")
        finally:
            await answer.aclose()
            backend.num_in_flight -= 1
        if answer.is_success:
            if request.url.path == "/close_session" and session is not None:
                self.sessions.forget(session)
            elif (opened := _session_in(_json(content))) is not None:
                self.sessions.remember(f"{request.headers.get('authorization', '')}\0{opened}", backend.url)
        return Response(content, answer.status_code, _kept(answer, {"content-encoding"}))


class _Relayed(StreamingResponse):
    """A replica's answer on its way; the replica is told when the client hangs up, also before the first byte."""

    def __init__(self, answer: httpx.Response, backend: Backend) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code, _kept(answer))
        self._answer = answer
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._backend.num_in_flight -= 1
            await self._answer.aclose()


def _raw_path(request: Request) -> str:
    """The path as the client wrote it, with its percent signs."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.partition(b"?")[0].decode("ascii", "replace")


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


def _kept(answer: httpx.Response, without: Set[str] = frozenset()) -> dict[str, str]:
    """The answer's headers that are for the client. Without content-encoding where the body was decoded here."""
    return {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS | without}


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
