"""The text of one running request: token ids in, showable text out, one decision about stop strings.

Detokenizer and stop strings in a row, so that every user (engine, beam, speculation, diffusion) cuts ids, text and KV
at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StopStrings

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


class TextStream:
    """Shows a request's text as it becomes certain, and says which token completed a stop string.

    Attributes:
        matched_at: index, in the ids of the push that found it, of the token that completed the stop string; the
            request keeps the ids up to and including it. None without a match, and for one that only `finish` found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Arguments as those of `IncrementalDetokenizer` and `StopStrings`."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids
        )
        self._stops = StopStrings(stops, include_stop=include_stop) if stops else None
        self._shown: list[str] = []
        self.matched_at: int | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched if self._stops else None

    @property
    def text(self) -> str:
        """All text shown so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, ids: Sequence[int]) -> str:
        """Text that can be shown after these tokens; nothing once a stop string matched."""
        if self._stops is None:
            return self._show(self._detokenizer.push(ids))
        delta = ""
        if self.matched_at is None:
            for index, token_id in enumerate(ids):
                delta += self._stops.feed(self._detokenizer.push((token_id,)))
                if self._stops.matched is not None:
                    self.matched_at = index
                    break
        return self._show(delta)

    def finish(self) -> str:
        """The rest, when the request ends: unfinished bytes and held text; nothing after a match."""
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest = self._stops.feed(rest) + self._stops.finish()
        return self._show(rest)

    def _show(self, delta: str) -> str:
        if delta:
            self._shown.append(delta)
        return delta
