"""Compiles grammars for an engine, in a process of its own that is killed when it takes too long.

The first grammar starts that process, which takes seconds; it stays. Compiled grammars are kept, the latest ones.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import BadRequest
from engine.sampling import grammar_worker
from engine.sampling.grammar import Grammar, GrammarState
from engine.sampling.grammar_worker import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

TIME_LIMIT_S = 10.0
START_LIMIT_S = 120.0
MAX_COMPILED_BYTES = 64 << 20
MAX_KEPT = 128
NUM_FILLERS = 2


class GrammarCompiler:
    """Grammars of one vocabulary. Thread-safe.

    Attributes:
        time_limit_s: of one grammar, not counting those before it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, time_limit_s: float = TIME_LIMIT_S) -> None:
        """`vocabulary`: called once, by the first grammar. Raises BadRequest: no grammar can be had with it."""
        self.time_limit_s = time_limit_s
        self._make_vocabulary = vocabulary
        self._info: Any = None
        self._vocabulary: Vocabulary | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._queue = ThreadPoolExecutor(1, "rung-grammar")
        self._fillers = ThreadPoolExecutor(NUM_FILLERS, "rung-mask")

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begin, where it was not compiled before. The result, or BadRequest with the compiler's reason."""
        with self._lock:
            future = self._kept.get(grammar)
            if future is None:
                future = self._kept[grammar] = self._queue.submit(self._compile, grammar)
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
        future.add_done_callback(lambda done: self._forget_failed(grammar, done))
        return future

    def state(self, grammar: Grammar, end_ids: frozenset[int], min_new_tokens: int) -> GrammarState:
        """A request's beginning; waits for the compiler. Raises BadRequest."""
        compiled = self.compile(grammar).result()
        assert self._vocabulary is not None
        return GrammarState(compiled, end_ids, min_new_tokens, len(self._vocabulary.tokens), self._fillers)

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            _end(worker)

    def _forget_failed(self, grammar: Grammar, done: Future[CompiledGrammar]) -> None:
        with self._lock:
            if done.exception() is not None and self._kept.get(grammar) is done:
                del self._kept[grammar]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if importlib.util.find_spec("xgrammar") is None:
            rule = "structured output needs xgrammar; pip install 'rung[serve]'"
            raise BadRequest(grammar.kind, grammar.text, rule)
        if self._worker is None or self._worker.poll() is not None:
            self._start(grammar)
        worker = self._worker
        assert worker is not None
        answer = _ask(worker, [grammar.kind, grammar.text], self.time_limit_s)
        if answer is None:
            self.close()
            rule = f"took more than {self.time_limit_s:g} s or 2 GiB to compile; make it simpler"
            raise BadRequest(grammar.kind, grammar.text, rule)
        data, reason = answer
        if data is None:
            raise BadRequest(grammar.kind, grammar.text, f"cannot be used: {reason}")
        if len(data) > MAX_COMPILED_BYTES:
            rule = f"becomes {len(data)} bytes, at most {MAX_COMPILED_BYTES} are allowed; make it simpler"
            raise BadRequest(grammar.kind, grammar.text, rule)
        from xgrammar import CompiledGrammar

        return CompiledGrammar.deserialize_json(data.decode(), self._info)

    def _start(self, grammar: Grammar) -> None:
        if self._info is None:
            self._vocabulary = self._make_vocabulary()
            self._info = grammar_worker.tokenizer_info(self._vocabulary)
        self.close()
        command = [sys.executable, "-P", str(Path(grammar_worker.__file__))]
        self._worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if _ask(self._worker, self._vocabulary, START_LIMIT_S) is None:
            raise BadRequest(grammar.kind, grammar.text, "the grammar compiler does not start; see the server's log")


def _ask(worker: subprocess.Popen[bytes], message: Any, limit_s: float) -> Any:
    """Its answer; None when it took too long, which ends it, or crashed."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    timer = threading.Timer(limit_s, worker.kill)
    timer.daemon = True
    timer.start()
    try:
        grammar_worker.write(worker.stdin, message)
        return grammar_worker.read(worker.stdout)
    except (OSError, EOFError):
        return None
    finally:
        timer.cancel()


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()
