"""What every request must say, from its prompt alone, without any code of engine, cache or device.

The hash is the null device's, written a second time: position and index are the same number here, since a row that is
read right has token `i` at place `i`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

MASK = 2**64 - 1
INDEX_AND_POSITION = 0x9E3779B97F4A7C15 + 0xC2B2AE3D27D4EB4F
INDEX = 0x9E3779B97F4A7C15
TOKEN = 0x165667B19E3779F9
WINDOW = 0x94D049BB133111EB
MIX = 0xBF58476D1CE4E5B9
SEED = 0x2545F4914F6CDD1D

MANY = 16
"""So many tokens are hashed faster as an array."""


def extended_hash(start: int, first: int, tokens: Sequence[int], weights_version: int) -> int:
    """The hash of a text of `first` tokens, `start`, with more tokens behind it."""
    if len(tokens) >= MANY:
        return _extended_by_many(start, first, tokens, weights_version)
    total = start
    for position, token in enumerate(tokens, start=first):
        x = (position * INDEX_AND_POSITION + (token + (weights_version << 32)) * TOKEN) & MASK
        x ^= x >> 29
        x = x * MIX & MASK
        total += x ^ x >> 32
    return total & MASK


def _extended_by_many(start: int, first: int, tokens: Sequence[int], weights_version: int) -> int:
    """The same, by arrays."""
    position = np.arange(first, first + len(tokens), dtype=np.uint64)
    token = np.array(tokens, dtype=np.uint64) + np.uint64(weights_version << 32)
    x = position * np.uint64(INDEX_AND_POSITION & MASK) + token * np.uint64(TOKEN)
    x ^= x >> np.uint64(29)
    x *= np.uint64(MIX)
    return (start + int((x ^ x >> np.uint64(32)).sum())) & MASK


def text_hash(full: int, window: int | None, tokens: Sequence[int], length: int, weights_version: int) -> int:
    """What the token behind the first `length` of these depends on.

    Args:
        full: hash of the text.
        window: tokens that layers with a window read; None: there are none.
    """
    if window is None:
        return full
    lo = max(0, length - window)
    return (full + extended_hash(0, lo, tokens[lo:length], weights_version) * WINDOW) & MASK


def next_token(text_hash: int, length: int, seed: int | None, vocab_size: int) -> int:
    """The token behind a text of `length` tokens; `seed` is None for greedy."""
    salt = 0 if seed is None else seed * SEED + length
    x = (text_hash + salt * INDEX) & MASK
    x ^= x >> 30
    x = x * MIX & MASK
    return (x ^ x >> 31) % vocab_size


def score(text_hash: int, token: int) -> float:
    """The logprob of a token behind a text."""
    return -float((((text_hash ^ (token * TOKEN)) * MIX) & MASK) >> 40) / 1048576.0


def continuation(
    prompt: Sequence[int],
    num_new: int,
    seed: int | None,
    weights_version: int,
    vocab: int,
    stop_ids: Collection[int] = (),
    window: int | None = None,
) -> list[int]:
    """The `num_new` tokens that follow a prompt; a stop id is the last one. `window`: see `text_hash`."""
    full, first = extended_hash(0, 0, prompt, weights_version), len(prompt)
    text = list(prompt)
    while len(text) - first < num_new and not (len(text) > first and text[-1] in stop_ids):
        length = len(text)
        token = next_token(text_hash(full, window, text, length, weights_version), length, seed, vocab)
        text.append(token)
        full = extended_hash(full, length, (token,), weights_version)
    return text[first:]


@dataclass(slots=True)
class Cursor:
    """How much of one text is known already: `length` tokens, whole pages, with their hash."""

    length: int = 0
    text_hash: int = 0


@dataclass(slots=True)
class KnownPrefixes:
    """Which prefixes somebody has computed, by everything that decides their KV: what a cache may know at most.

    Prefixes are whole pages, and known by their hash.

    Attributes:
        has_gaps: a longer prefix may be known where a shorter one is not.
    """

    page_size: int
    has_gaps: bool = False
    _known: dict[object, set[int]] = field(default_factory=dict)

    def add(self, key: object, tokens: Sequence[int], cursor: Cursor) -> None:
        """The text's whole-page prefixes behind `cursor`, which moves to the last."""
        known = self._known.setdefault(key, set())
        while cursor.length + self.page_size <= len(tokens):
            page = tokens[cursor.length : cursor.length + self.page_size]
            cursor.text_hash = extended_hash(cursor.text_hash, cursor.length, page, 0)
            cursor.length += self.page_size
            known.add(cursor.text_hash)

    def has(self, key: object, prefix: Sequence[int]) -> bool:
        return not len(prefix) or extended_hash(0, 0, prefix, 0) in self._known.get(key, ())

    def add_one(self, key: object, prefix: Sequence[int]) -> None:
        """This prefix of whole pages, and no shorter one."""
        self._known.setdefault(key, set()).add(extended_hash(0, 0, prefix, 0))

    def longest(self, key: object, tokens: Sequence[int]) -> int:
        """Tokens of the longest known prefix."""
        known, prefix_hash, length, longest = self._known.get(key, ()), 0, 0, 0
        while known and length + self.page_size <= len(tokens):
            page = tokens[length : length + self.page_size]
            prefix_hash = extended_hash(prefix_hash, length, page, 0)
            length += self.page_size
            if prefix_hash in known:
                longest = length
            elif not self.has_gaps:
                break
        return longest

    def clear(self) -> None:
        self._known.clear()
