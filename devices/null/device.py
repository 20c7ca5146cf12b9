"""Memory without arithmetic: a slot holds which token at which position was written there, and nothing else.

The "forward" of a row is a hash of all pairs that are read through its page table over `[0, seq)`, so an aliased, a
stale, a freed or a wrongly clamped page gives another token than the row's own tokens would. A page is spoiled when it
becomes free. The registry does not know this device: it has no attention, nothing but a simulation can use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from devices.base import Capabilities, ResumeUnit
from devices.page_pool import PADDING_PAGE
from devices.pages import IntArray, page_count, ragged_positions, ragged_slots

HashArray = npt.NDArray[np.uint64]

SPOILED = -1
"""Position and token of a slot of a free page; no row's own."""

WEIGHTS_SHIFT = 32
"""A pair's token carries the version of the weights that computed it in its high half."""

INDEX_FACTOR = 0x9E3779B97F4A7C15
POSITION_FACTOR = 0xC2B2AE3D27D4EB4F
TOKEN_FACTOR = 0x165667B19E3779F9
MIX_FACTOR = 0xBF58476D1CE4E5B9
"""Odd constants of well-known hashes (xxHash, SplitMix64); the oracle computes the same with Python's integers."""

PAIR_FACTORS = np.array([POSITION_FACTOR, TOKEN_FACTOR], dtype=np.uint64)
MIX, SHIFT_29, SHIFT_32 = np.uint64(MIX_FACTOR), np.uint64(29), np.uint64(32)
ALL_64_BITS = 2**64 - 1


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


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step. `tables`: int32 [batch, pages]; `starts`, `num_new`: int32 [batch], tokens."""

    tables: IntArray
    starts: IntArray
    num_new: IntArray


class NullKv:
    """KV of `num_pages` pages and the padding page.

    Attributes:
        pairs: (position, token) of each slot, int64 [slots, 2].
        weights_version: what the pairs of the next write carry.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pairs = np.full(((num_pages + 1) * page_size, 2), SPOILED, dtype=np.int64)
        self.weights_version = 0
        self._by_page = self.pairs.reshape(num_pages + 1, page_size, 2)
        self._page_size = page_size
        self._index_terms = _index_terms(1024)

    def write(self, rows: Rows, token_ids: IntArray) -> None:
        """Put the new tokens of all rows into their slots. `token_ids`: int32 [sum(num_new)], row after row."""
        slots = ragged_slots(rows.tables, rows.starts, rows.num_new, self._page_size)
        self.pairs[slots, 0] = ragged_positions(rows.starts, rows.num_new)
        self.pairs[slots, 1] = token_ids
        if self.weights_version:
            self.pairs[slots, 1] += self.weights_version << WEIGHTS_SHIFT
        self._by_page[PADDING_PAGE] = SPOILED  # what is written there is lost

    def read(self, rows: Rows) -> HashArray:
        """Hash of every slot of `[0, starts + num_new)` of each row, uint64 [batch]."""
        lengths = (rows.starts + rows.num_new).tolist()
        longest = max(lengths)
        if len(self._index_terms) < longest:
            self._index_terms = _index_terms(2 * longest)
        pages = rows.tables[:, : page_count(longest, self._page_size)]
        pairs = self._by_page[pages].reshape(len(lengths), -1, 2)[:, :longest]
        mixed = _mixed(pairs.view(np.uint64) @ PAIR_FACTORS + self._index_terms[:longest])
        hashes: HashArray = np.array([mixed[i, :length].sum() for i, length in enumerate(lengths)], dtype=np.uint64)
        return hashes

    def copy_page(self, source: int, target: int) -> None:
        self._by_page[target] = self._by_page[source]

    def spoil(self, pages: IntArray) -> None:
        """Make free pages unreadable."""
        self._by_page[pages] = SPOILED

    def content(self, pages: IntArray) -> npt.NDArray[np.int64]:
        """A copy of pages, int64 [pages, page_size, 2]."""
        return self._by_page[pages].copy()


def _index_terms(num: int) -> HashArray:
    """What the place of a pair in its row adds to the pair's hash, for the first `num` places."""
    return np.arange(num, dtype=np.uint64) * np.uint64(INDEX_FACTOR)


def _mixed(x: HashArray) -> HashArray:
    x ^= x >> SHIFT_29
    x *= MIX
    x ^= x >> SHIFT_32
    return x


def next_tokens(hashes: HashArray, salts: Iterable[int], vocab_size: int) -> IntArray:
    """The token that follows each row, int32 [rows]; `salts`: what else decides the choice, 0 for greedy.

    Python's integers: rows are few, and an array operation costs as much as ten of theirs.
    """
    tokens = []
    for text_hash, salt in zip(hashes.tolist(), salts, strict=True):
        x = text_hash + salt * INDEX_FACTOR & ALL_64_BITS
        x = (x ^ x >> 30) * MIX_FACTOR & ALL_64_BITS
        tokens.append((x ^ x >> 31) % vocab_size)
    return np.array(tokens, dtype=np.int32)
