"""Rows of several page families in plain integers: what each cache must hold, written down as it is computed.

Nothing of the engine is used: a row is its tokens, a page a list of values, each value depends on all that came before
it. The rules are those of DeepSeek-V4's caches on Ascend: a full and a window key for each token, an entry for each 4
tokens at `slot // 4`, an entry for each 128 tokens in a sidecar page of `entries_per_page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RATIO = 128


@dataclass
class NaiveRow:
    """Attributes:
    values: what a key of each token holds.
    entries: what a compressed entry of each whole 128 tokens holds.
    """

    values: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    _running: list[int] = field(default_factory=lambda: [7])

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._running.append((self._running[-1] * 31 + token + 1) % (1 << 61))
            self.values.append(self._running[-1])
            if len(self.values) % RATIO == 0:
                self.entries.append(-self._running[-1])

    def cut(self, length: int) -> None:
        del self.values[length:], self._running[length + 1 :], self.entries[length // RATIO :]

    def copy(self, length: int) -> NaiveRow:
        return NaiveRow(self.values[:length], self.entries[: length // RATIO], self._running[: length + 1])


@dataclass
class NaiveCache:
    """Pages of `width` values; a page that is not there has none."""

    width: int
    pages: dict[int, list[int | None]] = field(default_factory=dict)

    def wipe(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.pages.pop(page, None)

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages.get(source, [None] * self.width))

    def write(self, table: Sequence[int], start: int, values: Sequence[int]) -> None:
        """Put values at places `start ..` of a row whose pages are `table`."""
        for i, value in enumerate(values, start):
            page = table[i // self.width]
            assert page > 0, "a value is written into no page"
            self.pages.setdefault(page, [None] * self.width)[i % self.width] = value

    def reads(self, table: Sequence[int], start: int, values: Sequence[int]) -> bool:
        """Whether places `start ..` of the row hold these values."""
        end, i = start + len(values), start
        while i < end:
            page, place = divmod(i, self.width)
            n = min(self.width - place, end - i)
            held = self.pages.get(table[page], [None] * self.width)[place : place + n]
            if held != list(values[i - start : i - start + n]):
                return False
            i += n
        return True


def sidecar_page_count(length: int, entries_per_page: int) -> int:
    """By walking: a page is opened by the entry that finds none."""
    opened = 0
    for entry in range(length // RATIO):
        if entry % entries_per_page == 0:
            opened += 1
    return opened
