"""`NPUGraph`: records what was launched, and launches it again on the same memory.

As in torch_npu: host values are baked in when captured, also the lists of lengths that attention takes. Only an
*updatable* operator captured with `auto_dispatch_capture=True` can be given new ones, by `update`, before each replay;
on hardware such an operator waits in the graph for an event that only `update` records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from devices.npu.emulator import streams
from devices.npu.emulator.launch import Launch, observers, set_capture
from devices.npu.emulator.rules import GRAPHS, ContractViolation, strictness

UPDATE_KEYS = {
    "npu::npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
    "atb::_npu_paged_attention": ("context_lens",),
}
"""Host arguments that `update` can replace, by operator (torch_npu 2.13, npu/_npugraph_handlers)."""

_pool_ids = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """A name for memory that graphs share; the emulator's graphs need none."""
    return 0, next(_pool_ids)


def is_current_stream_capturing() -> bool:
    return observers.capture is not None


class NPUGraph:
    """Captured launches. `auto_dispatch_capture` is set by `graph`, as in torch_npu."""

    def __init__(self) -> None:
        self.auto_dispatch_capture = False
        self._launches: list[Launch] = []
        self._updatable: list[Launch] = []
        self._captured = self._fresh = False
        self._pool = graph_pool_handle()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Everything launched from here on, by any thread, is part of the graph.

        Raises:
            RuntimeError: another capture is in progress, or this graph holds one already.
        """
        if observers.capture is not None:
            raise RuntimeError("emulated NPU: another graph capture is in progress")
        if self._captured:
            raise RuntimeError("emulated NPU: this NPUGraph was captured already; reset() it first")
        self._pool = pool or self._pool
        set_capture(self)

    def capture_end(self) -> None:
        set_capture(None)
        self._captured = True
        self._updatable = [launch for launch in self._launches if launch.name in UPDATE_KEYS]

    def record(self, launch: Launch) -> None:
        self._launches.append(launch)

    def replay(self) -> None:
        """Launch everything again.

        Raises:
            ContractViolation: "graph-update", no `update` came since the last replay.
        """
        if not self._captured:
            raise RuntimeError("emulated NPU: replay() of an NPUGraph that holds no capture")
        if self.auto_dispatch_capture and self._updatable and not self._fresh and strictness().graphs:
            raise ContractViolation(
                "graph-update",
                "NPUGraph.replay",
                f"{len(self._updatable)} captured operators wait for update(cpu_update_input=[...]) before each "
                f"replay; without it an NPU hangs, or computes with the lengths of the capture ({GRAPHS})",
            )
        self._fresh = False
        clock = observers.clock
        for launch in self._launches:
            launch.again()
            if clock is not None:
                clock.charge(launch, replayed=True)

    def update(self, cpu_update_input: Sequence[dict[str, Any]]) -> None:
        """New host arguments for the updatable operators, in the order of their capture.

        Args:
            cpu_update_input: one dict for all of them, or exactly one for each.
        Raises:
            RuntimeError: captured without `auto_dispatch_capture=True`, or another number of dicts.
            ContractViolation: "graph-update-key", a key that the operator does not have.
        """
        if not self.auto_dispatch_capture:
            raise RuntimeError(
                "The current graph configuration does not support update: capture with "
                "torch.npu.graph(g, auto_dispatch_capture=True)"
            )
        inputs = list(cpu_update_input)
        if len(inputs) == 1:
            inputs *= len(self._updatable)
        if len(inputs) != len(self._updatable):
            raise RuntimeError(
                f"{len(self._updatable)} captured operators need an update and cpu_update_input has "
                f"{len(inputs)} elements: give one for all, or one for each"
            )
        for launch, new in zip(self._updatable, inputs, strict=True):
            self._update(launch, new)
        self._fresh = True

    def _update(self, launch: Launch, new: dict[str, Any]) -> None:
        keys = UPDATE_KEYS[launch.name]
        for key, value in new.items():
            if key in keys:
                launch.kwargs[key] = snapshot(value)
            elif strictness().graphs:
                raise ContractViolation(
                    "graph-update-key",
                    f"NPUGraph.update of {launch.name}",
                    f"the key {key!r} is not one of {', '.join(keys)}; torch_npu ignores it without a word, and the "
                    f"graph computes with stale lengths ({GRAPHS}: update_capture_record)",
                )

    def reset(self) -> None:
        self._launches, self._updatable = [], []
        self._captured = self._fresh = False

    def pool(self) -> tuple[int, int]:
        return self._pool


def snapshot(value: Any) -> Any:
    """A host argument as a capture keeps it: later changes of the caller's list do not reach it."""
    if isinstance(value, list | tuple):
        return list(value)
    return value.clone() if hasattr(value, "clone") else value


class graph:  # noqa: N801 - torch_npu's name
    """`with torch.npu.graph(g): ...` captures what is launched inside."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: streams.Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self.npu_graph, self.pool, self.capture_error_mode = npu_graph, pool, capture_error_mode
        npu_graph.auto_dispatch_capture = auto_dispatch_capture
        self._stream = streams.stream(stream or streams.Stream())

    def __enter__(self) -> None:
        streams.synchronize()
        self._stream.__enter__()
        try:
            self.npu_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> None:
        self.npu_graph.capture_end()
        self._stream.__exit__(None, None, None)
        if error[0] is not None:
            self.npu_graph.reset()
