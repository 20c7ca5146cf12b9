"""Where every launch of the emulated device passes: what a capture in progress records, and what the clock charges.

A launch is a host function over host faces of device memory, with the tensors that it made. The capture, when there is
one, keeps it for replay; the clock, when one is set, charges its cost. Both are off in the common case, which costs
one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from devices.npu.emulator.counters import note_operator, note_sync, note_upload
from devices.npu.emulator.rules import GRAPHS, ContractViolation, strictness

if TYPE_CHECKING:
    from devices.npu.emulator.streams import Stream


@dataclass(slots=True)
class Launch:
    """One launch, in a form that can run again on the same memory.

    Attributes:
        name: the operator's.
        run: called with the arguments; returns a tensor, a sequence of tensors or nothing.
        args, kwargs: host faces of device tensors, and plain values.
        results: host faces of what it made; a replay copies its new results there.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]

    def again(self) -> None:
        """Run once more; new results go where the first ones lie."""
        made = tensors_of(self.run(*self.args, **self.kwargs))
        if self.results:
            given = {id(tensor) for tensor in all_tensors((*self.args, *self.kwargs.values()))}
            new = (tensor for tensor in made if id(tensor) not in given)
            for target, source in zip(self.results, new, strict=True):
                target.copy_(source)


class Recorder(Protocol):
    """A capture in progress."""

    def record(self, launch: Launch) -> None: ...


class Clock(Protocol):
    """A model of how long launches take."""

    def charge(self, launch: Launch, *, replayed: bool = False) -> None:
        """Put a launch on the current stream's timeline."""
        ...

    def wait(self) -> None:
        """The host waits for everything launched."""
        ...

    def now(self) -> float:
        """The host's time, seconds."""
        ...

    def busy_until(self, stream: Stream) -> float:
        """When the stream will have done what it was given, seconds."""
        ...

    def hold(self, stream: Stream, until_s: float) -> None:
        """The stream starts nothing before `until_s`."""
        ...

    def idle(self, stream: Stream) -> bool: ...


class _Observers:
    """Who watches the process's launches; captures are one at a time in a process, as in torch_npu."""

    def __init__(self) -> None:
        self.capture: Recorder | None = None
        self.clock: Clock | None = None
        self.anyone = False

    def watch(self, *, capture: Recorder | None, clock: Clock | None) -> None:
        self.capture, self.clock = capture, clock
        self.anyone = capture is not None or clock is not None


observers = _Observers()


def set_capture(capture: Recorder | None) -> None:
    observers.watch(capture=capture, clock=observers.clock)


def set_clock(clock: Clock | None) -> None:
    observers.watch(capture=observers.capture, clock=clock)


def tensors_of(value: object) -> tuple[torch.Tensor, ...]:
    """The tensors in an operator's result."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(item for item in value if isinstance(item, torch.Tensor))
    return ()


def all_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from all_tensors(value)


def launched(
    name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], made: tuple[torch.Tensor, ...]
) -> None:
    """An operator ran; `made` are the tensors that did not exist before."""
    note_operator(name)
    if observers.anyone:
        launch = Launch(name, run, tuple(args), kwargs, made)
        if observers.clock is not None:
            observers.clock.charge(launch)
        if observers.capture is not None:
            observers.capture.record(launch)


def host_waits(kind: str) -> None:
    """The host reads something that only the device knows.

    Raises:
        ContractViolation: "sync-in-capture", inside a capture; an NPU ends the capture with an error.
    """
    note_sync(kind)
    if observers.capture is not None and strictness().graphs:
        raise ContractViolation(
            "sync-in-capture", kind, f"the host waits for the device inside a graph capture ({GRAPHS}: capture errors)"
        )
    if observers.clock is not None:
        observers.clock.wait()


def host_uploads(pinned: bool) -> None:
    """A copy from host to device begins.

    Raises:
        ContractViolation: "upload-in-capture": a copy from pageable memory cannot be captured.
    """
    note_upload()
    if observers.capture is not None and not pinned and strictness().graphs:
        raise ContractViolation(
            "upload-in-capture",
            "copy_",
            "a blocking copy from host memory inside a graph capture; copy into a buffer before it, or from pinned "
            f"memory with non_blocking=True ({GRAPHS}: capture errors)",
        )
