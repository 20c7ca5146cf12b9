"""Every deliberate fault is caught by the checker that must catch it: the simulator sees what it claims to see."""

from __future__ import annotations

import pytest
from sim.faults import FAULTS, Fault, seeds_to_catch


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.inject(monkeypatch)
    others: set[str] = set()
    if seeds_to_catch(fault, others=others) is None:
        pytest.fail(f"{fault.max_seeds} seeds of {fault.profile!r}: not caught by {fault.checker!r}, but by {others}")


def test_there_is_a_fault_for_every_checker() -> None:
    looking = {"audit", "idle", "tokens", "reports", "deadlines", "hits", "progress", "fairness", "fences", "width"}
    looking |= {"logprobs", "turn hits", "demotions", "evictions", "timeouts"}
    promising = {"arrive", "abort", "retract", "flush", "bump", "fork", "branch"}
    assert {fault.checker for fault in FAULTS} >= {"crash", *looking, *promising}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


def test_a_fault_whose_line_has_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Fault("gone", "engine.core:EngineCore.abort", "a line that nobody wrote", "", "audit")
    with pytest.raises(AssertionError, match="0 times"):
        gone.inject(monkeypatch)
