"""The API process's end: starts the engine process, and gives each request and call what comes back for it.

Everything runs in one event loop. When the engine process ends, for whatever reason, every open request and call gets
`EngineDied` at once, and `died` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.errors import BadRequest, ConfigError, RungError, SessionRefused
from engine.server.messages import (
    Abort,
    Accepted,
    Beat,
    Call,
    Failed,
    Progress,
    Ready,
    Refused,
    Reply,
    Start,
    Stop,
    ToEngine,
    Tokens,
    decode_from_engine,
    encode,
)

DEATH_POLL_S = 0.1
STOP_LIMIT_S = 10.0
ANSWERS_A_TURN = 16
"""How many answers go on in one turn of the event loop: a step's tokens for hundreds of them would hold it too long."""


class EngineDied(RungError):
    """The engine process is gone; the request is lost with it."""


class Answer:
    """One accepted request's messages.

    Attributes:
        prompt_tokens: with the session's history.
    """

    def __init__(self, client: EngineClient, request_id: str, num_choices: int) -> None:
        self.id = request_id
        self.prompt_tokens = 0
        self._client = client
        self._unfinished = num_choices
        self._queue: asyncio.Queue[Tokens | BadRequest | EngineDied | Accepted] = asyncio.Queue()

    def put(self, message: Tokens | BadRequest | EngineDied | Accepted) -> None:
        self._queue.put_nowait(message)

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises BadRequest, EngineDied."""
        message = await self._queue.get()
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, Accepted)
        self.prompt_tokens = message.prompt_tokens

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Until every answer has finished. Leaving early aborts the request."""
        try:
            while self._unfinished:
                message = await self._queue.get()
                if isinstance(message, Exception):
                    raise message
                assert isinstance(message, Tokens)
                self._unfinished -= message.finish is not None
                yield message
        finally:
            self._client.forget(self.id, abort=self._unfinished > 0)


class EngineClient:
    """Attributes:
    info: what the engine said when it was ready; empty before.
    beat: its latest sign of life, with the time it came.
    died: set when the process has ended; `reason` says why.
    """

    def __init__(self, config: EngineConfig, log_level: int) -> None:
        self.config = config
        self.info: dict[str, Any] = {}
        self.beat = Beat(0.0, {})
        self.beat_at_s = 0.0
        self.died = asyncio.Event()
        self.reason = ""
        self.is_stopping = False
        self._log_level = log_level
        self._folder = Path(tempfile.mkdtemp(prefix="rung-"))
        self._process: BaseProcess | None = None
        self._answers: dict[str, Answer] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = zmq.asyncio.Context()
        self._outgoing = zmq.Context(self._context).socket(zmq.PUSH)  # sending never waits
        self._outgoing.set_hwm(0)
        self._incoming = self._context.socket(zmq.PULL)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, limit_s: float) -> None:
        """Start the engine process and wait until it can serve, for so many seconds at most.

        Raises:
            ConfigError: an engine argument or the model is wrong, or it takes longer. EngineDied: it ended for
                another reason.
        """
        to_engine, from_engine = (f"ipc://{self._folder / name}" for name in ("in", "out"))
        self._outgoing.bind(to_engine)
        self._incoming.bind(from_engine)
        from engine.server.engine_process import run_engine

        spawn = multiprocessing.get_context("spawn")
        arguments = (self.config, to_engine, from_engine, self._log_level)
        self._process = spawn.Process(target=run_engine, args=arguments, name="rung-engine")
        self._process.start()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        done, _ = await asyncio.wait([self._ready], timeout=limit_s)
        if not done:
            raise ConfigError(
                f"start_timeout_s={limit_s:g} has passed and the engine process is not ready: it hangs, or the model "
                "takes longer to load; look at the log above, or give --start-timeout-s more"
            )
        self._ready.result()

    async def stop(self) -> None:
        """End the engine process and everything that waits for it."""
        self.is_stopping = True
        process = self._process
        if process is not None and process.is_alive():
            with contextlib.suppress(EngineDied):  # not connected yet: killed below
                self._send(Stop())
            deadline = time.monotonic() + (STOP_LIMIT_S if self._ready.done() else 0.0)
            while process.is_alive() and time.monotonic() < deadline:
                await asyncio.sleep(DEATH_POLL_S / 2)
            if process.is_alive():
                process.kill()
            process.join()
        for task in self._tasks:
            task.cancel()
        self._fail("the server is stopping")
        self._outgoing.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def submit(self, message: Start) -> Answer:
        """Queue a request. Raises BadRequest: it was refused. EngineDied."""
        answer = Answer(self, message.id, message.params.n)
        if message.id in self._answers:
            raise BadRequest("rid", message.id, "a request with this id is still running; choose another")
        self._check_alive()
        self._answers[message.id] = answer
        try:
            self._send(message)
            await answer.accepted()
        except BaseException:
            self.forget(message.id, abort=True)
            raise
        return answer

    def tell(self, name: str, **arguments: Any) -> None:
        """Send one of `Commands` and do not wait: what is sent later is taken later. A refusal is not heard."""
        if not self.died.is_set():
            with contextlib.suppress(EngineDied):
                self._send(Call(uuid.uuid4().hex, name, arguments))

    async def call(self, name: str, **arguments: Any) -> Any:
        """The result of one of `Commands`. Raises BadRequest: it was refused. EngineDied."""
        self._check_alive()
        call_id = uuid.uuid4().hex
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(call_id, name, arguments))
            return await future
        finally:
            del self._calls[call_id]

    def abort(self, request_id: str | None) -> None:
        """End a request, or all when None; unknown ids are no error."""
        if not self.died.is_set():
            with contextlib.suppress(EngineDied):
                self._send(Abort(request_id))

    def forget(self, request_id: str, *, abort: bool) -> None:
        """Nobody reads this request any longer."""
        if self._answers.pop(request_id, None) is not None and abort:
            self.abort(request_id)

    @property
    def num_open(self) -> int:
        """Requests that somebody waits for."""
        return len(self._answers)

    def _check_alive(self) -> None:
        if self.died.is_set():
            raise EngineDied(self.reason)

    def _send(self, message: ToEngine) -> None:
        """Raises BadRequest: JSON can hold it and a message cannot; EngineDied."""
        try:
            encoded = encode(message)
        except (UnicodeEncodeError, OverflowError) as error:
            rule = "has a text that is not valid Unicode, or a number beyond 64 bits"
            raise BadRequest("body", str(error), rule) from None
        try:
            self._outgoing.send(encoded, flags=zmq.DONTWAIT)
        except zmq.Again:  # nobody is at the other end: `_watch` will say so in a moment
            raise EngineDied("the engine process is not there") from None

    async def _receive(self) -> None:
        num_given = 0
        while True:
            message = decode_from_engine(await self._incoming.recv())
            news = message.answers if isinstance(message, Progress) else [message]
            for one in news:
                self._take(one)
                num_given += 1
                if num_given % ANSWERS_A_TURN == 0:
                    await asyncio.sleep(0)

    def _take(self, message: Any) -> None:
        if isinstance(message, Tokens | Accepted):
            answer = self._answers.get(message.id)
            if answer is not None:
                answer.put(message)
        elif isinstance(message, Beat):
            self.beat, self.beat_at_s = message, time.monotonic()
        elif isinstance(message, Refused):
            self._refuse(message)
        elif isinstance(message, Reply):
            future = self._calls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message.value)
        elif isinstance(message, Ready):
            self.info, self.beat_at_s = message.info, time.monotonic()
            self._ready.set_result(None)
        else:
            assert isinstance(message, Failed)
            self.reason = message.message
            if not self._ready.done():
                error = ConfigError(message.message) if message.is_config else EngineDied(message.message)
                self._ready.set_exception(error)

    def _refuse(self, message: Refused) -> None:
        error = BadRequest(message.field, Shown(message.value), message.rule)
        if message.kind:
            error = SessionRefused(message.field, Shown(message.value), message.rule, message.kind)
        if message.id in self._answers:
            self._answers[message.id].put(error)
        future = self._calls.get(message.id)
        if future is not None and not future.done():
            future.set_exception(error)

    async def _watch(self) -> None:
        """Notice the process's end, and let the messages that it sent before arrive."""
        assert self._process is not None
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        await asyncio.sleep(DEATH_POLL_S)
        code = self._process.exitcode
        self._fail(self.reason or f"the engine process ended with status {code}")

    def _fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.died.set()
        error = EngineDied(reason)
        for answer in self._answers.values():
            answer.put(error)
        for future in [*self._calls.values(), self._ready]:
            if not future.done():
                future.set_exception(error)


class Shown(str):
    """A value that the engine has written out already: it is shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)
