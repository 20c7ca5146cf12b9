"""Structured output: what a request's text must look like, and where in it the request stands.

    Grammar (a value, in SamplingParams) -> compiled once (grammar_compiler) -> GrammarState (one for each request)

A state says which tokens may come next, as one bit a token. It is filled by a thread as soon as the last token is
known, and read when the next step is written; it rides in the step, so whoever executes that needs no grammar.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from devices.pages import IntArray
from engine.errors import BadRequest
from engine.sampling.grammar_worker import MAX_WHITESPACE
from engine.text.template import require_text

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "structural_tag"]

MAX_GRAMMAR_BYTES = 128 << 10
MAX_SCHEMA_DEPTH = 64
"""Compilers recurse; so does what they make."""

FREE_CPU_S, CPU_S_PER_TOKEN = 1.0, 0.005
"""What a request may spend on its masks, which others wait for. Common schemas take 0.0001 a token; an ambiguous
grammar takes longer with each token of the text."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must be.

    Attributes:
        kind: "json_object" (any, `text` is empty), "json_schema" (no properties but those it names), "regex" (of the
            whole text), "ebnf" (GBNF with a rule `root`), "structural_tag" (xgrammar's JSON of parts).
        text: the schema as JSON, the expression, or the rules.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        """Raises BadRequest, of a field with the kind's name: too long, too deep, or no JSON."""
        if self.kind not in get_args(GrammarKind):
            raise BadRequest("grammar", self.kind, f"must be one of {', '.join(get_args(GrammarKind))}")
        num_bytes = len(require_text(self.kind, self.text).encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise BadRequest(self.kind, self.text, f"has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
        if self.kind in ("json_schema", "structural_tag"):
            _check_json(self.kind, self.text)
        elif not self.text and self.kind != "json_object":
            raise BadRequest(self.kind, self.text, "is empty")

    @classmethod
    def of_schema(cls, schema: Any) -> Grammar:
        """Of a JSON schema as text, object or boolean. Raises BadRequest."""
        return cls("json_schema", schema if isinstance(schema, str) else _json_of("json_schema", schema))

    @classmethod
    def of_structural_tag(cls, tag: Any) -> Grammar:
        """Of xgrammar's `{"type": "structural_tag", "format": ...}`, or the older form with `structures` and
        `triggers`, as text or object. Raises BadRequest."""
        if isinstance(tag, str):
            _check_json("structural_tag", tag)
            tag = json.loads(tag)
        if not isinstance(tag, dict) or not ("format" in tag or {"structures", "triggers"} <= tag.keys()):
            raise BadRequest("structural_tag", tag, "must be an object with format, or with structures and triggers")
        form = tag["format"] if "format" in tag else _triggered(tag["structures"], tag["triggers"])
        return cls("structural_tag", _json_of("structural_tag", {"type": "structural_tag", "format": form}))


def _triggered(structures: Any, triggers: Any) -> dict[str, Any]:
    """Free text in which each trigger begins one of the structures."""
    tags = []
    for one in structures if isinstance(structures, list) else (None,):
        if not isinstance(one, dict) or not {"begin", "schema", "end"} <= one.keys():
            raise BadRequest("structural_tag.structures", one, "must be a list of objects with begin, schema and end")
        content = {"type": "json_schema", "json_schema": one["schema"], "max_whitespace_cnt": MAX_WHITESPACE}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _json_of(kind: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise BadRequest(kind, "...", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None


def _check_json(kind: str, text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise BadRequest(kind, text, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    except ValueError as error:
        raise BadRequest(kind, text, f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise BadRequest(kind, text, "must be an object (or true)")
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > 2 * MAX_SCHEMA_DEPTH:  # a level of the schema is its object and the object of its properties
            raise BadRequest(kind, text, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        inside = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [child for values in inside if isinstance(values, list) for child in values]


class GrammarState:
    """Where one request stands in its grammar.

    Attributes:
        is_complete: the text is whole; the request ends.
        end_ids: tokens that end a whole text.
        problem: why it cannot go on, for people; empty while it can.
    """

    def __init__(
        self, compiled: CompiledGrammar, end_ids: frozenset[int], min_new_tokens: int, vocab_size: int, pool: Executor
    ) -> None:
        """
        Args:
            end_ids: may follow a whole text, and end it. Without any the text ends by itself.
            min_new_tokens: none of `end_ids` before so many tokens, unless nothing else is possible.
        """
        from xgrammar import GrammarMatcher

        self.is_complete = False
        self.problem = ""
        self._cpu_s = 0.0
        self.end_ids = end_ids
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._min_new_tokens = min_new_tokens
        self._num_words = -(-vocab_size // 32)
        self._pool = pool
        self._num_taken = 0
        self._matcher: GrammarMatcher = (
            GrammarMatcher(compiled, override_stop_tokens=sorted(end_ids))
            if end_ids
            else GrammarMatcher(compiled, terminate_without_stop_token=True)
        )
        self._next: Future[IntArray] = pool.submit(self._fill)

    def take(self, token_id: int) -> None:
        """Go on by a token of the output; look at `is_complete` and `problem` afterwards."""
        self._next.result()
        started = time.thread_time()
        if not self._matcher.accept_token(token_id):
            self.problem = "a token came that the grammar forbids"
        self._spent(time.thread_time() - started)
        self.is_complete = self._matcher.is_terminated()
        self._num_taken += 1
        if not self.problem and not self.is_complete:
            self._next = self._pool.submit(self._fill)

    def allowed(self, output_ids: IntArray) -> IntArray:
        """Which tokens may follow the output, int32 [words]: bit `i % 32` of word `i // 32` is token `i`.

        The state is replayed where the output is not the one that it has taken, in length.
        """
        if len(output_ids) != self._num_taken:
            self._next.result()
            self._matcher.reset()
            self._num_taken = 0
            for token_id in output_ids.tolist():
                self._next = cast("Future[IntArray]", Future())
                self._next.set_result(_NOTHING)
                self.take(token_id)
            if not len(output_ids):
                self._next = self._pool.submit(self._fill)
        return self._next.result()

    def _fill(self) -> IntArray:
        started = time.thread_time()
        words = np.zeros((1, self._num_words), dtype=np.int32)
        if not self._matcher.fill_next_token_bitmask(words):
            words[:] = -1
        allowed: IntArray = words[0]
        if self._num_taken < self._min_new_tokens and len(self._end_ids):
            others = allowed.copy()
            places = self._end_ids // 32
            np.bitwise_and.at(others, places, ~(np.int32(1) << (self._end_ids % 32).astype(np.int32)))
            allowed = others if others.any() else allowed
        if not allowed.any():
            self.problem = "no token continues the text by its grammar"
        self._spent(time.thread_time() - started)
        return allowed

    def _spent(self, cpu_s: float) -> None:
        self._cpu_s += cpu_s
        if self._cpu_s > FREE_CPU_S + CPU_S_PER_TOKEN * self._num_taken:
            self.problem = f"its grammar took {self._cpu_s:.1f} s for {self._num_taken} tokens; make it less ambiguous"


_NOTHING: IntArray = np.zeros(0, dtype=np.int32)
