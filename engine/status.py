"""One line each N steps that says what the engine is doing, in fixed columns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger("rung")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step.

    Attributes:
        host_s: scheduling and results.
        prepare_s: page tables and the attention's plan; where the forward begins is a matter of taste.
        device_s: model and sampler.
    """

    num_requests: int
    num_tokens: int
    host_s: float
    prepare_s: float
    device_s: float

    @property
    def total_s(self) -> float:
        return self.host_s + self.prepare_s + self.device_s


@dataclass(slots=True)
class StatusLog:
    """Sums up steps; a line is due every `interval` of them.

    step    1240 | run   8 wait    2 | prefill    512 decode    310 tok/s | kv  31% tree  12% | hit  44% | retracted 0
    """

    interval: int
    num_steps: int = 0
    _seconds: float = 0.0
    _prefilled: int = 0
    _decoded: int = 0

    def step(self, timing: StepTiming) -> bool:
        """Count a step; True when a line is due."""
        self.num_steps += 1
        self._seconds += timing.total_s
        self._decoded += timing.num_requests
        self._prefilled += timing.num_tokens - timing.num_requests
        return self.num_steps % self.interval == 0

    def write(self, stats: Mapping[str, int]) -> None:
        """Write the line, at INFO, and start the next sum. `stats`: those of `EngineCore.stats`."""
        logger.info("%s", self._line(stats))
        self._seconds, self._prefilled, self._decoded = 0.0, 0, 0

    def _line(self, stats: Mapping[str, int]) -> str:
        pages = stats["num_pages"]
        in_tree = stats["tree_evictable_pages"] + stats["tree_protected_pages"]
        seconds = self._seconds or 1e-9
        hit = stats["cached_tokens_total"] / max(1, stats["prompt_tokens_total"])
        return (
            f"step {self.num_steps:7d} | run {stats['num_running']:3d} wait {stats['num_waiting']:4d} | "
            f"prefill {self._prefilled / seconds:6.0f} decode {self._decoded / seconds:6.0f} tok/s | "
            f"kv {1 - stats['free_pages'] / pages:4.0%} tree {in_tree / pages:4.0%} | hit {hit:4.0%} | "
            f"retracted {stats['num_retracted_total']}"
        )
