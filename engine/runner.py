"""Executes steps: page tables, forward, sampling. It decides nothing; two runners given the same steps agree.

It holds what every executor of a step needs and nobody else may write: the weights, the KV and a copy of the page
tables, kept equal to the scheduler's by the changes that each step carries.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A step's columns on the device, int64.

    Attributes:
        token_ids, positions: [tokens].
        last_tokens: places of the tokens whose next one is sampled, [sampled].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor


class ModelRunner:
    """One rank's executor.

    Attributes:
        device_s: seconds that the last step spent in the model and the sampler; the rest is the host's.
    """

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
        self.device_s = 0.0
        config = model.config
        by_window = {
            window: device.attention(config.num_heads, config.num_kv_heads, config.head_dim, window)
            for window in dict.fromkeys(config.windows)
        }
        self._backends = tuple(by_window.values())
        self._attention = tuple(by_window[window] for window in config.windows)

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput:
        """Run one step to its end."""
        inputs = self._prepare(step)
        started = time.perf_counter()
        logits = self.forward(inputs)
        sampled = sample(logits[:, : self._vocab_size], step.sampling)
        finite, tokens = sampled.is_finite.cpu().numpy(), sampled.token_ids.cpu().numpy().astype(np.int32)
        self.device_s = time.perf_counter() - started
        is_finite = np.ones(len(step.rows), dtype=np.bool_)
        is_finite[step.is_sampled] = finite
        has_token = step.is_sampled & is_finite
        return StepOutput(step.step_id, has_token.astype(np.int32), tokens[is_finite[step.is_sampled]], is_finite)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Next-token logits of the sampled requests, float32 [sampled, vocabulary of the model]."""
        return self.model.forward(
            inputs.token_ids, inputs.positions, self._attention, self.kv.layers, inputs.last_tokens
        )

    def _prepare(self, step: StepInput) -> ForwardInputs:
        """Bring page tables up to date, plan attention, put the step's columns on the device."""
        self._apply(step.table_changes)
        ends = step.starts + step.num_new
        num_pages = page_count(int(ends.max()), self._page_size)
        tables = self._tables["full"][step.rows, :num_pages]
        to = self._device.torch_device
        attention = AttentionMetadata(
            query_lens=step.num_new,
            seq_lens=ends,
            page_tables=torch.from_numpy(tables).to(to),
            slots=ragged_slots(tables, step.starts, step.num_new, self._page_size),
            page_size=self._page_size,
        )
        for backend in self._backends:
            backend.plan(attention)
        last_tokens = np.cumsum(step.num_new, dtype=np.int64) - 1
        return ForwardInputs(
            torch.from_numpy(step.token_ids.astype(np.int64)).to(to),
            torch.from_numpy(ragged_positions(step.starts, step.num_new)).to(to),
            torch.from_numpy(last_tokens[step.is_sampled]).to(to),
        )

    def _apply(self, changes: tuple[TableChange, ...]) -> None:
        for change in changes:
            self._tables[change.family][change.row, change.start : change.start + len(change.pages)] = change.pages
