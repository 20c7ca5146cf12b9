"""What the device asks of CUDA itself: memory, waiting, page-locked buffers, graphs. Everything else is kernels.

It is a seam so that the whole device can run where there is no GPU: tests give it a runtime over the CPU, in a process
in which kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from devices.base import MemoryInfo

WARM_UPS = 2
"""Runs before a capture: the first compiles kernels and lets libraries allocate, which a capture forbids."""


class Runtime(Protocol):
    """One GPU.

    Attributes:
        num_sms: multiprocessors, which attention splits rows to fill.
    """

    torch_device: torch.device
    description: str
    num_sms: int

    def memory(self) -> MemoryInfo: ...

    def synchronize(self) -> None: ...

    def host_buffer(self, num_elements: int) -> torch.Tensor:
        """int32 [num_elements] on the host, from where a copy to the GPU needs no second one."""
        ...

    def mark(self) -> Callable[[], None]:
        """Waits, when called, until what was launched before the mark is done."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches; the result launches it again, on the same tensors."""
        ...


class CudaRuntime:
    """The GPU of this process (`CUDA_VISIBLE_DEVICES` chooses which).

    All graphs share one pool of memory: only one of them runs at a time.
    """

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.num_sms = properties.multi_processor_count
        self.description = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{self.num_sms} multiprocessors, torch {torch.__version__}"
        )
        self._pool: Any = None

    def memory(self) -> MemoryInfo:
        available, total = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return MemoryInfo(total, available + held)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def host_buffer(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=torch.int32, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph.replay
