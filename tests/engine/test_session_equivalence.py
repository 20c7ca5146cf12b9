"""Turns through a session give the tokens of one long prompt, whatever happens between and inside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import GREEDY, assert_idle, finest_page, finish_all, make_llm, run, run_turn, start_turn

from engine import LLM, SamplingParams
from engine.request import RequestStatus

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("on_device")]

PAGES = [1, 16, 128]
UNITS = ["token", "page"]
RNG = np.random.default_rng(7)
TURNS = [RNG.integers(3, 300, size).tolist() for size in (37, 1, 20, 64, 5)]
LONG_TURNS = [RNG.integers(3, 300, 112).tolist(), *TURNS[1:]]
"""With answers, a history that goes beyond a page of 128 in its second turn."""
SHORT = SamplingParams(temperature=0.0, max_new_tokens=11, ignore_eos=True)


def one_by_one(path: Path, turns: list[list[int]], params: SamplingParams = SHORT) -> list[list[int]]:
    """The answers to each turn when everything before it is one prompt, on an engine without any cache."""
    llm = make_llm(path, page_size=finest_page(), disable_radix_cache=True)
    context: list[int] = []
    answers = []
    for turn in turns:
        context += turn
        answers.append(run(llm, [context], params)[0].output_ids)
        context += answers[-1]
    return answers


@pytest.fixture(scope="module")
def expected(on_device: str, model_path: Path) -> list[list[int]]:
    return one_by_one(model_path, TURNS)


def talk(llm: LLM, session_id: str, turns: list[list[int]] = TURNS, params: SamplingParams = SHORT) -> list[list[int]]:
    return [run_turn(llm, session_id, turn, params).output_ids for turn in turns]


@pytest.mark.parametrize("chunk", [-1, 64, 128])
@pytest.mark.parametrize("no_cache", [False, True], ids=["tree", "no-tree"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_turns_equal_one_long_prompt(model_path, expected, page_size, unit, no_cache, chunk):
    if chunk != -1 and chunk < page_size and unit == "page":
        pytest.skip("no chunk could end at a page border")
    llm = make_llm(
        model_path, page_size=page_size, resume_unit=unit, disable_radix_cache=no_cache, chunked_prefill_size=chunk
    )
    session = llm.core.sessions.open()
    assert talk(llm, session.id) == expected
    assert [turn.end - turn.prompt_end for turn in session.log.turns] == [11] * 5
    assert session.stats.num_turns == 5
    if unit == "token":
        # All but the first turn compute their new tokens and the one sampled last, nothing else.
        assert session.stats.computed_tokens == sum(map(len, TURNS)) + len(TURNS) - 1
        assert session.stats.lost_to_alignment_tokens == 0
    elif page_size > 1:
        assert session.stats.lost_to_alignment_tokens > 0
    assert llm.core.close_session(session.id)
    assert_idle(llm)


def between_turns(llm: LLM, what: str, session_id: str) -> None:
    """Force something on an idle session."""
    session = llm.core.sessions.get(session_id)
    if what == "demotion":
        llm.core.sessions.demote_all()
    elif what == "flush":
        llm.core.flush_cache()
    elif what == "abort queued":
        llm.core.abort(start_turn(llm, session_id, [9] * 30, SHORT).id)
    elif what == "abort prefill":
        request = start_turn(llm, session_id, [9] * 90, SHORT)
        llm.core.step()
        llm.core.abort(request.id)
    elif what == "abort launched":
        request = start_turn(llm, session_id, [9] * 30, SHORT)
        llm.core.launch()
        llm.core.abort(request.id)
        llm.core.collect()
        assert request.finish is not None
    elif what == "abort decode":
        request = start_turn(llm, session_id, [9] * 30, SHORT)
        for _ in range(6):
            llm.core.step()
        assert request.num_output > 1
        llm.core.abort(request.id)
    elif what == "abort retracted":
        request = start_turn(llm, session_id, [9] * 30, SHORT)
        llm.core.step()
        llm.core.step()
        llm.core.scheduler.retract(request)
        assert llm.audit() == []
        llm.core.abort(request.id)
    assert llm.audit() == []
    assert session.state.turn is None
    assert len(session.log) == sum(turn.end - turn.start for turn in session.log.turns)


EVENTS = ["demotion", "flush", "abort queued", "abort prefill", "abort launched", "abort decode", "abort retracted"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_what_happens_between_turns_changes_no_token(model_path, expected, page_size, unit, event):
    chunk = -1 if page_size == 128 else 48
    llm = make_llm(model_path, page_size=page_size, resume_unit=unit, chunked_prefill_size=chunk)
    session = llm.core.sessions.open()
    answers = []
    for turn in TURNS:
        between_turns(llm, event, session.id)
        answers.append(run_turn(llm, session.id, turn, SHORT).output_ids)
    assert answers == expected
    llm.core.close_session(session.id)
    assert_idle(llm)


@pytest.mark.parametrize("demote", [False, True], ids=["", "demoted"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_a_turn_that_is_retracted_again_and_again_changes_no_token(model_path, expected, page_size, unit, demote):
    chunk = -1 if page_size == 128 else 48
    llm = make_llm(model_path, page_size=page_size, resume_unit=unit, chunked_prefill_size=chunk)
    session = llm.core.sessions.open()
    answers = []
    for turn in TURNS:
        request = start_turn(llm, session.id, turn, SHORT)
        step = 0
        while llm.core.has_work:
            if request.status is RequestStatus.RUNNING and step % 3 == 2:
                llm.core.scheduler.retract(request)
                assert llm.audit() == []
                if demote:
                    llm.core.sessions.demote_all()
            llm.core.step()
            step += 1
        answers.append(request.output_ids)
    assert answers == expected
    assert session.stats.num_retractions > 10
    llm.core.close_session(session.id)
    assert_idle(llm)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_a_fork_at_every_offset_leaves_two_conversations(model_path, page_size, unit):
    """Both go on from the same history, in turns, each as if it were alone. Pages of 128: the offsets at a border."""
    llm = make_llm(model_path, page_size=page_size, resume_unit=unit)
    trunk = llm.core.sessions.open("trunk")
    talk(llm, trunk.id, LONG_TURNS[:2] if page_size == 128 else TURNS[:2])
    history = trunk.log.tokens.tolist()
    plain = make_llm(model_path, page_size=finest_page(), disable_radix_cache=True)
    cuts = [120, 127, 128, 129, 135] if page_size == 128 else range(len(history) - 17, len(history) + 1)
    assert cuts[-1] == len(history)
    for cut in cuts:
        child = llm.core.sessions.fork(trunk.id, length=cut)
        twin = llm.core.sessions.fork(trunk.id)
        assert llm.audit() == []
        first = run_turn(llm, child.id, [5, 6, 7], SHORT).output_ids
        second = run_turn(llm, twin.id, [8, 9], SHORT).output_ids
        again = run_turn(llm, child.id, [11], SHORT).output_ids
        context = [*history[:cut], 5, 6, 7]
        assert first == run(plain, [context], SHORT)[0].output_ids
        assert again == run(plain, [[*context, *first, 11]], SHORT)[0].output_ids
        assert second == run(plain, [[*history, 8, 9]], SHORT)[0].output_ids
        assert trunk.log.tokens.tolist() == history
        llm.core.close_session(child.id)
        llm.core.close_session(twin.id)
    assert trunk.stats.num_forks == 2 * len(cuts)
    assert run_turn(llm, trunk.id, [3], SHORT).output_ids == run(plain, [[*history, 3]], SHORT)[0].output_ids
    llm.core.close_session(trunk.id)
    assert_idle(llm)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_rewinding_into_shared_pages_does_not_write_into_the_other_branch(model_path, page_size, unit):
    llm = make_llm(model_path, page_size=page_size, resume_unit=unit)
    plain = make_llm(model_path, page_size=finest_page(), disable_radix_cache=True)
    trunk = llm.core.sessions.open()
    talk(llm, trunk.id, LONG_TURNS[:3] if page_size == 128 else TURNS[:3])
    history = trunk.log.tokens.tolist()
    border = len(history) - page_size
    for back in [1, border - 1, border, border + 1, border + 20] if page_size == 128 else range(1, 35):
        child = llm.core.sessions.fork(trunk.id)
        llm.core.sessions.rewind(child.id, len(history) - back)
        answer = run_turn(llm, child.id, [4, 4], SHORT).output_ids
        assert answer == run(plain, [[*history[:-back], 4, 4]], SHORT)[0].output_ids
        twin = llm.core.sessions.fork(trunk.id)
        assert run_turn(llm, twin.id, [3], SHORT).output_ids == run(plain, [[*history, 3]], SHORT)[0].output_ids
        llm.core.close_session(child.id)
        llm.core.close_session(twin.id)
    llm.core.close_session(trunk.id)
    assert_idle(llm)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_many_sessions_in_a_pool_far_too_small(model_path, expected, page_size, unit):
    """Rows give way all the time, running turns are retracted, and nobody gets another's tokens."""
    tokens = 512 if page_size == 128 else 330
    llm = make_llm(model_path, page_size=page_size, resume_unit=unit, max_total_tokens=tokens, chunked_prefill_size=-1)
    names = [llm.core.sessions.open().id for _ in range(6)]
    for turn, answer in zip(TURNS, expected, strict=True):
        requests = [start_turn(llm, name, turn, SHORT) for name in names]
        finish_all(llm)
        assert [request.output_ids for request in requests] == [answer] * 6
    assert llm.stats()["num_retracted_total"] + sum(s.stats.num_demotions for s in llm.core.sessions.sessions()) > 0
    for name in names:
        llm.core.close_session(name)
    assert_idle(llm)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("page_size", PAGES)
def test_windows_and_experts_talk_in_turns_as_well(variant_model_path, page_size, unit):
    chunk = -1 if page_size == 128 else 48
    llm = make_llm(variant_model_path, page_size=page_size, resume_unit=unit, chunked_prefill_size=chunk)
    assert talk(llm, llm.core.sessions.open().id) == one_by_one(variant_model_path, TURNS)


def test_a_stop_string_that_cuts_inside_a_page(model_path):
    """The history holds what was generated up to the token that completed the stop."""
    llm = make_llm(model_path, page_size=16)
    with llm.open_session() as session:
        first = session.generate(TURNS[0], GREEDY)
        stop = first.text[4:9]
        session.rewind(tokens=0)
        stopped = session.generate(TURNS[0], SamplingParams(temperature=0.0, ignore_eos=True, stop=stop))
        assert stopped.finish_reason == "stop"
        assert len(stopped.token_ids) < len(first.token_ids)
        answer = session.generate(TURNS[1], GREEDY)
    plain = make_llm(model_path, page_size=finest_page(), disable_radix_cache=True)
    context = [*TURNS[0], *stopped.token_ids, *TURNS[1]]
    assert answer.token_ids == run(plain, [context])[0].output_ids


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_page_that_is_written_in_spite_of_a_fork_is_noticed(model_path, monkeypatch, page_size):
    """The matrix can fail: without its own copy of a shared page, a rewound branch changes the other."""
    monkeypatch.setattr("mem_cache.allocation.KvAllocator.own_tail", lambda self, record: None)
    with pytest.raises(AssertionError):
        test_rewinding_into_shared_pages_does_not_write_into_the_other_branch(model_path, page_size, "token")
