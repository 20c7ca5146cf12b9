"""Devices, streams and events of the emulated NPU, with the names that torch_npu gives them.

Work runs when it is launched, so a stream orders nothing and an event has always happened. They still count the host's
waits, and when a clock is set (`clock.py`) they carry its times, which is what lets overlap be studied.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from devices.npu.emulator.launch import host_waits, observers

NUM_DEVICES = 2
"""Enough to test that an index is kept and that tensors of two devices do not meet."""

_stream_ids = itertools.count(1)


class Stream:
    """A queue of work on one device; `stream_id` 0 is the default stream of its device."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        index = torch.device(device).index if device is not None and not isinstance(device, int) else device
        self.device_index = current_device() if index is None else index
        self.device = torch.device("npu", self.device_index)
        self.stream_id = next(_stream_ids) if stream_id is None else stream_id
        self.priority = priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.device_index, other.stream_id) == (
            self.device_index,
            self.stream_id,
        )

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __repr__(self) -> str:
        return f"<emulated torch.npu.Stream {self.stream_id} on npu:{self.device_index}>"

    def synchronize(self) -> None:
        host_waits("synchronize")

    def query(self) -> bool:
        return observers.clock is None or observers.clock.idle(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in a stream. Its time is the clock's, else the host's."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self.at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        clock = observers.clock
        self.at_s = time.perf_counter() if clock is None else clock.busy_until(stream or current_stream())

    def wait(self, stream: Stream | None = None) -> None:
        if observers.clock is not None and self.at_s is not None:
            observers.clock.hold(stream or current_stream(), self.at_s)

    def query(self) -> bool:
        return observers.clock is None or self.at_s is None or observers.clock.now() >= self.at_s

    def synchronize(self) -> None:
        host_waits("synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`."""
        if self.at_s is None or end_event.at_s is None or not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("elapsed_time needs two recorded events made with enable_timing=True")
        return (end_event.at_s - self.at_s) * 1e3


class ExternalEvent(Event):
    """An event that a captured graph waits for and somebody outside records; `reset` makes it wait again."""

    def reset(self, stream: Stream | None = None) -> None:
        self.at_s = None


class _Current(threading.local):
    """Each thread's device and streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_current = _Current()


def current_device() -> int:
    return _current.device


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        if index >= NUM_DEVICES:
            raise RuntimeError(f"npu:{index} does not exist; the emulator has {NUM_DEVICES} devices")
        _current.device = index


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    index = Stream(device, stream_id=0).device_index
    return _current.streams.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    _current.streams[stream.device_index] = stream


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """`torch.npu.stream`: inside, `stream` is the current one."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    host_waits("synchronize")
