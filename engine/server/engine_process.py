"""The engine process: messages in, steps, messages out. One thread steps; a second one says that the process lives.

    poll messages -> queue, abort, call -> one step -> tokens of every request that moved -> poll ...

It ends when told, when its parent is gone, or when a step raises: the reason goes out first, and every open request is
lost with it, which the API process tells its clients.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing import parent_process
from typing import Any

import numpy as np
import zmq

from engine.assembly import Assembly, assemble
from engine.config import EngineConfig
from engine.errors import BadRequest, RungError, SessionRefused, session_rules
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.server import garbage
from engine.server.commands import Commands
from engine.server.messages import (
    Abort,
    Accepted,
    Beat,
    Call,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Reply,
    Start,
    Stop,
    ToEngine,
    Tokens,
    decode_to_engine,
    encode,
)
from engine.text.stream import TextStream

logger = logging.getLogger("rung")

BEAT_S = 0.5
IDLE_POLL_MS = 200
COMPILING_POLL_MS = 2


def run_engine(config: EngineConfig, inbox: str, outbox: str, log_level: int) -> None:
    """Entry point of the process. `inbox`, `outbox`: ZeroMQ addresses that the API process has bound."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both; the API process decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    outgoing = context.socket(zmq.PUSH)
    outgoing.set_hwm(0)
    outgoing.connect(outbox)
    incoming = context.socket(zmq.PULL)
    incoming.connect(inbox)
    _end_with_parent()
    try:
        engine = EngineLoop(assemble(config), incoming, outgoing)
        engine.warm_up()
        garbage.settle()
    except RungError as error:
        outgoing.send(encode(Failed(str(error), is_config=True)))
    except Exception:
        outgoing.send(encode(Failed(traceback.format_exc(), is_config=False)))
    else:
        engine.run()
    outgoing.close(linger=2000)
    incoming.close(linger=0)
    context.term()


def _end_with_parent() -> None:
    """Leave no orphan: a thread waits for the parent's end."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


class _Sent:
    """A request, and how much of it was sent."""

    __slots__ = ("choice", "num_logprobs", "num_tokens", "request", "request_id")

    def __init__(self, request: Request, request_id: str, choice: int) -> None:
        self.request, self.request_id, self.choice = request, request_id, choice
        self.num_tokens = self.num_logprobs = 0


class EngineLoop:
    """Owns the core and the two sockets."""

    def __init__(self, parts: Assembly, incoming: zmq.Socket[bytes], outgoing: zmq.Socket[bytes]) -> None:
        self.core = parts.core
        self.parts = parts
        self._incoming = incoming
        self._outgoing = outgoing
        self._send_lock = threading.Lock()
        self._open: dict[str, _Sent] = {}  # by the core's request id
        self._step_since = 0.0
        self._is_stopping = False
        self._compiling: list[tuple[Start, Future[Any]]] = []
        self._stats = self.stats()
        self.commands = Commands(self)

    def warm_up(self) -> None:
        """Run a prefill and a decode step, so that the first client does not pay for lazily made things."""
        params = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
        self.core.add(np.zeros(2, dtype=np.int32), params)
        while self.core.has_work:
            self.core.step()
        self.core.flush_cache()

    def run(self) -> None:
        """Until told to stop, or until a step raises."""
        self._send(Ready(self.commands.info()))
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while not self._is_stopping:
                self._take_messages()
                if self.core.has_work and not self.commands.is_paused:
                    self._step()
        except Exception:
            self._send(Failed(traceback.format_exc(), is_config=False))
        if self.core.grammars is not None:
            self.core.grammars.close()

    def _step(self) -> None:
        self._step_since = time.monotonic()
        changed = self.core.step()
        self._step_since = 0.0
        self._send_progress(changed)
        self._stats = self.stats()

    def stats(self) -> dict[str, int]:
        """The core's, and requests whose grammar is being compiled."""
        return {**self.core.stats(), "num_compiling": len(self._compiling)}

    def _beat(self) -> None:
        while not self._is_stopping:
            since = self._step_since
            self._send(Beat(time.monotonic() - since if since else 0.0, self._stats))
            time.sleep(BEAT_S)

    def _send(self, message: FromEngine) -> None:
        with self._send_lock:
            self._outgoing.send(encode(message))

    def _take_messages(self) -> None:
        """Everything that has arrived; waits a little when there is nothing else to do."""
        is_busy = self.core.has_work and not self.commands.is_paused
        timeout = 0 if is_busy else COMPILING_POLL_MS if self._compiling else IDLE_POLL_MS
        self._start_compiled()
        while self._incoming.poll(timeout):
            self._take(decode_to_engine(self._incoming.recv()))
            timeout = 0
        if not is_busy:
            self.core.sessions.expire()
            self._stats = self.stats()  # no step will say what an abort, a flush or a closed session has changed

    def _take(self, message: ToEngine) -> None:
        try:
            if isinstance(message, Start):
                self._start_or_compile(message)
            elif isinstance(message, Abort):
                self.abort(message.id)
            elif isinstance(message, Call):
                command: Callable[..., Any] = self.commands.named(message.name)
                with session_rules():
                    value = command(**message.arguments)
                self._send(Reply(message.id, value))
            else:
                assert isinstance(message, Stop)
                self._is_stopping = True
        except BadRequest as error:
            assert isinstance(message, Start | Call)
            self._refuse(message.id, error)

    def _refuse(self, message_id: str, error: BadRequest) -> None:
        kind = error.kind if isinstance(error, SessionRefused) else ""
        self._send(Refused(message_id, error.field, ascii(error.value)[:200], error.rule, kind))

    def _start_or_compile(self, message: Start) -> None:
        """A request whose grammar is not compiled waits for that beside the queue; nobody waits for it."""
        grammar, grammars = message.params.grammar, self.core.grammars
        if grammar is None or grammars is None:
            self._start(message)
        else:
            self._compiling.append((message, grammars.compile(grammar)))
            self._start_compiled()

    def _start_compiled(self) -> None:
        for waiting in [waiting for waiting in self._compiling if waiting[1].done()]:
            self._compiling.remove(waiting)
            message, compiled = waiting
            try:
                compiled.result()
                self._start(message)
            except BadRequest as error:
                self._refuse(message.id, error)
            except Exception:  # whatever goes wrong with a stranger's grammar is about this request
                logger.exception("a grammar")
                self._refuse(
                    message.id, BadRequest("grammar", "", "cannot be compiled; the server's log has the reason")
                )

    def _start(self, message: Start) -> None:
        ids = np.frombuffer(message.prompt_ids, dtype="<i4").astype(np.int32)
        params, where = message.params, message.session
        texts = [self._watched(params) for _ in range(params.n)]
        if where is None:
            requests = self.core.add(
                ids,
                params,
                request_id=message.id,
                texts=texts,
                priority=message.priority,
                extra_key=message.extra_key,
                cache_salt=message.cache_salt,
            )
        else:
            with session_rules():
                branching = self.core.sessions.get_branching(where.id)
                if branching is None:
                    where.check_streaming()
            if branching is not None:
                requests = self.core.add_branch(
                    where, ids, params, request_id=message.id, texts=texts, priority=message.priority
                )
            else:
                turn = self.core.add_turn(
                    where.id,
                    ids,
                    params,
                    keep=message.keep,
                    request_id=message.id,
                    text=texts[0],
                    priority=message.priority,
                )
                requests = [turn]
        self._send(Accepted(message.id, requests[0].prompt_len))
        for choice, request in enumerate(requests):
            self._open[request.id] = _Sent(request, message.id, choice)

    def _watched(self, params: SamplingParams) -> TextStream | None:
        """What finds stop strings; the API process makes text for itself."""
        if not params.stop:
            return None
        tokenizer = self.parts.tokenizer
        return TextStream(tokenizer, tuple(params.stop), skip_special_tokens=params.skip_special_tokens)

    def abort(self, request_id: str | None) -> None:
        """End a request with all its answers, or every request."""
        for sent in [sent for sent in self._open.values() if request_id is None or sent.request_id == request_id]:
            self.core.abort(sent.request.id)
        for waiting in [waiting for waiting in self._compiling if request_id in (None, waiting[0].id)]:
            self._compiling.remove(waiting)
            self._refuse(waiting[0].id, BadRequest("rid", waiting[0].id, "was aborted before it began"))
        self.send_ends()

    def send_ends(self) -> None:
        """Send the end of requests that ended between two steps."""
        self._send_progress([sent.request for sent in self._open.values() if sent.request.finish is not None])

    def _send_progress(self, requests: Iterable[Request]) -> None:
        """Send what is new of them, in one message."""
        answers = [self._news_of(request, self._open[request.id]) for request in requests if request.id in self._open]
        if answers:
            self._send(Progress(answers))

    def _news_of(self, request: Request, sent: _Sent) -> Tokens:
        """What was not sent yet of a request; one that has finished is closed by it."""
        ids, scores, finish = request.output_ids, request.scores, request.finish
        new_logprobs = []
        if scores is not None and request.params.return_logprob:
            new_logprobs = scores.output[sent.num_logprobs :]
        message = Tokens(sent.request_id, sent.choice, ids[sent.num_tokens :], new_logprobs)
        if finish is not None:
            del self._open[request.id]
            timings = request.timings
            prompt_logprobs = scores.prompt if scores is not None and request.params.logprob_start_len >= 0 else None
            message = Tokens(
                *(sent.request_id, sent.choice, ids[sent.num_tokens :], new_logprobs, prompt_logprobs, finish),
                prompt_tokens=request.prompt_len,
                cached_tokens=request.cached_tokens or 0,
                lost_to_alignment=request.lost_to_alignment,
                queue_s=max(0.0, timings.scheduled_s - timings.arrival_s),
                ttft_s=max(0.0, timings.first_token_s - timings.arrival_s),
            )
        sent.num_tokens, sent.num_logprobs = len(ids), sent.num_logprobs + len(new_logprobs)
        return message
