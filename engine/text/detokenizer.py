"""From token ids back to text, exact while the text is still being written.

In byte-level and SentencePiece vocabularies a text is the concatenation of its tokens' bytes. `TokenTable` holds those
bytes, and a stream is then one dictionary look-up and one incremental UTF-8 decoder: a character is shown when its last
byte arrives, U+FFFD only when bytes can no longer become one. Tokenizers whose decoder is of another kind (WordPiece,
Metaspace) are decoded by their library over a small window. `stream.py` puts stop strings behind this.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from engine.text.tokenizer import Tokenizer

_SPACE_MARK = "\u2581"
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_CHAIN = ("Replace", "ByteFallback", "Fuse", "Strip")


@dataclass(frozen=True)
class TokenTable:
    """What each token adds to a running text.

    Attributes:
        bytes_of: raw bytes by token id; an id that the vocabulary lacks has no entry.
        concatenates: a text is exactly the concatenation of these bytes.
        strips_leading_space: a text loses one space at its start (SentencePiece's dummy prefix).
    """

    bytes_of: Mapping[int, bytes]
    concatenates: bool
    strips_leading_space: bool = False

    @classmethod
    def from_backend(cls, backend: Backend) -> TokenTable:
        """Read a `tokenizers` tokenizer: its vocabulary with added tokens, and the kind of its decoder."""
        steps = _decoder_steps(backend.decoder)
        kinds = tuple(step["type"] for step in steps)
        to_bytes: Callable[[str], bytes]
        if kinds == ("ByteLevel",):
            to_bytes, concatenates = _byte_level_bytes, True
        elif _is_sentencepiece(kinds, steps):
            to_bytes, concatenates = (_piece_bytes if "ByteFallback" in kinds else _spaced_bytes), True
        else:
            to_bytes, concatenates = str.encode, False
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        return cls(
            bytes_of={token_id: to_bytes(token) for token, token_id in vocabulary.items()},
            concatenates=concatenates,
            strips_leading_space=concatenates and "Strip" in kinds,
        )


class IncrementalDetokenizer:
    """The text of one request's tokens, piece by piece.

    All pushes and the flush joined are `tokenizer.decode` of all ids together, however the ids were cut into pushes.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        """
        Args:
            tokenizer: whose ids these are.
            skip_special_tokens: leave special tokens out of the text.
            prompt_ids: tokens whose text this one continues, so that its leading space stays. Leave it empty where
                the text stands for itself, as a chat reply does.
        """
        table = tokenizer.token_table
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        continued = next((i for i in reversed(prompt_ids) if i in table.bytes_of and i not in hidden), None)
        self._stream: _Stream
        if table.concatenates:
            strip = table.strips_leading_space and continued is None
            self._stream = _ByteStream(table.bytes_of, hidden, strip)
        else:

            def decode(ids: Sequence[int]) -> str:
                return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

            self._stream = _WindowStream(decode, table.bytes_of, hidden, continued)

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` finish. Ids the vocabulary lacks add nothing."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """The rest, at the end of the request; bytes that never became a character show as U+FFFD."""
        return self._stream.flush()


class _Stream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class _ByteStream:
    """Concatenated token bytes through a UTF-8 decoder that keeps an unfinished character to itself."""

    def __init__(self, bytes_of: Mapping[int, bytes], hidden: frozenset[int], strip: bool) -> None:
        self._bytes_of, self._hidden, self._strip = bytes_of, hidden, strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        bytes_of, hidden = self._bytes_of, self._hidden
        return self._decode(b"".join([bytes_of.get(i, b"") for i in ids if i not in hidden]), final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """Decodes [tokens shown last | new tokens] and keeps what lies behind the text of the first part.

    Exact for decoders that look at a token, its left neighbour and whether it is the first or the last: at least one
    token that is already shown always stands in front of the new ones.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        known: Mapping[int, bytes],
        hidden: frozenset[int],
        context: int | None,
    ) -> None:
        self._decode, self._known, self._hidden = decode, known, hidden
        self._window: list[int] = [] if context is None else [context]
        self._num_shown = len(self._window)

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(i for i in ids if i in self._known and i not in self._hidden)
        return self._advance(hold_unfinished=True)

    def flush(self) -> str:
        return self._advance(hold_unfinished=False)

    def _advance(self, *, hold_unfinished: bool) -> str:
        if self._num_shown == len(self._window):
            return ""
        shown, text = self._decode(self._window[: self._num_shown]), self._decode(self._window)
        if hold_unfinished and text.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return text[len(shown) :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _spaced_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _piece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _spaced_bytes(token)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences unfolded; what it pickles to is its JSON."""
    if decoder is None:
        return []

    def unfold(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        return [inner for part in step["decoders"] for inner in unfold(part)]

    return unfold(json.loads(decoder.__getstate__()))


def _is_sentencepiece(kinds: tuple[str, ...], steps: list[dict[str, Any]]) -> bool:
    """Is it `▁` to space, byte tokens to bytes, all in one string, at most one leading space off?"""
    by_kind = dict(zip(kinds, steps, strict=True))
    if not {"Replace", "Fuse"} <= by_kind.keys() or kinds != tuple(k for k in _SENTENCEPIECE_CHAIN if k in by_kind):
        return False
    replace, strip = by_kind["Replace"], by_kind.get("Strip")
    return (replace["pattern"], replace["content"]) == ({"String": _SPACE_MARK}, " ") and (
        strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
    )
