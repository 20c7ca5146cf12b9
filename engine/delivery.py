"""Hands each caller what is new of its own requests, while whoever waits drives the engine.

Several callers may hold iterators over one engine: each step's pieces are kept for the one they belong to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.core import EngineCore
from engine.outputs import GenerationResult, StreamPiece, result_of
from engine.request import Request
from engine.text.stream import TextStream


@dataclass(slots=True)
class Live:
    """A request of a caller, and how much of it the caller has seen."""

    request: Request
    index: int
    choice: int
    text: TextStream
    streams: bool
    pieces: deque[StreamPiece] = field(default_factory=deque)
    num_seen_tokens: int = 0
    num_seen_chars: int = 0


class Delivery:
    """The requests that somebody waits for."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._live: dict[str, Live] = {}

    def add(
        self, requests: Sequence[Request], texts: Sequence[TextStream], *, index: int = 0, streams: bool
    ) -> list[Live]:
        """The answers to the caller's prompt `index`, queued; `stream` or `collect` must follow."""
        answers = enumerate(zip(requests, texts, strict=True))
        live = [Live(request, index, choice, text, streams) for choice, (request, text) in answers]
        self._live |= {one.request.id: one for one in live}
        return live

    def drop(self, live: Sequence[Live]) -> None:
        """Nobody waits any longer: what is not finished is aborted."""
        for one in live:
            self._live.pop(one.request.id, None)
            self._core.abort(one.request.id)

    def collect(self, live: list[Live], num_prompts: int) -> list[GenerationResult]:
        """Run requests to their end; one result for each prompt."""
        answers: list[list[GenerationResult]] = [[] for _ in range(num_prompts)]
        for piece in sorted(self._stream(live), key=lambda piece: piece.choice):
            if piece.result is not None:
                answers[piece.index].append(piece.result)
        return [replace(first, alternatives=tuple(others)) for first, *others in answers]

    def stream(self, live: list[Live]) -> Iterator[StreamPiece]:
        """A stream that aborts its requests when it is closed or dropped, also before its first piece was taken."""
        pieces = self._stream(live)
        next(pieces)
        return pieces

    def _stream(self, live: list[Live]) -> Iterator[StreamPiece]:
        """Step the engine until these requests are done; other callers' pieces are kept for them.

        The first piece is empty: who took it has entered, and closing the iterator aborts the requests from then on.
        """
        unfinished = {one.request.id: one for one in live}
        try:
            yield StreamPiece(0, 0, "", [])
            while unfinished:
                for one in list(unfinished.values()):
                    while one.pieces:
                        piece = one.pieces.popleft()
                        if piece.result is not None:
                            del unfinished[one.request.id]
                        yield piece
                if unfinished:
                    self._step(unfinished)
        finally:
            self.drop(live)

    def _step(self, waiting: Mapping[str, Live]) -> None:
        for request in self._core.step():
            one = self._live.get(request.id)
            if one is not None and (one.streams or request.finish is not None):
                one.pieces.append(self._piece(one))
        for one in waiting.values():  # aborted from outside: no step will ever name it again
            if one.request.finish is not None and not one.pieces:
                one.pieces.append(self._piece(one))

    def _piece(self, one: Live) -> StreamPiece:
        """What is new of a request; its text is completed when it is finished."""
        request, finish = one.request, one.request.finish
        ids = request.output_ids
        if finish is not None:
            if request.text is None:
                one.text.push(ids[:-1] if isinstance(finish.matched, int) else ids)
            one.text.finish()
        text = one.text.text
        piece = StreamPiece(
            one.index,
            one.choice,
            text[one.num_seen_chars :],
            ids[one.num_seen_tokens :],
            result_of(request, text) if finish is not None else None,
        )
        one.num_seen_chars, one.num_seen_tokens = len(text), len(ids)
        return piece
