"""Executes steps: page tables, forward, sampling. It decides nothing; two runners given the same steps agree.

It holds what every executor of a step needs and nobody else may write: the weights, the KV and a copy of the page
tables, kept equal to the scheduler's by the changes that each step carries.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from devices.base import Device
from devices.pages import page_count, ragged_positions, ragged_slots
from engine.attention import AttentionGroups, FamilyColumns, StepColumns, resolved
from engine.graphs import DecodeGraphs
from engine.models.decoder import Decoder
from engine.sampling.choice import chooser
from engine.sampling.logits import WantedScores, joined, score
from engine.step import Scores, StepInput, StepOutput
from mem_cache.kv_info import RowGeometry
from mem_cache.pools import AttentionKv
from mem_cache.rows import TableChange, table_width


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A step's columns on the device.

    Attributes:
        token_ids: int64 [tokens]; positions: int32 [tokens].
        wanted: places of the tokens that score a prompt token, then of each request's last one, int64 [wanted].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Running:
    """A launched step; `is_sampled` its own, `results` waits for int32 [batch]: a token or 0, -1 if not finite."""

    step_id: int
    is_sampled: npt.NDArray[np.bool_]
    results: Callable[[], torch.Tensor]
    scores: Callable[[], Scores] | None
    prepare_s: float
    launch_s: float


class ModelRunner:
    """One rank's executor.

    Attributes:
        prepare_s, device_s: seconds that the last collected step spent on inputs (page tables, the attention's plan),
            and on launching model and sampler and waiting for their result.
    """

    def __init__(
        self,
        model: Decoder,
        device: Device,
        kv: AttentionKv,
        geometry: RowGeometry,
        num_rows: int,
        vocab_size: int,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """Captures the graphs of decode steps, so everything else that needs memory comes before.

        Args:
            vocab_size: ids below it have a token; the model may have more outputs, which are never chosen.
            graph_sizes: batch sizes of captured decode steps, ascending; see `engine.graphs`.
        """
        self.model = model
        self.kv = kv
        self._device = device
        self._page_size = geometry.page_size
        self._vocab_size = vocab_size
        self._tables = {
            family.name: np.zeros((num_rows + 1, table_width(geometry, family)), dtype=np.int32)
            for family in geometry.families
        }
        self.prepare_s = self.device_s = 0.0
        self._on_host: Counter[str] = Counter()
        self._running: deque[_Running] = deque()
        self._sampled = torch.empty(0, dtype=torch.int64, device=device.torch_device)
        self._groups = AttentionGroups(device, model.config, geometry)
        self._graphs = DecodeGraphs(model, device, kv.layers, geometry, graph_sizes) if graph_sizes else None

    @property
    def counts(self) -> Mapping[str, int]:
        """Steps by how they ran, when there are graphs; rows drawn on the host although there is a device, by cause."""
        steps: Mapping[str, int] = {} if self._graphs is None else self._graphs.counts
        return {f"graph_steps_{name}": count for name, count in steps.items()} | {
            f"sampled_on_host_{cause}": count for cause, count in self._on_host.items()
        }

    @torch.inference_mode()
    def launch(self, step: StepInput) -> None:
        """Begin a step behind those that were launched before; nothing here waits for the device."""
        called = time.perf_counter()
        stage, find = self._device.stage, self._device.operators.largest
        forward = self._prepare(step)
        choose = chooser(step.sampling, step.edits, step.allowed, self._device.sampler, self._vocab_size, find)
        where = None if step.is_sampled.all() else stage(np.flatnonzero(step.is_sampled))
        wanted = None if step.scores is None else WantedScores.of(step.scores, stage)
        self._device.send()
        started = time.perf_counter()
        hidden = forward()
        ends = hidden[len(hidden) - len(step.rows) :]
        logits = self._logits(ends if where is None else ends[where])
        sampled = choose(logits)
        if sampled.on_host:
            self._on_host.update(sampled.on_host)
        # A chunk without logits is judged by its last hidden state: attention carries a NaN of its KV there. Times 0
        # only what is not finite becomes NaN, in fewer passes than `isfinite` takes.
        is_finite = (ends * 0).sum(dim=-1) == 0
        is_number = sampled.is_finite & (is_finite if where is None else is_finite[where])
        results = self._sampled = torch.where(is_number, sampled.token_ids, -1)
        if where is not None:
            results = is_finite.to(torch.int64) - 1
            results[where] = self._sampled
        scores = None
        if wanted is not None:
            scores = partial(self._scores, wanted, hidden, logits, sampled.token_ids)
        self._running.append(
            _Running(
                step.step_id,
                step.is_sampled,
                self._device.download(results.to(torch.int32)),
                scores,
                started - called,
                time.perf_counter() - started,
            )
        )

    @torch.inference_mode()
    def collect(self) -> StepOutput:
        """The result of the oldest launched step, waited for."""
        started = time.perf_counter()
        step = self._running.popleft()
        results = step.results().numpy()
        scores = None if step.scores is None else step.scores()
        self.prepare_s, self.device_s = step.prepare_s, step.launch_s + time.perf_counter() - started
        is_finite = results >= 0
        has_token = step.is_sampled & is_finite
        return StepOutput(step.step_id, has_token.astype(np.int32), results[has_token], is_finite, scores)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states of the wanted tokens, [wanted, hidden_size]."""
        return self.model.forward(
            inputs.token_ids, inputs.positions, self._groups.by_layer, self.kv.layers, inputs.wanted
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the ids that have a token, float32 [rows, ids]."""
        return self.model.logits(hidden)[:, : self._vocab_size]

    def _scores(
        self, wanted: WantedScores, hidden: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> Scores:
        """Logprobs of prompt tokens, block by block so that no large matrix of logits is held, then of sampled ones."""
        parts, top_n, sampler = [], wanted.top_n, self._device.sampler
        first = 0
        for targets, extra in wanted.prompt:
            last = first + len(targets)
            parts.append(score(self._logits(hidden[first:last]), targets, top_n, *extra, sampler))
            first = last
        rows, extra = wanted.sampled
        return joined([*parts, score(logits[rows], token_ids[rows], top_n, *extra, sampler)])

    def _prepare(self, step: StepInput) -> Callable[[], torch.Tensor]:
        """Bring page tables up to date, plan attention, stage the step's columns for the device.

        Returns what computes the hidden states of the wanted tokens, [wanted, hidden_size], once they were sent.
        """
        self._apply(step.table_changes)
        for copy in step.page_copies:
            layers = [self.kv.layers[layer] for layer in self._groups.layers.get(copy.family, ())]
            self._device.copy_page(layers, copy.source, copy.target)
        columns = self._columns(step)
        scores_prompt = step.scores is not None and len(step.scores.place) > 0
        if self._graphs is not None and not scores_prompt:
            replay = self._graphs.prepare(columns, self._sampled)
            if replay is not None:
                return replay
        self._groups.plan(columns)
        ends = step.num_new.cumsum(dtype=np.int64) - 1
        if step.scores is not None:
            ends = np.concatenate([step.scores.place, ends])
        stage, before = self._device.stage, self._sampled
        token_ids, positions = stage(columns.token_ids.astype(np.int64)), stage(columns.positions)
        wanted = stage(ends)

        def forward() -> torch.Tensor:
            known = resolved(token_ids, before) if columns.has_references else token_ids
            return self.forward(ForwardInputs(known, positions, wanted))

        return forward

    def _columns(self, step: StepInput) -> StepColumns:
        ends = step.starts + step.num_new
        num_pages = page_count(int(ends.max()), self._page_size)
        families = {}
        for family in self._groups.by_family:
            tables = self._tables[family][step.rows, :num_pages]
            slots = ragged_slots(tables, step.starts, step.num_new, self._page_size)
            families[family] = FamilyColumns(tables, slots)
        positions = ragged_positions(step.starts, step.num_new)
        return StepColumns(step.token_ids, positions, step.num_new, ends, families)

    def _apply(self, changes: tuple[TableChange, ...]) -> None:
        for change in changes:
            self._tables[change.family][change.row, change.start : change.start + len(change.pages)] = change.pages
