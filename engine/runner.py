"""Executes steps: page tables, forward, sampling. It decides nothing; two runners given the same steps agree.

It holds what every executor of a step needs and nobody else may write: the weights, the KV and a copy of the page
tables, kept equal to the scheduler's by the changes that each step carries.
"""

from __future__ import annotations

import numpy as np
import torch

from devices.base import AttentionMetadata, Device
from devices.pages import page_count, ragged_positions, ragged_slots
from engine.models.decoder import Decoder
from engine.sampling.sampler import sample
from engine.step import StepInput, StepOutput
from mem_cache.kv_info import RowGeometry
from mem_cache.pools import AttentionKv
from mem_cache.rows import TableChange, table_width


class ModelRunner:
    """One rank's executor."""

    def __init__(
        self, model: Decoder, device: Device, kv: AttentionKv, geometry: RowGeometry, num_rows: int, vocab_size: int
    ) -> None:
        """`vocab_size`: ids below it have a token; the model may have more outputs, which are never chosen."""
        self.model = model
        self.kv = kv
        self._device = device
        self._page_size = geometry.page_size
        self._vocab_size = vocab_size
        self._tables = {
            family.name: np.zeros((num_rows + 1, table_width(geometry, family)), dtype=np.int32)
            for family in geometry.families
        }
        config = model.config
        self._attention = device.attention(config.num_heads, config.num_kv_heads, config.head_dim)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Run one step to its end."""
        logits = self.forward(step)
        sampled = sample(logits[:, : self._vocab_size], step.sampling)
        is_finite = np.ones(len(step.rows), dtype=np.bool_)
        is_finite[step.is_sampled] = sampled.is_finite.cpu().numpy()
        has_token = step.is_sampled & is_finite
        tokens = sampled.token_ids.cpu().numpy().astype(np.int32)
        return StepOutput(step.step_id, has_token.astype(np.int32), tokens[is_finite[step.is_sampled]], is_finite)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """Next-token logits of the step's sampled requests, float32 [sampled, vocabulary of the model]."""
        self._apply(step.table_changes)
        ends = step.starts + step.num_new
        num_pages = page_count(int(ends.max()), self._page_size)
        tables = self._tables["full"][step.rows, :num_pages]
        to = self._device.torch_device
        self._attention.plan(
            AttentionMetadata(
                query_lens=step.num_new,
                seq_lens=ends,
                page_tables=torch.from_numpy(tables).to(to),
                slots=ragged_slots(tables, step.starts, step.num_new, self._page_size),
                page_size=self._page_size,
            )
        )
        last_token = np.cumsum(step.num_new, dtype=np.int64) - 1
        return self.model.forward(
            torch.from_numpy(step.token_ids.astype(np.int64)).to(to),
            torch.from_numpy(ragged_positions(step.starts, step.num_new)).to(to),
            self._attention,
            self.kv.layers,
            torch.from_numpy(last_token[step.is_sampled]).to(to),
        )

    def _apply(self, changes: tuple[TableChange, ...]) -> None:
        for change in changes:
            self._tables[change.family][change.row, change.start : change.start + len(change.pages)] = change.pages
