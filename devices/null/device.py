"""Memory without arithmetic: a slot holds which token at which position was written there, and nothing else.

The "forward" of a row is a hash of all pairs that are read through its page table over `[0, seq)`, so an aliased, a
stale, a freed or a wrongly clamped page gives another token than the row's own tokens would. A family with a window is
memory of its own, read through its own page table over the window only, and the token depends on both hashes. A page is
spoiled when it becomes free. The registry does not know this device: it has no attention, nothing but a simulation can
use it.

Rows are short and a simulation reads them very often, so everything here is lists and Python's integers, of which a
page remembers what it adds to the hash. That is forgotten with every change of its content and holds for one place in
a row only, so it is never more than a shortcut to the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from devices.base import Capabilities, ResumeUnit
from devices.page_pool import PADDING_PAGE
from devices.pages import page_spans, page_split

SPOILED = -1
"""Position and token of a slot of a free page; no row's own."""

WEIGHTS_SHIFT = 32
"""A pair's token carries the version of the weights that computed it in its high half."""

INDEX_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xC2B2AE3D27D4EB4F
TOKEN_FACTOR = 0x165667B19E3779F9
MIX_FACTOR = 0xBF58476D1CE4E5B9
WINDOW_FACTOR = 0x94D049BB133111EB
"""Odd constants of well-known hashes (xxHash, SplitMix64); the oracle computes the same on its own."""

PAIR_FACTORS = np.array([POSITION_FACTOR, TOKEN_FACTOR], dtype=np.uint64)
MIX, SHIFT_29, SHIFT_32 = np.uint64(MIX_FACTOR), np.uint64(29), np.uint64(32)
ALL_64_BITS = 2**64 - 1

FEW = 12
"""So many pairs are hashed faster one by one than as an array."""

NOWHERE = -1

Pair = tuple[int, int]
"""Position and token of a slot."""


def null_capabilities(page_size: int, *, resume_unit: ResumeUnit = "token", overlap: bool = False) -> Capabilities:
    """What the device pretends to be; every switch that the code above asks for."""
    return Capabilities(
        page_sizes=(page_size,),
        default_page_size=page_size,
        resume_unit=resume_unit,
        slot_dtype="int64",
        table_dtype="int32",
        masks=frozenset({"causal"}),
        overlap=overlap,
    )


def window_text_hash(full: int, window: int) -> int:
    """What a token depends on when some layers read everything and others a window."""
    return full + window * WINDOW_FACTOR & ALL_64_BITS


class NullKv:
    """KV of `num_pages` pages of one family and the padding page. A table is the page ids of one row, in order.

    Attributes:
        weights_version: what the pairs of the next write carry.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.weights_version = 0
        self._page_size = page_size
        self._spoiled_page: list[Pair] = [(SPOILED, SPOILED)] * page_size
        self._pairs = [self._spoiled_page.copy() for _ in range(num_pages + 1)]
        # Of each page: hashes of its first 1, 2, ... slots where it is the `_place`-th page of a row.
        self._sums: list[list[int]] = [[] for _ in self._pairs]
        self._place = [NOWHERE] * len(self._pairs)
        # Of each page: hash of all its slots where it is the `_whole_place`-th page of a row.
        self._whole = [0] * len(self._pairs)
        self._whole_place = [NOWHERE] * len(self._pairs)
        self._places = list(range(len(self._pairs)))

    def write(self, table: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        """Put the tokens of positions `[start, start + len(token_ids))` of a row into their slots."""
        version = self.weights_version << WEIGHTS_SHIFT
        done = 0
        for place, lo, hi in page_spans(start, start + len(token_ids), self._page_size):
            page, first, end = table[place], done, done + hi - lo
            done = end
            if page == PADDING_PAGE:
                continue  # what is written there is lost
            positions = range(start + first, start + end)
            self._pairs[page][lo:hi] = [
                (position, token + version) for position, token in zip(positions, token_ids[first:end], strict=True)
            ]
            del self._sums[page][lo:]
            self._whole_place[page] = NOWHERE

    def read(self, table: Sequence[int], length: int, start: int = 0) -> int:
        """Hash of every slot of `[start, length)` of a row, 64 bits."""
        first, skipped = page_split(start, self._page_size)
        num_whole, rest = page_split(length, self._page_size)
        whole = table[first:num_whole]
        if list(map(self._whole_place.__getitem__, whole)) != self._places[first:num_whole]:
            for place in range(first, num_whole):
                page = table[place]
                self._whole[page] = self._sum(page, place, self._page_size)
                self._whole_place[page] = place
        total = sum(map(self._whole.__getitem__, whole))
        if rest:
            total += self._sum(table[num_whole], num_whole, rest)
        if skipped:
            total -= self._sum(table[first], first, skipped)
        return total & ALL_64_BITS

    def _sum(self, page: int, place: int, num_slots: int) -> int:
        """Hash of the first slots of a page where it is the `place`-th of a row."""
        sums = self._sums[page]
        if self._place[page] != place:
            self._place[page] = place
            sums.clear()
        known = len(sums)
        if known < num_slots:
            total = sums[-1] if sums else 0
            for term in _terms(place * self._page_size + known, self._pairs[page][known:num_slots]):
                total += term
                sums.append(total)
        return sums[num_slots - 1]

    def copy_page(self, source: int, target: int) -> None:
        self._put(target, self._pairs[source])

    def spoil(self, pages: Iterable[int]) -> None:
        """Make free pages unreadable."""
        for page in pages:
            self._put(page, self._spoiled_page)

    def content(self, pages: Iterable[int]) -> list[list[Pair]]:
        """A copy of pages, slot by slot."""
        return [self._pairs[page].copy() for page in pages]

    def _put(self, page: int, pairs: list[Pair]) -> None:
        self._pairs[page] = pairs.copy()
        self._sums[page].clear()
        self._whole_place[page] = NOWHERE


def _terms(index: int, pairs: Sequence[Pair]) -> list[int]:
    """What each pair adds to a row's hash; `index`: place of the first one in the row, counted in slots."""
    if len(pairs) > FEW:
        indices = np.arange(index, index + len(pairs), dtype=np.uint64)
        x = np.array(pairs, dtype=np.int64).view(np.uint64) @ PAIR_FACTORS + indices * np.uint64(INDEX_FACTOR)
        x ^= x >> SHIFT_29
        x *= MIX
        x ^= x >> SHIFT_32
        terms: list[int] = x.tolist()
        return terms
    terms = []
    for i, (position, token) in enumerate(pairs, start=index):
        y = position * POSITION_FACTOR + token * TOKEN_FACTOR + i * INDEX_FACTOR & ALL_64_BITS
        y = (y ^ y >> 29) * MIX_FACTOR & ALL_64_BITS
        terms.append(y ^ y >> 32)
    return terms


def next_tokens(hashes: Iterable[int], salts: Iterable[int], vocab_size: int) -> list[int]:
    """The token that follows each row; `salts`: what else decides the choice, 0 for greedy."""
    tokens = []
    for text_hash, salt in zip(hashes, salts, strict=True):
        x = text_hash + salt * INDEX_FACTOR & ALL_64_BITS
        x = (x ^ x >> 30) * MIX_FACTOR & ALL_64_BITS
        tokens.append((x ^ x >> 31) % vocab_size)
    return tokens


def score(text_hash: int, token: int) -> float:
    """The logprob of a token behind a text: one of 2**24 numbers of (-16, 0], so that float32 holds it exactly."""
    x = (text_hash ^ token * TOKEN_FACTOR) * MIX_FACTOR & ALL_64_BITS
    return -float(x >> 40) / 2**20
