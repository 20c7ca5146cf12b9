"""A GPU's stand-in: the runtime of the CUDA device over CPU memory. Its kernels run in Triton's interpreter.

Only for a process that was started with TRITON_INTERPRET=1. It is no emulator: a graph is what it was recorded from,
run again; copies are done when they return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import devices.cuda
from devices.base import KernelChoice, MemoryInfo
from devices.cuda.device import CudaDevice


class InterpretedRuntime:
    """See `devices.cuda.runtime.Runtime`.

    Attributes:
        num_recorded, num_replayed: graphs, and launches of them.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.description = "interpreted on the CPU"
        self.num_sms = 4
        self.num_recorded = self.num_replayed = 0

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def synchronize(self) -> None: ...

    def host_buffer(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=torch.int32)

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """A real graph writes its results where they were when it was recorded; here they are copied there."""
        self.num_recorded += 1
        run()
        outputs: list[torch.Tensor] = inspect.getclosurevars(inspect.unwrap(run)).nonlocals["outputs"]
        first = outputs[0]

        def replay() -> None:
            self.num_replayed += 1
            run()
            first.copy_(outputs[0])

        return replay


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have "cuda" open on the stand-in until the test ends."""

    def open_device(name: str, kernels: KernelChoice = "auto") -> CudaDevice:
        return CudaDevice(InterpretedRuntime(), kernels)

    monkeypatch.setattr(devices.cuda, "open_device", open_device)
