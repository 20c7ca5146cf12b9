"""Watches a kernel in Triton's interpreter: every address, every byte, who wrote what.

    with Meter() as meter:
        launch(...)
    meter.read_bytes

Inside the block, an access outside the tensors that the kernel was given raises at once (alone, the interpreter reads
the heap or ends the process), and so does a race: a program of one launch that writes what another program of that
launch reads or writes. The interpreter runs programs one after another, so it would never show one. Bytes count what
masks let through, repeated reads included: that is what a GPU asks of its caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter

NOBODY, MANY = -1, -2


class OutOfBounds(AssertionError):
    """A kernel touched memory that no argument of its launch owns."""


class Race(AssertionError):
    """Two programs of one launch touched the same byte, and one of them wrote."""


@dataclass
class _Region:
    """One storage of a launch; arrays have an entry for each byte. Both hold a program's number, NOBODY or MANY."""

    start: int
    writer: npt.NDArray[np.int32]
    reader: npt.NDArray[np.int32]

    @classmethod
    def of(cls, tensor: Any) -> _Region:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return cls(storage.data_ptr(), np.full(size, NOBODY, np.int32), np.full(size, NOBODY, np.int32))


@dataclass
class Meter:
    """Sums over all launches inside the block.

    Attributes:
        read_bytes, written_bytes: through unmasked lanes.
        dot_flops: multiplications and additions of `tl.dot`, padded rows included.
        launches: number of kernels launched.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    dot_flops: int = 0
    launches: int = 0
    _regions: list[_Region] = field(default_factory=list)

    def __enter__(self) -> Meter:
        global _active
        _install()
        self._outer, _active = _active, self
        return self

    def __exit__(self, *_: object) -> None:
        global _active  # noqa: PLW0603
        _active = self._outer

    def begin_launch(self, arguments: list[Any]) -> None:
        self.launches += 1
        by_start: dict[int, _Region] = {}
        for tensor in arguments:
            if hasattr(tensor, "untyped_storage") and tensor.untyped_storage().nbytes():
                by_start.setdefault(tensor.untyped_storage().data_ptr(), _Region.of(tensor))
        self._regions = sorted(by_start.values(), key=lambda region: region.start)

    def access(self, pointers: Handle, mask: Handle, program: int, kind: str) -> None:
        """kind: "load", "store" or "atomic"."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, lanes = np.broadcast_arrays(pointers.data, mask.data)
        touched = addresses[lanes.astype(bool)].astype(np.int64).ravel()
        if not touched.size:
            return
        if kind != "load":
            self.written_bytes += touched.size * size
        if kind != "store":
            self.read_bytes += touched.size * size
        which = self._locate(touched, size, program, kind)
        for index in np.unique(which):
            region = self._regions[index]
            first = touched[which == index] - region.start
            _check_race(region, (first[:, None] + np.arange(size)).ravel(), program, kind)

    def _locate(self, touched: npt.NDArray[np.int64], size: int, program: int, kind: str) -> npt.NDArray[np.int64]:
        starts = np.array([region.start for region in self._regions], np.int64)
        ends = starts + np.array([len(region.writer) for region in self._regions], np.int64)
        which = np.searchsorted(starts, touched, side="right") - 1
        outside = (which < 0) | (touched + size > ends[np.maximum(which, 0)])
        if outside.any():
            address, nearest = int(touched[outside][0]), int(max(which[outside][0], 0))
            raise OutOfBounds(
                f"program {program}: {kind} of {size} bytes at address {address}, which is "
                f"{address - int(starts[nearest]):+d} of a tensor of {int(ends[nearest] - starts[nearest])} bytes"
            )
        return which


Handle = Any
_active: Meter | None = None
_installed = False


def _check_race(region: _Region, offsets: npt.NDArray[np.int64], program: int, kind: str) -> None:
    writer, reader = region.writer[offsets], region.reader[offsets]
    if kind == "atomic":
        return
    others = (writer != NOBODY) & (writer != program)
    if kind == "store":
        others |= (reader != NOBODY) & (reader != program)
        if len(np.unique(offsets)) != len(offsets):
            raise Race(f"program {program} stores twice to one address in one store")
        region.writer[offsets] = program
    else:
        region.reader[offsets] = np.where((reader == NOBODY) | (reader == program), program, MANY)
    if others.any():
        raise Race(
            f"program {program}: {kind} at byte {int(offsets[others][0])} of a tensor, which program "
            f"{int(max(writer[others][0], reader[others][0]))} has touched"
        )


def _program(builder: Any) -> int:
    (x, y, z), (_, ny, nz) = builder.grid_idx, builder.grid_dim
    return int((x * ny + y) * nz + z)


def _install() -> None:
    """Put the meter's questions in front of the interpreter's memory operations, once for a process."""
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, dot, begin = builder.create_atomic_rmw, builder.create_dot, interpreter.GridExecutor._init_args_hst

    def metered_load(self: Any, pointers: Handle, mask: Handle, *rest: Any) -> Handle:
        if _active:
            _active.access(pointers, mask, _program(self), "load")
        return load(self, pointers, mask, *rest)

    def metered_store(self: Any, pointers: Handle, value: Handle, mask: Handle, *rest: Any) -> Handle:
        if _active:
            _active.access(pointers, mask, _program(self), "store")
        return store(self, pointers, value, mask, *rest)

    def metered_rmw(self: Any, operation: Any, pointer: Handle, value: Handle, mask: Handle, *rest: Any) -> Handle:
        if _active:
            _active.access(pointer, mask, _program(self), "atomic")
        return rmw(self, operation, pointer, value, mask, *rest)

    def metered_dot(self: Any, a: Handle, b: Handle, accumulator: Handle, *rest: Any) -> Handle:
        if _active:
            _active.dot_flops += 2 * a.data.shape[-1] * accumulator.data.size
        return dot(self, a, b, accumulator, *rest)

    def metered_begin(self: Any, positional: Any, named: Any) -> Any:
        on_host = begin(self, positional, named)
        if _active:
            _active.begin_launch([*on_host[0], *on_host[1].values()])
        return on_host

    builder.create_masked_load, builder.create_masked_store = metered_load, metered_store
    builder.create_atomic_rmw, builder.create_dot = metered_rmw, metered_dot
    interpreter.GridExecutor._init_args_hst = metered_begin
