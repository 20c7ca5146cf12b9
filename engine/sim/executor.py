"""Executes steps without a model: `ModelRunner`'s place, over the null device.

It takes what a step carries in the order of a device: page tables, page copies, then the pages that became free since
the last step are spoiled, then the new tokens are written and everything is read back through the page tables. A row's
window is read through the window's own table, over the window only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np

from devices.base import Capabilities
from devices.null.device import SPOILED, NullKv, next_tokens, score, window_text_hash
from devices.page_pool import PADDING_PAGE
from devices.pages import IntArray, align_resume
from engine.step import SamplingColumns, ScoreColumns, Scores, StepInput, StepOutput
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import table_width

SEED_FACTOR = 0x2545F4914F6CDD1D
"""Spreads a seed, so that seed and position of a sampled token give one salt."""

Tables = tuple[list[int], list[int]]
"""Page ids of one row: of the full family, and of the window's; the full one's again where there is none."""


class NullRunner:
    """One rank's executor over pairs instead of keys and values.

    Attributes:
        kv: the pairs, by family.
        nan_row: the row whose next result is not finite and whose new pairs are spoiled; None after that step.
        prepare_s, device_s: always 0: a simulation has no seconds.
        counts: nothing.
    """

    def __init__(
        self,
        num_pages: Mapping[str, int],
        num_rows: int,
        geometry: RowGeometry,
        capabilities: Capabilities,
        vocab_size: int,
        *,
        is_canary: bool = False,
    ) -> None:
        """Args:

        num_pages: of each family.
        is_canary: every 10th step reads one page too few, as a wrong clamp would.
        """
        self.kv = {name: NullKv(n, geometry.page_size) for name, n in num_pages.items()}
        self.nan_row: int | None = None
        self.prepare_s = self.device_s = 0.0
        self.counts: Mapping[str, int] = {}
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._is_canary = is_canary
        self._page_size = geometry.page_size
        width = table_width(geometry, geometry.families[0])
        self._tables = {name: [[PADDING_PAGE] * width for _ in range(num_rows + 1)] for name in num_pages}
        self._freed: dict[str, list[int]] = {name: [] for name in num_pages}
        self._full = self.kv["full"]
        self._window = next((self.kv[f.name] for f in geometry.families if f.window is not None), None)
        self._window_family = next((f.name for f in geometry.families if f.window is not None), "full")
        self._window_len = next((f.window for f in geometry.families if f.window is not None), 0)
        self._launched: deque[StepInput] = deque()
        self._sampled: list[int] = []

    def on_free(self, family: str) -> Callable[[IntArray], None]:
        """Who is told of a family's pages that became free; they are spoiled behind the copies ordered before."""
        freed = self._freed[family]
        return lambda pages: freed.extend(pages.tolist())

    def launch(self, step: StepInput) -> None:
        """Take a step in."""
        self._launched.append(step)

    def collect(self) -> StepOutput:
        """Run the oldest step, as late as a device may: what it reads must be there until its result is taken.

        Raises ValueError when a prompt is continued where the device cannot.
        """
        step = self._launched.popleft()
        for change in step.table_changes:
            table = self._tables[change.family][change.row]
            table[change.start : change.start + len(change.pages)] = change.pages.tolist()
        for copy in step.page_copies:
            self.kv[copy.family].copy_page(copy.source, copy.target)
        for family, freed in self._freed.items():
            if freed:
                # A page that was taken again for a copy already has its new content.
                copied = [copy.target for copy in step.page_copies if copy.family == family]
                self.kv[family].spoil(set(freed).difference(copied))
                freed.clear()
        batch, starts, num_new = step.rows.tolist(), step.starts.tolist(), step.num_new.tolist()
        if self._capabilities.resume_unit == "page":
            self._check_starts(starts, num_new)
        full, window = self._tables["full"], self._tables[self._window_family]
        tables = [(full[row], window[row]) for row in batch]
        if self._is_canary and step.step_id % 10 == 0:
            tables = [([PADDING_PAGE, *table[1:]], other) for table, other in tables]
        is_finite = [row != self.nan_row for row in batch]
        self.nan_row = None
        # A negative id stands for a token that the step before this one sampled.
        token_ids = [token if token >= 0 else self._sampled[-1 - token] for token in step.token_ids.tolist()]
        self._write(tables, starts, num_new, token_ids, is_finite)
        is_sampled = step.is_sampled.tolist()
        hashes = [
            self._text(table, start + n)
            for table, start, n, samples in zip(tables, starts, num_new, is_sampled, strict=True)
            if samples
        ]
        tokens = next_tokens(hashes, _salts(step.sampling), self._vocab_size)
        if tokens:
            self._sampled = tokens
        scores = None
        if step.scores is not None:
            scored = self._prompt_texts(step.scores, tables, starts, num_new)
            scored += [(hashes[row], tokens[row]) for row in step.scores.sampled_row.tolist()]
            scores = self._scores(step.scores, scored)
        if not all(is_finite):
            sampled_finite = [finite for finite, samples in zip(is_finite, is_sampled, strict=True) if samples]
            tokens = [token for token, finite in zip(tokens, sampled_finite, strict=True) if finite]
            is_sampled = [finite and samples for finite, samples in zip(is_finite, is_sampled, strict=True)]
        return StepOutput(
            step.step_id,
            np.array(is_sampled, dtype=np.int32),
            np.array(tokens, dtype=np.int32),
            np.array(is_finite, dtype=np.bool_),
            scores,
        )

    def _text(self, table: Tables, length: int) -> int:
        """The hash of what the token behind a row's first `length` tokens reads."""
        full = self._full.read(table[0], length)
        if self._window is None:
            return full
        return window_text_hash(full, self._window.read(table[1], length, max(0, length - self._window_len)))

    def _sees_its_window(self, table: Tables, start: int) -> bool:
        """Whether the token at `start` reads through the window's table what the row's full pages hold.

        The window of a chunk's last token does not reach back to that of its first; what a device computes of a wrong
        one would be wrong KV, and no token of this step.
        """
        if self._window is None:
            return True
        lo = max(0, start + 1 - self._window_len)
        return self._window.read(table[1], start, lo) == self._full.read(table[0], start, lo)

    def _prompt_texts(
        self, wanted: ScoreColumns, tables: list[Tables], starts: list[int], num_new: list[int]
    ) -> list[tuple[int, int]]:
        """Of each prompt token to score: the hash of the text before it, and its id."""
        firsts = list(accumulate(num_new, initial=0))
        texts = []
        for place, target in zip(wanted.place.tolist(), wanted.target.tolist(), strict=True):
            row = bisect_right(firsts, place) - 1
            texts.append((self._text(tables[row], starts[row] + place - firsts[row] + 1), target))
        return texts

    def _scores(self, wanted: ScoreColumns, scored: list[tuple[int, int]]) -> Scores:
        """`scored`: text and token of each score. The best tokens are drawn with salts 1, 2, ..."""
        n = wanted.top_n
        best = [next_tokens([text] * n, range(1, n + 1), self._vocab_size) for text, _ in scored]
        top = [[score(text, token) for token in tokens] for (text, _), tokens in zip(scored, best, strict=True)]
        extras = zip(wanted.extra_score.tolist(), wanted.extra_token_id.tolist(), strict=True)
        return Scores(
            np.array([score(text, token) for text, token in scored], dtype=np.float32),
            np.array(best, dtype=np.int32).reshape(len(scored), n),
            np.array(top, dtype=np.float32).reshape(len(scored), n),
            np.array([score(scored[place][0], token) for place, token in extras], dtype=np.float32),
        )

    def _write(
        self,
        tables: list[Tables],
        starts: list[int],
        num_new: list[int],
        token_ids: list[int],
        is_finite: list[bool],
    ) -> None:
        """Write the new tokens of all rows; `token_ids` are those of one row after another."""
        first = 0
        for table, start, n, finite in zip(tables, starts, num_new, is_finite, strict=True):
            is_right = finite and (n == 1 or self._sees_its_window(table, start))
            tokens = token_ids[first : first + n] if is_right else [SPOILED] * n
            self._full.write(table[0], start, tokens)
            if self._window is not None:
                self._window.write(table[1], start, tokens)
            first += n

    def _check_starts(self, starts: list[int], num_new: list[int]) -> None:
        """A device that resumes at page borders computes several tokens of a row from such a border on only."""
        for start, n in zip(starts, num_new, strict=True):
            if n > 1 and align_resume(start, self._page_size, self._capabilities) != start:
                raise ValueError(f"a prompt is continued at token {start}, inside a page of {self._page_size}")


def _salts(sampling: SamplingColumns) -> list[int]:
    """Seed and position of sampled rows as one number; greedy rows have 0, whatever their seed."""
    columns = zip(sampling.temperature.tolist(), sampling.seed.tolist(), sampling.position.tolist(), strict=True)
    return [seed * SEED_FACTOR + position if temperature > 0 else 0 for temperature, seed, position in columns]
