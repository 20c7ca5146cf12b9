"""The arithmetic of `bench_peers`: samples of interleaved rounds in, ratios with their spread out. It runs nothing.

A ratio is taken inside one round, Rung's rate over the peer's rate of the same round, because the machine is the same
then; the median and the spread are of these ratios, never of rates from different rounds. A sample that got too little
of its threads was disturbed by another program: it takes its round out of every ratio it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RUNG = "rung"


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine, one measure ("prefill 512", "decode 8"), one round; `busy` is CPU seconds a second."""

    engine: str
    measure: str
    round: int
    tokens_per_s: float
    busy: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rung against one peer in one measure.

    Attributes:
        rung_tokens_per_s, peer_tokens_per_s: medians of the rounds that count, for orientation.
        ratio, low, high: median, smallest and largest of the paired ratios; above 1, Rung is faster.
        num_rounds, num_dropped: rounds that count, and rounds left out as disturbed.
    """

    peer: str
    measure: str
    rung_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    low: float
    high: float
    num_rounds: int
    num_dropped: int


def compare(samples: Sequence[Sample], peer: str, measure: str, min_busy: float) -> Comparison | None:
    """Pair the rounds of Rung and a peer; None when no round counts.

    Args:
        min_busy: CPU seconds a second that a sample must have had.
    """
    mine, theirs = (
        {sample.round: sample for sample in samples if (sample.engine, sample.measure) == (engine, measure)}
        for engine in (RUNG, peer)
    )
    both = sorted(mine.keys() & theirs.keys())
    pairs = [(mine[i], theirs[i]) for i in both if min(mine[i].busy, theirs[i].busy) >= min_busy]
    if not pairs:
        return None
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    return Comparison(
        peer=peer,
        measure=measure,
        rung_tokens_per_s=median(one.tokens_per_s for one, _ in pairs),
        peer_tokens_per_s=median(other.tokens_per_s for _, other in pairs),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        num_rounds=len(pairs),
        num_dropped=len(both) - len(pairs),
    )


def turns(engines: Sequence[str], round_index: int) -> list[str]:
    """The order of a round: each engine goes first in turn, so that none always follows the same neighbour."""
    shift = round_index % len(engines)
    return [*engines[shift:], *engines[:shift]]
