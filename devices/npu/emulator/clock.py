"""A model of time: what launches would cost the host and the device, so that overlap can be studied. Off by default.

Two clocks run. The host's advances by a launch cost for each operator and by what the caller says it computed
(`host_works`); each stream's advances by the operator's cost, from bytes moved and multiplications made. A host sync
moves the host to where the device is. **Every figure is an estimate**: made from published peaks, never measured on an
NPU, good for comparing two schedules and for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from devices.npu.emulator.launch import Launch, all_tensors, set_clock
from devices.npu.emulator.streams import Stream, current_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Estimated figures of one die.

    Attributes:
        launch_s: host time of an operator launched from Python.
        replay_launch_s: the same inside a graph's replay.
        start_s: device time that any operator takes to start and end.
        bytes_per_s: of device memory.
        multiplications_per_s: multiply-adds in bf16.
    """

    launch_s: float = 10e-6
    replay_launch_s: float = 0.3e-6
    start_s: float = 3e-6
    bytes_per_s: float = 1.0e12
    multiplications_per_s: float = 120e12


ATLAS_A2 = LatencyModel()
ATLAS_A3 = LatencyModel(bytes_per_s=1.2e12, multiplications_per_s=140e12)


class DeviceClock:
    """Virtual time of the host and of every stream, in seconds from 0.

    Attributes:
        host_s: the host's time.
        device_s: time that the device computed, over all streams.
        waited_s: time that the host waited for the device.
    """

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.host_s = self.device_s = self.waited_s = 0.0
        self._busy: dict[Stream, float] = {}
        self._lock = threading.Lock()

    def charge(self, launch: Launch, *, replayed: bool = False) -> None:
        """A launch: host time to send it, then device time on the current stream."""
        stream, cost = current_stream(), self._cost(launch)
        with self._lock:
            self.host_s += self.model.replay_launch_s if replayed else self.model.launch_s
            self._busy[stream] = max(self._busy.get(stream, 0.0), self.host_s) + cost
            self.device_s += cost

    def _cost(self, launch: Launch) -> float:
        tensors = [*all_tensors((*launch.args, *launch.kwargs.values())), *launch.results]
        moved = sum(min(tensor.numel() * tensor.element_size(), _touched(launch, tensor)) for tensor in tensors)
        return (
            self.model.start_s
            + moved / self.model.bytes_per_s
            + _multiplications(launch) / self.model.multiplications_per_s
        )

    def host_works(self, seconds: float) -> None:
        """The host computes something of its own."""
        with self._lock:
            self.host_s += seconds

    def wait(self) -> None:
        with self._lock:
            ready = max(self._busy.values(), default=0.0)
            self.waited_s += max(0.0, ready - self.host_s)
            self.host_s = max(self.host_s, ready)

    def now(self) -> float:
        return self.host_s

    def busy_until(self, stream: Stream) -> float:
        return max(self._busy.get(stream, 0.0), self.host_s)

    def hold(self, stream: Stream, until_s: float) -> None:
        with self._lock:
            self._busy[stream] = max(self._busy.get(stream, 0.0), until_s)

    def idle(self, stream: Stream) -> bool:
        return self._busy.get(stream, 0.0) <= self.host_s


_CACHES = {"key_cache", "value_cache", "key", "value", "input"}


def _touched(launch: Launch, tensor: torch.Tensor) -> float:
    """Bytes of `tensor` that the operator reads or writes: of a paged cache, what the lengths or the new tokens say."""
    kwargs = launch.kwargs
    if not any(kwargs.get(name) is tensor for name in _CACHES):
        return float("inf")
    lens = next((kwargs[name] for name in _KEY_LENS if kwargs.get(name) is not None), None)
    if lens is not None and kwargs.get("block_table") is not None:
        per_token = (
            tensor.shape[-1] if tensor.dim() == 3 else tensor.shape[-1] * tensor.shape[-3 if tensor.dim() > 3 else -2]
        )
        return float(sum(map(int, lens)) * per_token * tensor.element_size())
    new = kwargs.get("updates")
    if isinstance(new, torch.Tensor):
        return float(new.numel() * new.element_size())
    return float("inf")


_KEY_LENS = ("actual_seq_lengths_kv", "actual_seq_kvlen", "context_lens")
_PRODUCTS = ("mm", "bmm", "addmm", "linear", "matmul")


def _multiplications(launch: Launch) -> float:
    """Multiply-adds of a matrix product: elements of the result times the shared dimension; 0 for anything else, which
    memory bounds."""
    name = launch.name.removeprefix("aten::").partition(".")[0]
    if name not in _PRODUCTS or not launch.results:
        return 0.0
    operands = [tensor for tensor in launch.args if isinstance(tensor, torch.Tensor) and tensor.dim() > 1]
    return float(launch.results[0].numel() * operands[0].shape[-1]) if operands else 0.0


@contextmanager
def simulated_time(model: LatencyModel = ATLAS_A2) -> Iterator[DeviceClock]:
    """Inside, launches and waits of the emulated device are charged to the clock."""
    clock = DeviceClock(model)
    set_clock(clock)
    try:
        yield clock
    finally:
        set_clock(None)
