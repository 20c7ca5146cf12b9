"""What was measured, as a table for people and JSON for machines; the arithmetic between the two is tested on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reaches at best, measured in the same run: a large copy (read and written), a large product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """The time below which no kernel can be."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Row:
    """One kernel at one shape.

    Attributes:
        error, tolerance: relative norm of the difference from fp32, or the share of wrong results.
        seconds: a launch, the median of graph replays; None when nothing was timed.
        target: share of the floor's speed that it should reach; most_s: or the time that it should stay under.
        failure: why it did not run; empty when it did.
    """

    name: str
    error: float
    tolerance: float
    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    target: float | None = None
    failure: str = ""
    most_s: float | None = None

    @property
    def is_right(self) -> bool:
        return not self.failure and self.error <= self.tolerance  # NaN is not


@dataclass
class Report:
    """Everything of a run. `peers` and `engine`: name -> text or numbers, as they came."""

    gpu: str
    versions: str
    ceilings: Ceilings | None = None
    rows: list[Row] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Every kernel, and every configuration of the engine; an engine that did not run is not right."""
        matrix = self.engine.get("matrix", {})
        return all(row.is_right for row in self.rows) and isinstance(matrix, dict) and all(matrix.values())

    def table(self) -> str:
        head = ("kernel", "error", "us", "floor us", "share", "target", "verdict")
        lines = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = []
        for line in lines:
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            text.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
        if self.ceilings is not None:
            copied, multiplied = self.ceilings.bytes_per_s / 1e12, self.ceilings.flops_per_s / 1e12
            rates = f"{copied:.2f} TB/s copied, {multiplied:.0f} TFLOP/s bf16"
            text.insert(0, f"{self.gpu}; {self.versions}; ceilings of this run: {rates}")
        else:
            text.insert(0, f"{self.gpu}; {self.versions}; nothing was timed")
        for title, found in (("peers", self.peers), ("engine", self.engine)):
            text += [f"{title}: {name}: {value}" for name, value in found.items()]
        text += [f"skipped: {what}" for what in self.skipped]
        return "\n".join(text)

    def _cells(self, row: Row) -> tuple[str, ...]:
        if row.failure:
            return (row.name, "-", "-", "-", "-", "-", f"FAILED: {row.failure}")
        error = f"{row.error:.1e}"
        verdict = "right" if row.is_right else f"WRONG (> {row.tolerance:.0e})"
        if row.seconds is None or self.ceilings is None:
            return (row.name, error, "-", "-", "-", "-", verdict)
        floor_s = self.ceilings.floor_s(row.num_bytes, row.flops)
        share = floor_s / row.seconds
        target = "-" if row.target is None else f"{row.target:.2f}"
        if row.is_right and row.target is not None:
            verdict = "meets" if share >= row.target else "misses"
        if row.most_s is not None:
            target = f"{row.most_s * 1e6:.0f} us"
            verdict = verdict if not row.is_right else "meets" if row.seconds <= row.most_s else "misses"
        return (row.name, error, f"{row.seconds * 1e6:.1f}", f"{floor_s * 1e6:.1f}", f"{share:.2f}", target, verdict)

    def write(self, path: Path) -> None:
        """The same as JSON, with the shares."""
        values = asdict(self)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain["share"] = None
            if row.seconds is not None and self.ceilings is not None:
                plain["share"] = self.ceilings.floor_s(row.num_bytes, row.flops) / row.seconds
            plain["is_right"] = row.is_right
        path.write_text(json.dumps(values | {"is_right": self.is_right}, indent=1, default=str) + "\n")


def relative_error(got: Any, want: Any) -> float:
    """Norm of the difference over the norm, in fp32."""
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def share_wrong(got: Sequence[int], want: Sequence[int]) -> float:
    return sum(a != b for a, b in zip(got, want, strict=True)) / max(1, len(want))
