"""A captured decode step: `NPUGraph`, its host lengths brought up to date before every replay.

An NPU's attention takes lengths from the host, and a capture keeps those of its time. torch_npu can give the captured
calls new ones (`update`), on a stream of its own; in the graph each of them waits for an event that the update records.
A capture for which the device lacks streams, events or memory is refused as `NoRoomForGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from devices.base import AttentionMetadata, NoRoomForGraph
from devices.npu.arguments.graph import graph_update
from devices.npu.attention import NpuAttention

WARM_UPS = 2
"""Runs before the capture: operators set up, caches and workspaces get their memory."""

NO_ROOM = ("207005", "207008", "out of memory")
"""In the texts of errors: the two codes mean that streams or events ran out, whatever else is said."""


class NpuGraph:
    """See `devices.base.CapturedGraph`."""

    def __init__(self, runtime: Any, graph: Any, calls: Sequence[tuple[str, NpuAttention]]) -> None:
        """`runtime`: what has torch.npu's functions; `calls`: operator and backend of each captured call that takes
        lengths, in order."""
        self._graph = graph
        self._operators = [operator for operator, _ in calls]
        self._backends = [backend for _, backend in calls]
        self._num_rows = [backend.num_rows for backend in self._backends]
        self._done = runtime.Event()
        self._done.record()

    def replay(self, step: AttentionMetadata) -> None:
        updates = [backend.new_lengths() for backend in self._backends]
        checked = graph_update(self._operators, updates, self._num_rows)
        if not self._done.query():
            self._done.synchronize()  # the replay before still reads the lists that this one replaces
        self._graph.update(cpu_update_input=checked)
        self._graph.replay()
        self._done.record()


def capture(runtime: Any, run: Callable[[], None], backends: Sequence[NpuAttention], pool: Any) -> NpuGraph:
    """See `devices.base.Device.capture`; `pool` is memory that all graphs of a device share."""
    for backend in backends:
        backend.fix()
    for _ in range(WARM_UPS):
        run()
    runtime.synchronize()
    calls = _Calls()
    for backend in backends:
        backend.record(calls.of(backend))
    graph = runtime.NPUGraph()
    try:
        with runtime.graph(graph, pool=pool, auto_dispatch_capture=True):
            run()
    except RuntimeError as error:
        for cause in _causes(error):
            if isinstance(cause, torch.OutOfMemoryError) or any(sign in str(cause) for sign in NO_ROOM):
                raise NoRoomForGraph(str(cause)) from error
        raise
    finally:
        for backend in backends:
            backend.record(None)
    return NpuGraph(runtime, graph, calls.all)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it replaced: ending a failed capture fails as well."""
    while error is not None:
        yield error
        error = error.__context__


class _Calls:
    """Calls of several backends in the order in which they were made."""

    def __init__(self) -> None:
        self.all: list[tuple[str, NpuAttention]] = []

    def of(self, backend: NpuAttention) -> Callable[[str], None]:
        return lambda operator: self.all.append((operator, backend))
