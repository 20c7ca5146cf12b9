"""The log of a conversation: turns see the finished part and their own tail, and cost what is new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from session.errors import SessionError
from session.log import FinishedTurn, TokenLog


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def say(log: TokenLog, prompt: list[int], answer: list[int], name: str = "r") -> None:
    """A turn from begin to finish."""
    start = len(log)
    buffer = log.open_tail(ids(*prompt), start + len(prompt) + len(answer))
    buffer[start + len(prompt) :] = answer
    log.finish(name, start + len(prompt), len(buffer))


def test_finished_turns_are_the_history():
    log = TokenLog()
    say(log, [1, 2], [3], "a")
    say(log, [4], [5, 6], "b")
    assert log.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert log.turns == [FinishedTurn("a", 0, 2, 3), FinishedTurn("b", 3, 4, 6)]
    assert [log.end_of_turn(n) for n in range(3)] == [0, 3, 6]


def test_an_aborted_turn_leaves_nothing_behind():
    log = TokenLog()
    say(log, [1], [2])
    buffer = log.open_tail(ids(7, 8), 10)
    buffer[4:6] = (9, 9)
    assert log.tokens.tolist() == [1, 2]
    assert log.readable(6).tolist() == [1, 2, 7, 8, 9, 9]
    say(log, [3], [4])
    assert log.tokens.tolist() == [1, 2, 3, 4]


def test_nobody_writes_through_what_the_log_shows():
    log = TokenLog()
    say(log, [1], [2])
    with pytest.raises(ValueError, match="read-only"):
        log.tokens[0] = 9


def test_a_turn_copies_the_history_once_in_a_while_only():
    """Growing doubles: over many turns each token is copied about twice."""
    log = TokenLog()
    moves, before = 0, None
    for _ in range(2000):
        buffer = log.open_tail(ids(1, 2), len(log) + 4)
        base = buffer.base if buffer.base is not None else buffer
        moves += base is not before
        before = base
        log.finish("r", len(log) + 2, len(log) + 4)
    assert moves < 12


@pytest.mark.parametrize("length", range(8))
def test_truncating_keeps_whole_turns_and_the_front_of_a_cut_one(length):
    log = TokenLog()
    say(log, [1, 2], [3], "a")
    say(log, [4], [5, 6], "b")
    if length > 6:
        with pytest.raises(SessionError, match="6 tokens"):
            log.truncate(length)
        return
    log.truncate(length)
    assert log.tokens.tolist() == [1, 2, 3, 4, 5, 6][:length]
    assert [turn.request_id for turn in log.turns] == ["a", "b"][: (length > 0) + (length > 3)]
    assert all(turn.start < turn.end and turn.start <= turn.prompt_end <= turn.end for turn in log.turns)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=5)))
)
def test_a_copy_goes_its_own_way(turns):
    log = TokenLog()
    expected: list[int] = []
    for prompt, answer in turns:
        say(log, prompt, answer)
        expected += [*prompt, *answer]
    for length in range(len(expected) + 1):
        other = log.copy(length)
        say(other, [77], [78])
        assert other.tokens.tolist() == [*expected[:length], 77, 78]
        assert log.tokens.tolist() == expected


@pytest.mark.parametrize("turn", [-1, 2])
def test_there_is_no_end_of_a_turn_that_was_not(turn):
    log = TokenLog()
    say(log, [1], [2])
    with pytest.raises(SessionError, match="1 turns"):
        log.end_of_turn(turn)
