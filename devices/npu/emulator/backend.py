"""`torch.npu`: the module that torch_npu would register for the device, as far as an engine uses it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from devices.npu.emulator import graph as graphs
from devices.npu.emulator import streams

DEVICE_NAME = "Ascend 910B4 (emulated)"
"""What `get_device_name` says; the first word is a real SoC's, so that tables by SoC find it."""


def memory_info() -> tuple[int, int]:
    """Free and total bytes: the host's, for that is where the emulated device's memory lies."""
    fields: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["MemAvailable"], fields["MemTotal"]


class Backend:
    """Functions and classes of `torch.npu`; torch also calls some of them itself."""

    Stream = streams.Stream
    Event = streams.Event
    ExternalEvent = streams.ExternalEvent
    NPUGraph = graphs.NPUGraph
    graph = graphs.graph
    emulated = True
    """Only the emulator has it: how code that prints may say so."""

    current_device = staticmethod(streams.current_device)
    set_device = staticmethod(streams.set_device)
    default_stream = staticmethod(streams.default_stream)
    current_stream = staticmethod(streams.current_stream)
    set_stream = staticmethod(streams.set_stream)
    stream = staticmethod(streams.stream)
    synchronize = staticmethod(streams.synchronize)
    graph_pool_handle = staticmethod(graphs.graph_pool_handle)
    is_current_stream_capturing = staticmethod(graphs.is_current_stream_capturing)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        return None

    def device_count(self) -> int:
        return streams.NUM_DEVICES

    def get_device_name(self, device: Any = None) -> str:
        return DEVICE_NAME

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=DEVICE_NAME, total_memory=memory_info()[1])

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return memory_info()

    def empty_cache(self) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False
