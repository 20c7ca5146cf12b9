"""What /v1/responses keeps: answers by their id, and the sessions on which conversations go on.

    line (a session)   resp_1 ---- resp_2 ---- resp_3 = tip        a response names a point of a conversation
    line (its fork)                   `------- resp_4 = tip

A response knows its tokens and its predecessor, so a conversation can always be computed again; a session only makes
going on cheap, and may be closed at any time. Everything is bounded: a count, an age, and bytes of what is shown.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from devices.pages import IntArray
from engine.server.response_types import Message

MAX_STORED_BYTES = 256 << 20


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(eq=False, slots=True)
class Line:
    """A session of the engine and the responses that it has gone through.

    Attributes:
        name: the session's, for its owner; `engine_name`: in the engine.
        namespace: extra key and salt of its prefixes.
        tip: the response at which its history ends.
        is_busy: a turn is under way.
        num_stored: kept responses that belong to it.
    """

    name: str
    engine_name: str
    namespace: tuple[str | None, str | None]
    tip: StoredResponse | None = None
    is_busy: bool = False
    num_stored: int = 0


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A point of a conversation.

    Attributes:
        body: the response as clients see it; `input_items` what it answered.
        messages: what it added to the conversation, the answer last.
        keep, ids: its history is the first `keep` tokens of its predecessor's, then `ids`, int32.
        text_len, text_digest: of the history's text as the template wrote it, where the tokens are exactly that.
    """

    owner: str
    body: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[Message]
    previous: StoredResponse | None
    keep: int
    ids: IntArray
    text_len: int = 0
    text_digest: bytes = b""
    line: Line | None = None
    stored_s: float = 0.0
    num_bytes: int = field(default=0)

    @property
    def id(self) -> str:
        name: str = self.body["id"]
        return name

    def conversation(self) -> list[Message]:
        """All messages up to and with this answer."""
        parts: list[list[Message]] = []
        node: StoredResponse | None = self
        while node is not None:
            parts.append(node.messages)
            node = node.previous
        return [message for part in reversed(parts) for message in part]

    def history(self) -> IntArray:
        """Its tokens, int32 [n]."""
        parts: list[IntArray] = []
        node: StoredResponse | None = self
        wanted: int | None = None  # how much of the node's history is wanted; None is all
        while node is not None and wanted != 0:
            own = node.ids if wanted is None else node.ids[: max(0, wanted - node.keep)]
            parts.append(own)
            wanted = node.keep if wanted is None else min(wanted, node.keep)
            node = node.previous
        return np.concatenate(parts[::-1])

    def is_spelled(self, text: str) -> bool:
        """Whether `text` begins with the text of exactly this history."""
        return bool(self.text_len) and digest_of(text[: self.text_len]) == self.text_digest


class ResponseStore:
    """Least recently stored goes first. `close_session` is told the name of a session that nobody needs."""

    def __init__(
        self,
        *,
        max_responses: int,
        ttl_s: float,
        max_lines: int,
        close_session: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._ttl_s = ttl_s
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._close_session = close_session
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lines: OrderedDict[str, Line] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        self._expire()
        return len(self._responses)

    @property
    def num_lines(self) -> int:
        """Sessions that are open for responses."""
        return len(self._lines)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """None when it was never stored, has gone, or is somebody else's."""
        self._expire()
        found = self._responses.get(response_id)
        return found if found is not None and found.owner == owner else None

    def put(self, response: StoredResponse) -> None:
        """Keep a response; the oldest go when there are too many."""
        response.stored_s = self._clock()
        response.num_bytes = len(json.dumps([response.body, response.input_items])) + response.ids.nbytes
        self._responses[response.id] = response
        self._num_bytes += response.num_bytes
        if response.line is not None:
            response.line.num_stored += 1
        self._expire()
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.delete(next(iter(self._responses.values())))

    def delete(self, response: StoredResponse) -> None:
        """Forget a response; what continued it goes on."""
        del self._responses[response.id]
        self._num_bytes -= response.num_bytes
        response.body, response.input_items = {}, []
        line, response.line = response.line, None
        if line is not None:
            line.num_stored -= 1
            self.release(line, is_busy=line.is_busy)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._responses and (first := next(iter(self._responses.values()))).stored_s < oldest_s:
            self.delete(first)

    # Lines.

    def add_line(self, line: Line) -> None:
        """A session was opened for a turn; the line that rested longest is closed when there are too many."""
        self._lines[line.name] = line
        line.is_busy = True
        if len(self._lines) > self._max_lines:
            idle = next((one for one in self._lines.values() if not one.is_busy), None)
            if idle is not None:
                self._close(idle)

    def borrow(self, line: Line) -> None:
        """A turn begins."""
        line.is_busy = True
        self._lines.move_to_end(line.name)

    def release(self, line: Line, *, is_busy: bool = False) -> None:
        """A turn has ended, or a response has gone: a line without responses is closed."""
        line.is_busy = is_busy
        if not is_busy and not line.num_stored and line.name in self._lines:
            self._close(line)

    def is_open(self, line: Line | None) -> bool:
        return line is not None and line.name in self._lines

    def _close(self, line: Line) -> None:
        del self._lines[line.name]
        self._close_session(line.engine_name)
