"""What happened on the emulated device: host syncs by kind, operator calls by name, and how the vendor's were called.

A test reads the difference over a block (`counting`) to assert that a decode step waits for the device nowhere; the
conformance test reads `recorded_calls` to compare every call that the package makes with the vendor's schemas.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NpuCall:
    """One form in which a vendor operator was called.

    Attributes:
        name: with namespace, e.g. "npu::npu_rms_norm".
        overload: "default", "out", ...
        positional: kinds of the positional arguments, in order.
        keywords: (name, kind) of the keyword arguments, sorted; a kind is a tensor's dtype, else a type's name.
    """

    name: str
    overload: str
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over a block of code.

    Attributes:
        syncs: places where the host waited for the device: "item", "cpu", "nonzero", "unique", "boolean index",
            "synchronize", ...
        uploads: copies from host to device.
        operators: launches by operator's name, the vendor's and aten's.
    """

    syncs: Counter[str] = field(default_factory=Counter)
    uploads: int = 0
    operators: Counter[str] = field(default_factory=Counter)

    @property
    def num_syncs(self) -> int:
        return self.syncs.total()

    def minus(self, other: Counts) -> Counts:
        return Counts(self.syncs - other.syncs, self.uploads - other.uploads, self.operators - other.operators)


Kind = Any
"""Of an argument, cheap to make and hashable: a dtype, a type, or (list type, kind of the first item)."""

_Form = tuple[str, str, tuple[Kind, ...], tuple[tuple[str, Kind], ...]]


class _Ledger:
    """The process's running totals; increments are guarded, for the device serves several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.syncs: Counter[str] = Counter()
        self.uploads = 0
        self.operators: Counter[str] = Counter()
        self.calls: Counter[_Form] = Counter()


_ledger = _Ledger()


def note_sync(kind: str) -> None:
    with _ledger.lock:
        _ledger.syncs[kind] += 1


def note_upload() -> None:
    with _ledger.lock:
        _ledger.uploads += 1


def note_operator(name: str) -> None:
    with _ledger.lock:
        _ledger.operators[name] += 1


def note_call(name: str, overload: str, positional: tuple[Kind, ...], keywords: tuple[tuple[str, Kind], ...]) -> None:
    with _ledger.lock:
        _ledger.calls[name, overload, positional, keywords] += 1


def counters() -> Counts:
    """Totals since the process started; a snapshot."""
    with _ledger.lock:
        return Counts(Counter(_ledger.syncs), _ledger.uploads, Counter(_ledger.operators))


def recorded_calls() -> Counter[NpuCall]:
    """Every form in which a vendor operator was called so far, and how often."""
    with _ledger.lock:
        forms = dict(_ledger.calls)
    calls: Counter[NpuCall] = Counter()
    for (name, overload, positional, keywords), count in forms.items():
        named = tuple(sorted((key, _text(kind)) for key, kind in keywords))
        calls[NpuCall(name, overload, tuple(map(_text, positional)), named)] += count
    return calls


def _text(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return f"{kind[0].__name__}[{'' if kind[1] is None else _text(kind[1])}]"
    return kind.__name__ if isinstance(kind, type) else str(kind)


class Counting:
    """Handle of `counting`: `counts` is the difference since it began, final once the block has ended."""

    def __init__(self) -> None:
        self._start = counters()
        self._end: Counts | None = None

    @property
    def counts(self) -> Counts:
        return (self._end or counters()).minus(self._start)

    def stop(self) -> None:
        self._end = counters()


@contextmanager
def counting() -> Iterator[Counting]:
    """Counts what happens inside, on all threads."""
    handle = Counting()
    try:
        yield handle
    finally:
        handle.stop()
