"""Executes steps without a model: `ModelRunner`'s place, over the null device.

It takes what a step carries in the order of a device: page tables, page copies, then the pages that became free since
the last step are spoiled, then the new tokens are written and everything is read back through the page tables.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from devices.base import Capabilities
from devices.null.device import SPOILED, NullKv, Rows, next_tokens
from devices.pages import IntArray, align_resume, page_count
from engine.step import SamplingColumns, StepInput, StepOutput
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import table_width

SEED_FACTOR = 0x2545F4914F6CDD1D
"""Spreads a seed, so that seed and position of a sampled token give one salt."""


NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


class NullRunner:
    """One rank's executor over pairs instead of keys and values.

    Attributes:
        kv: the pairs.
        nan_row: the row whose next result is not finite and whose new pairs are spoiled; None after that step.
        prepare_s, device_s: always 0: a simulation has no seconds.
    """

    def __init__(
        self,
        num_pages: int,
        num_rows: int,
        geometry: RowGeometry,
        capabilities: Capabilities,
        vocab_size: int,
        *,
        is_canary: bool = False,
    ) -> None:
        """`is_canary`: every 50th step reads one page too few, as a wrong clamp would."""
        self.kv = NullKv(num_pages, geometry.page_size)
        self.nan_row: int | None = None
        self.prepare_s = self.device_s = 0.0
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._is_canary = is_canary
        self._page_size = geometry.page_size
        self._tables = np.zeros((num_rows + 1, table_width(geometry, geometry.families[0])), dtype=np.int32)
        self._freed: list[IntArray] = []
        self._launched: deque[StepInput] = deque()
        self._sampled = NO_TOKENS

    def on_free(self, pages: IntArray) -> None:
        """Pages became free; they are spoiled behind the copies that were ordered before."""
        self._freed.append(pages.copy())

    def launch(self, step: StepInput) -> None:
        """Take a step in."""
        self._launched.append(step)

    def collect(self) -> StepOutput:
        """Run the oldest step, as late as a device may: what it reads must be there until its result is taken.

        Raises ValueError when a prompt is continued where the device cannot.
        """
        step = self._launched.popleft()
        for change in step.table_changes:
            self._tables[change.row, change.start : change.start + len(change.pages)] = change.pages
        for copy in step.page_copies:
            self.kv.copy_page(copy.source, copy.target)
        if self._freed:
            self._spoil({copy.target for copy in step.page_copies})
        longest = max((step.starts + step.num_new).tolist())
        tables = self._tables[step.rows, : page_count(longest, self._page_size)]
        if self._is_canary and step.step_id % 50 == 0:
            tables[:, 0] = 0
        token_ids = step.token_ids
        if len(self._sampled) and token_ids.min() < 0:
            token_ids = np.where(token_ids < 0, self._sampled[np.maximum(-1 - token_ids, 0)], token_ids)
        is_wrong = self.nan_row is not None
        is_finite = step.rows != (self.nan_row if is_wrong else -1)
        if is_wrong:
            token_ids = np.where(np.repeat(is_finite, step.num_new), token_ids, SPOILED).astype(np.int32)
            self.nan_row = None
        rows = Rows(tables, step.starts, step.num_new)
        if self._capabilities.resume_unit == "page":
            self._check_starts(step)
        self.kv.write(rows, token_ids)
        which, num_sampled = step.is_sampled, len(step.sampling.seed)
        tokens = NO_TOKENS
        if num_sampled:
            if num_sampled < len(which):
                rows = Rows(tables[which], step.starts[which], step.num_new[which])
            tokens = next_tokens(self.kv.read(rows), _salts(step.sampling), self._vocab_size)
            self._sampled = tokens
            if is_wrong:
                tokens, which = tokens[is_finite[which]], which & is_finite
        return StepOutput(step.step_id, which.astype(np.int32), tokens, is_finite)

    def _check_starts(self, step: StepInput) -> None:
        """A device that resumes at page borders computes several tokens of a row from such a border on only."""
        for start in step.starts[step.num_new > 1].tolist():
            if align_resume(start, self._page_size, self._capabilities) != start:
                raise ValueError(f"a prompt is continued at token {start}, inside a page of {self._page_size}")

    def _spoil(self, targets: set[int]) -> None:
        """Spoil what became free; a page that was taken again for a copy already has its new content."""
        for pages in self._freed:
            self.kv.spoil(pages[~np.isin(pages, list(targets))] if targets else pages)
        self._freed.clear()


def _salts(sampling: SamplingColumns) -> list[int]:
    """Seed and position of sampled rows as one number; greedy rows have 0, whatever their seed."""
    columns = zip(sampling.temperature.tolist(), sampling.seed.tolist(), sampling.position.tolist(), strict=True)
    return [seed * SEED_FACTOR + position if temperature > 0 else 0 for temperature, seed, position in columns]
