"""The state of a session's turn, against every move from every state, with its own token and with foreign ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mem_cache.kv_info import Turn
from session.errors import SessionBusy
from session.state import Phase, SessionState

A, B = "a", "b"


def in_phase(name: str, *, closing: bool = False) -> SessionState:
    state = SessionState()
    if name != "idle":
        turn = state.queue(A)
        if name != "queued":
            state.start(turn)
        if name == "retracted":
            state.retract(turn)
    if closing:
        state.close()
    return state


NAMES = ["idle", "queued", "running", "retracted"]
MOVES = ["start", "retract", "end"]
LEGAL = {
    ("queued", "start"): "running",
    ("retracted", "start"): "running",
    ("running", "retract"): "retracted",
    ("queued", "end"): "idle",
    ("running", "end"): "idle",
    ("retracted", "end"): "idle",
}


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", NAMES)
def test_every_move_from_every_state(name, move, closing):
    state = in_phase(name, closing=closing)
    turn = state.turn or Turn(A, 0)
    moved = getattr(state, move)(turn)
    after = LEGAL.get((name, move))
    assert bool(moved) is (after is not None)
    assert state.activity is Phase(after or name)
    if closing:
        assert state.phase is (Phase.CLOSED if state.turn is None else Phase.CLOSING)
    else:
        assert state.phase is state.activity


@pytest.mark.parametrize("foreign", [Turn(B, 0), Turn(A, 7), Turn(A, -1)])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_token_changes_nothing(name, move, foreign):
    state = in_phase(name)
    before = (state.phase, state.turn)
    assert not getattr(state, move)(foreign)
    assert (state.phase, state.turn) == before


def test_a_retraction_is_not_a_finish_and_keeps_the_owner():
    state = in_phase("running")
    first = state.turn
    second = state.retract(first)
    assert (second.request_id, second.attempt) == (A, 1)
    with pytest.raises(SessionBusy, match="retracted"):
        state.queue(B)
    assert not state.start(first), "the first attempt is over"
    assert state.start(second)
    assert state.retract(second) == replace(second, attempt=2)


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_overlapping_turn_is_refused_and_its_end_does_not_free_the_owner(name):
    state = in_phase(name)
    owner = state.turn
    with pytest.raises(SessionBusy, match=name):
        state.queue(B)
    assert not state.end(Turn(B, 0))
    assert state.turn == owner


@pytest.mark.parametrize("name", NAMES)
def test_closing_waits_for_the_owner_and_happens_once(name):
    state = in_phase(name)
    assert state.close() is (name == "idle")
    assert state.close() is (name == "idle")
    with pytest.raises(SessionBusy, match="clos"):
        state.queue(B)
    if name != "idle":
        assert state.phase is Phase.CLOSING
        state.end(state.turn)
    assert state.phase is Phase.CLOSED
    assert state.close()
