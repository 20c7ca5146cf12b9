"""The API process: binds the port, starts the engine process, serves, drains and stops.

A port that is in use is said before anything is loaded. When the engine process ends, the server ends too, with its
reason and a status that is not 0; when the server ends, so does the engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from engine.assembly import load_tokenizer
from engine.config import EngineConfig, ServerArgs
from engine.errors import ConfigError
from engine.server import control_api, garbage, native_api, openai_api, page_api, refusals, responses_api
from engine.server.bounded_http import MAX_HEADER_BYTES, BoundedHttp
from engine.server.engine_client import EngineClient
from engine.server.gate import Gate
from engine.server.metrics import Metrics
from engine.server.serving import Serving

logger = logging.getLogger("rung")
STATUS_ENGINE_DIED = 3
KEEP_ALIVE_S = 10
ACCEPTS_A_TURN = 32
"""Connections that are taken in one turn of the event loop."""
MAX_WAITING_CONNECTIONS = 2048


def create_app(serving: Serving) -> FastAPI:
    """All routes behind the gate."""
    app = FastAPI(title="Rung", docs_url=None, redoc_url=None)
    app.state.serving = serving
    app.state.responses = responses_api.open_store(serving)
    app.state.is_draining = False
    for api in (openai_api, responses_api, native_api, control_api):
        app.include_router(api.router)
    if not serving.args.no_ui:
        app.include_router(page_api.router)
    refusals.install(app)
    app.add_middleware(Gate, args=serving.args, metrics=serving.metrics)
    return app


class DrainingServer(uvicorn.Server):
    """Ends by SIGTERM or SIGINT with status 0 when the requests in flight are done; a second signal does not wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`Config.backlog` is also what asyncio takes at once; here the kernel's queue becomes longer than that."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(MAX_WAITING_CONNECTIONS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _drain(self) -> None:
        app = self.config.app
        assert isinstance(app, FastAPI)
        if app.state.is_draining:
            self.force_exit = True
        app.state.is_draining = self.should_exit = True
        logger.info("draining: no new requests, %s s for those in flight", self.config.timeout_graceful_shutdown)


def bind(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"host={host} port={port} cannot be had: {error.strerror}; choose another --port") from error
    return listener


def serve(config: EngineConfig, args: ServerArgs) -> int:
    """Serve until SIGTERM, SIGINT or the engine's end; the process's exit status.

    Raises:
        ConfigError: the port, an argument or the model is wrong; nothing is left running.
    """
    listener = bind(args.host, args.port)
    try:
        return asyncio.run(_serve(config, args, listener))
    finally:
        listener.close()


async def _serve(config: EngineConfig, args: ServerArgs, listener: socket.socket) -> int:
    client = EngineClient(config, logger.getEffectiveLevel())
    try:
        tokenizer, _ = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, config), client.start(args.start_timeout_s)
        )
        serving = Serving(client, tokenizer, args, Metrics(client))
        app = create_app(serving)
        server = DrainingServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                http=BoundedHttp,
                ws="none",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(args.drain_timeout_s),
                server_header=False,
                backlog=ACCEPTS_A_TURN,
            )
        )
        garbage.settle()
        host, port = listener.getsockname()[:2]
        logger.info("serving %s on http://%s:%d", serving.model_name, host, port)
        watches = [_stop_with_engine(client, server), serving.metrics.watch_event_loop()]
        tasks = [asyncio.create_task(watch) for watch in watches]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        if client.died.is_set():
            logger.error("the engine process has ended: %s", client.reason)
            return STATUS_ENGINE_DIED
        return 0
    finally:
        await client.stop()


async def _stop_with_engine(client: EngineClient, server: uvicorn.Server) -> None:
    await client.died.wait()
    server.should_exit = True
