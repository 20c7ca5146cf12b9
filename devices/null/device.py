"""Memory without arithmetic: a slot holds which token at which position was written there, and nothing else.

The "forward" of a row is a hash of all pairs that are read through its page table over `[0, seq)`, so an aliased, a
stale, a freed or a wrongly clamped page gives another token than the row's own tokens would. A page is spoiled when it
becomes free. The registry does not know this device: it has no attention, nothing but a simulation can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

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
        self._index = np.arange(1024, dtype=np.uint64)

    def write(self, rows: Rows, token_ids: IntArray) -> None:
        """Put the new tokens of all rows into their slots. `token_ids`: int32 [sum(num_new)], row after row."""
        slots = ragged_slots(rows.tables, rows.starts, rows.num_new, self._page_size)
        self.pairs[slots, 0] = ragged_positions(rows.starts, rows.num_new)
        self.pairs[slots, 1] = token_ids.astype(np.int64) + (self.weights_version << WEIGHTS_SHIFT)
        self._by_page[PADDING_PAGE] = SPOILED  # what is written there is lost

    def read(self, rows: Rows) -> HashArray:
        """Hash of every slot of `[0, starts + num_new)` of each row, uint64 [batch]."""
        lengths = (rows.starts + rows.num_new).tolist()
        parts = []
        for table, length in zip(rows.tables, lengths, strict=True):
            pages = table[: page_count(length, self._page_size)]
            parts.append(self._by_page[pages].reshape(-1, 2)[:length])
        while len(self._index) < max(lengths):
            self._index = np.arange(2 * len(self._index), dtype=np.uint64)
        pairs = np.concatenate(parts).view(np.uint64)
        index = np.concatenate([self._index[:length] for length in lengths])
        first = [0, *accumulate(lengths[:-1])]
        hashes: HashArray = np.add.reduceat(_mixed(index, pairs[:, 0], pairs[:, 1]), first)
        return hashes

    def copy_page(self, source: int, target: int) -> None:
        self._by_page[target] = self._by_page[source]

    def spoil(self, pages: IntArray) -> None:
        """Make free pages unreadable."""
        self._by_page[pages] = SPOILED

    def content(self, pages: IntArray) -> npt.NDArray[np.int64]:
        """A copy of pages, int64 [pages, page_size, 2]."""
        return self._by_page[pages].copy()


def _mixed(index: HashArray, position: HashArray, token: HashArray) -> HashArray:
    x = index * np.uint64(INDEX_FACTOR)
    x += position * np.uint64(POSITION_FACTOR)
    x += token * np.uint64(TOKEN_FACTOR)
    x ^= x >> np.uint64(29)
    x *= np.uint64(MIX_FACTOR)
    x ^= x >> np.uint64(32)
    return x


def next_tokens(hashes: HashArray, salts: HashArray, vocab_size: int) -> IntArray:
    """The token that follows each row, int32 [rows]; `salts`: what else decides the choice, 0 for greedy."""
    x = hashes + salts * np.uint64(INDEX_FACTOR)
    x ^= x >> np.uint64(30)
    x *= np.uint64(MIX_FACTOR)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(vocab_size)).astype(np.int32)
