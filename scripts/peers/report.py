"""A whole run of `bench_peers`, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratios import RUNG, Comparison, Sample
from starts import Start, start_lines


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run; `skipped` gives the reason for each peer that was not compared to the end."""

    machine: str
    model: str
    weights: str
    quantization: str | None
    threads: int
    load_average: tuple[float, float, float]
    min_busy: float
    wall_s: float
    versions: dict[str, str]
    skipped: dict[str, str]
    samples: list[Sample]
    comparisons: list[Comparison]
    starts: list[Start]


def lines_of(report: Report, measures: Sequence[str]) -> list[str]:
    """The report as text; a pair without an undisturbed round says so."""
    versions = [f"{name:<14}{version}" for name, version in report.versions.items()]
    lines = [f"{report.model} {report.weights}, {report.threads} threads, {report.machine}", *versions]
    if measures:
        lines += ["", f"{'peer':<14}{'measure':<13}{'rung':>9}{'peer':>9}   ratio (min - max)       rounds"]
    found = {(one.peer, one.measure): one for one in report.comparisons}
    for peer in report.versions:
        for what in measures if peer != RUNG and peer not in report.skipped else ():
            one = found.get((peer, what))
            if one is None:
                lines.append(f"{peer:<14}{what:<13}  no round got {report.min_busy:.2f} CPU seconds a second for both")
                continue
            spread = f"{one.ratio:.2f} ({one.low:.2f} - {one.high:.2f})"
            rounds = f"{one.num_rounds} of {one.num_rounds + one.num_dropped}"
            rates = f"{one.rung_tokens_per_s:9.1f}{one.peer_tokens_per_s:9.1f}"
            lines.append(f"{peer:<14}{what:<13}{rates}   {spread:<22}  {rounds}")
    lines += start_lines(report.starts)
    return [*lines, *(f"{name:<14}skipped: {reason}" for name, reason in report.skipped.items())]
