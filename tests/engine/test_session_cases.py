"""Faults that other engines had with conversations (CASES.md, group c; sessions-and-trees.md 1.6)."""

from __future__ import annotations

import numpy as np
import pytest
from harness import add, assert_idle, finish_all, make_llm, run, run_turn, start_turn
from hash_engine import answer_to, make_core

from devices.pages import ceil_page, page_count
from engine import LLM, SamplingParams
from engine.errors import SessionRefused
from engine.request import RequestStatus
from session.session import SessionLimits
from session.state import Phase

TURNS = [np.random.default_rng(size).integers(3, 300, size).tolist() for size in (40, 35, 50, 33)]
SHORT = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)


def params(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)


def history(llm: LLM, session_id: str) -> list[int]:
    return llm.core.sessions.get(session_id).log.tokens.tolist()


@pytest.fixture(scope="module")
def plain(tiny_path):
    """An engine without a cache: what a prompt gives when there are no sessions."""
    return make_llm(tiny_path, page_size=16, disable_radix_cache=True)


@pytest.fixture(scope="module")
def expected(plain) -> list[list[int]]:
    context, answers = [], []
    for turn in TURNS:
        context += turn
        answers.append(run(plain, [context], SHORT)[0].output_ids)
        context += answers[-1]
    return answers


WHENS = {
    "before prefill": 0,
    "mid prefill": 1,
    "at decode 0": 3,
    "at decode 1": 4,
    "at decode 5": 8,
}


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_a_turn_is_aborted_and_sent_again(tiny_path, expected, aborted, unit, when):
    """B047: an abort keeps the last finished turn and nothing of its own."""
    llm = make_llm(tiny_path, page_size=16, resume_unit=unit, chunked_prefill_size=16)
    session = llm.core.sessions.open()
    answers = []
    for number, turn in enumerate(TURNS):
        if number == aborted:
            before = history(llm, session.id)
            request = start_turn(llm, session.id, turn, LONG)
            for _ in range(WHENS[when]):
                llm.core.step()
            assert llm.core.abort(request.id)
            assert request.finish.reason == "abort"
            assert history(llm, session.id) == before
            assert session.held_tokens <= len(before)
            assert session.slot.record.kv_allocated_len == ceil_page(session.held_tokens, 16)
        answers.append(run_turn(llm, session.id, turn, SHORT).output_ids)
    assert answers == expected
    assert llm.core.close_session(session.id)
    assert_idle(llm)


@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_retraction_gives_its_tail_back(tiny_path, expected, page_size, unit):
    """B048: nothing of the row lies behind what is committed, before and after the turn resumes."""
    llm = make_llm(tiny_path, page_size=page_size, resume_unit=unit, chunked_prefill_size=16)
    session = llm.core.sessions.open()
    record = session.slot.record
    assert run_turn(llm, session.id, TURNS[0], SHORT).output_ids == expected[0]
    request = start_turn(llm, session.id, TURNS[1], SHORT)
    for _ in range(5):
        llm.core.step()
        llm.core.scheduler.retract(request)
        assert record.kv_allocated_len == ceil_page(record.kv_committed_len, page_size)
        held = llm.stats()["session_pages"] + llm.stats()["tree_protected_pages"]
        assert held == page_count(record.kv_committed_len, page_size)
        assert llm.audit() == []
    finish_all(llm)
    assert request.output_ids == expected[1]
    llm.core.close_session(session.id)
    assert_idle(llm)


@pytest.mark.parametrize("kept", [41, 40, 32, 17, 16])
def test_a_row_is_cut_by_whole_pages(tiny_path, plain, kept):
    """B048: pages above the cut go back at once, the one that is cut in two stays."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, TURNS[0][:10], params(42))
    assert session.held_tokens == 51
    llm.core.sessions.rewind(session.id, kept)
    assert session.held_tokens == kept
    assert llm.stats()["session_pages"] == page_count(kept, 16)
    assert llm.audit() == []
    context = [*history(llm, session.id), 5]
    assert run_turn(llm, session.id, [5], SHORT).output_ids == run(plain, [context], SHORT)[0].output_ids


@pytest.mark.parametrize("phase", ["queued", "running", "retracted"])
def test_a_refused_turn_does_not_free_the_owner(tiny_path, phase):
    """B052, 1.6 (2): A is under way, B and C are refused, A finishes, D is accepted."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    a = start_turn(llm, session.id, TURNS[0], LONG)
    if phase != "queued":
        llm.core.step()
        llm.core.step()
    if phase == "retracted":
        llm.core.scheduler.retract(a)
    for _ in range(3):
        owner = session.state.turn
        with pytest.raises(SessionRefused, match=phase) as refused:
            start_turn(llm, session.id, TURNS[1], SHORT)
        assert refused.value.kind == "busy"
        assert (session.state.turn, len(llm.core.scheduler)) == (owner, 1)
        assert not llm.core.abort("r1"), "the refused turn left nothing to abort"
        assert llm.audit() == []
    finish_all(llm)
    d = run_turn(llm, session.id, TURNS[3], SHORT)
    assert history(llm, session.id) == TURNS[0] + a.output_ids + TURNS[3] + d.output_ids
    assert [turn.request_id for turn in session.log.turns] == [a.id, d.id]


def test_idle_sessions_block_nobody(tiny_path, plain):
    """B054: 8 sessions hold 56 of 64 pages; a 9-page request and then all sessions at once are served."""
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=64 * 16)
    names = [llm.core.sessions.open().id for _ in range(8)]
    heads = [np.random.default_rng(i).integers(3, 300, 100).tolist() for i in range(8)]
    first = [run_turn(llm, name, head, SHORT).output_ids for name, head in zip(names, heads, strict=True)]
    assert llm.stats()["free_pages"] == 64 - 8 * 7
    prompt = np.random.default_rng(99).integers(3, 300, 9 * 16).tolist()
    assert run(llm, [prompt], SHORT, max_steps=500)[0].output_ids == run(plain, [prompt], SHORT)[0].output_ids
    turns = [start_turn(llm, name, TURNS[1], SHORT) for name in names]
    finish_all(llm, max_steps=500)
    for head, said, turn in zip(heads, first, turns, strict=True):
        assert turn.output_ids == run(plain, [[*head, *said, *TURNS[1]]], SHORT)[0].output_ids
    for name in names:
        llm.core.close_session(name)
    assert_idle(llm)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_as_large_as_the_pool_is_served(tiny_path, plain, page_size):
    """No wedge: idle sessions hold every page, and a prompt needs every page."""
    num_tokens = 256
    llm = make_llm(tiny_path, page_size=page_size, max_total_tokens=num_tokens)
    for seed in range(6):
        session = llm.core.sessions.open()
        run_turn(llm, session.id, np.random.default_rng(seed).integers(3, 300, 60).tolist(), SHORT)
    assert llm.core.allocator.num_available < 60
    prompt = np.random.default_rng(98).integers(3, 300, num_tokens).tolist()
    request = run(llm, [prompt], params(1), max_steps=50)[0]
    assert request.finish.reason == "length"
    assert request.output_ids == run(plain, [prompt], params(1))[0].output_ids
    assert len(llm.core.sessions) == 6


def test_a_branch_that_needs_every_page_is_served():
    """No wedge: another idle branch shares the page that the turn writes next, and there is none for a copy of it."""
    core = make_core(page_size=4, num_pages=4)

    def turn(name: str, ids: list[int], max_new: int) -> list[int]:
        request = core.add_turn(name, np.array(ids, np.int32), params(max_new))
        for _ in range(30):
            core.step()
            assert core.audit() == []
        assert request.finish is not None, "the turn waits for a page that nobody will give back"
        return request.output_ids

    trunk = core.sessions.open("trunk")
    turn("trunk", [1, 2, 3, 4, 5], 9)
    core.sessions.fork("trunk", length=12, new_id="branch")
    core.sessions.rewind("branch", 10)
    assert core.allocator.num_available == 0
    context = [*trunk.log.tokens[:10].tolist(), 1, 2, 3]
    assert turn("branch", [1, 2, 3], 3) == answer_to(context, 3)
    assert len(trunk.log) == 14


def test_opened_and_closed_a_thousand_times(tiny_path):
    """B055: with turns in every state, and closed while they decode."""
    llm = make_llm(tiny_path, page_size=16)
    rng = np.random.default_rng(3)
    for i in range(1000):
        session = llm.core.sessions.open("s")
        assert session.generation == i + 1
        if i % 20 == 0:
            start_turn(llm, "s", TURNS[i % 4], LONG)
            for _ in range(rng.integers(0, 6)):
                llm.core.step()
            if rng.random() < 0.5:
                llm.core.launch()
            llm.core.close_session("s", abort=True)
            llm.core.collect()
        assert llm.core.close_session("s")
        assert session.state.phase is Phase.CLOSED
    assert len(llm.core.sessions) == 0
    assert_idle(llm)


def test_closing_waits_for_the_answer(tiny_path, expected):
    """B055: a close during decode ends the session with its turn, whose tokens are right; nothing comes after it."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open("s")
    request = start_turn(llm, "s", TURNS[0], SHORT)
    for _ in range(4):
        llm.core.step()
    assert not llm.core.close_session("s")
    with pytest.raises(SessionRefused, match="closed"):
        start_turn(llm, "s", TURNS[1], SHORT)
    finish_all(llm)
    assert request.output_ids == expected[0]
    assert session.state.phase is Phase.CLOSED
    assert llm.core.sessions.open("s").generation > session.generation
    llm.core.close_session("s")
    assert_idle(llm)


def test_a_node_of_the_first_turn_is_split_before_the_close(tiny_path, expected):
    """B055: the session's lock follows the split."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open("s")
    run_turn(llm, "s", TURNS[2], SHORT)
    assert llm.stats()["tree_protected_pages"] == 3
    other = run(llm, [[*TURNS[2][:20], 7, 7]], SHORT)[0]
    assert other.cached_tokens == 16
    assert llm.stats()["tree_protected_pages"] == 3
    run_turn(llm, "s", TURNS[1], SHORT)
    assert llm.core.close_session("s")
    assert session.slot.held.lock is None
    assert_idle(llm)


def test_a_lent_row_counts_once(tiny_path):
    """B056: three sessions in turns beside each other, chunked; every page has one place in the books at every step."""
    llm = make_llm(tiny_path, page_size=16, chunked_prefill_size=12, max_total_tokens=1024)
    names = [llm.core.sessions.open().id for _ in range(3)]
    for step in range(120):
        for number, name in enumerate(names):
            if llm.core.sessions.get(name).state.turn is None and step % (number + 2) == 0 and step < 90:
                start_turn(llm, name, TURNS[(step + number) % 4][: 7 + 9 * number], params(3 + number))
        llm.core.step()  # audited
        stats = llm.stats()
        lent = sum(
            page_count(s.slot.record.kv_allocated_len - s.slot.record.cache_protected_len, 16)
            for s in llm.core.sessions.sessions()
            if s.state.activity is Phase.RUNNING
        )
        assert stats["request_pages"] == lent
    finish_all(llm)
    assert_idle(llm)


@pytest.mark.parametrize("in_session", [False, True])
def test_streams_that_nobody_reads_to_the_end(tiny_path, in_session):
    """B058: 120 answers are left after their first piece; nothing stays behind and the next ten are right."""
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=512)
    prompt, wanted = TURNS[0], run(llm, [TURNS[0]], SHORT)[0].output_ids
    session = llm.open_session() if in_session else None
    for _ in range(120):
        stream = session.generate(prompt, LONG, stream=True) if session else llm.generate(prompt, LONG, stream=True)
        next(iter(stream))
        stream.close()
        assert not llm.core.has_work
        assert session is None or session.token_ids == []
    for _ in range(10):
        if session is not None:
            session.rewind(tokens=0)
        result = session.generate(prompt, SHORT) if session else llm.generate(prompt, SHORT)
        assert result.token_ids == wanted
    if session is not None:
        session.close()
    assert_idle(llm)


def test_the_end_of_a_session_says_so(tiny_path):
    """B058: a full history refuses the turn by name and number; it does not answer with nothing."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open(capacity=60)
    run_turn(llm, session.id, TURNS[0], SHORT)
    cut = run_turn(llm, session.id, TURNS[1][:6], LONG)
    assert (cut.finish.reason, len(cut.output_ids), len(session.log)) == ("length", 6, 60)
    with pytest.raises(SessionRefused, match="capacity is 60") as refused:
        start_turn(llm, session.id, [5], SHORT)
    assert refused.value.kind == "full"
    assert len(session.log) == 60
    llm.core.sessions.rewind(session.id, 40)
    assert run_turn(llm, session.id, [5], SHORT).finish.reason == "length"


@pytest.mark.parametrize("no_cache", [False, True])
def test_a_row_has_no_memory_of_its_last_owner(tiny_path, no_cache):
    """B059: a session in the row of a closed one has the logprobs of a cold start."""
    scored = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, return_logprob=True, top_logprobs_num=5)
    cold = make_llm(tiny_path, page_size=16, disable_radix_cache=True)
    want = run(cold, [TURNS[0]], scored)[0].scores.output
    llm = make_llm(tiny_path, page_size=16, max_running_requests=1, disable_radix_cache=no_cache)
    secret = llm.core.sessions.open("secret")
    run_turn(llm, "secret", TURNS[1], LONG)
    row = secret.slot.record.row
    llm.core.close_session("secret")
    other = llm.core.sessions.open("other")
    got = run_turn(llm, "other", TURNS[0], scored)
    assert other.slot.record.row == row
    assert got.cached_tokens == 0
    assert [score.token_id for score in got.scores.output] == [score.token_id for score in want]
    np.testing.assert_allclose([s.logprob for s in got.scores.output], [s.logprob for s in want], atol=1e-6)


def test_a_turn_computes_what_is_new(tiny_path):
    """B059: of the history only the token that was sampled last, whose KV no step had written."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, TURNS[0], SHORT)
    for turn in (TURNS[1], [5], TURNS[2], [6, 7]):
        computed = sum(step.num_tokens for step in llm.core.timings)
        run_turn(llm, session.id, turn, SHORT)
        assert sum(step.num_tokens for step in llm.core.timings) - computed == 1 + len(turn) + 7


def test_a_retraction_is_no_finish(tiny_path, expected):
    """1.6 (1), (3), (4): after any number of them the turn owns the session, and closing waits for it."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, TURNS[0], SHORT)
    before = history(llm, session.id)
    request = start_turn(llm, session.id, TURNS[1], SHORT)
    for number in range(1, 4):
        llm.core.step()
        llm.core.step()
        llm.core.scheduler.retract(request)
        assert session.state.phase is Phase.RETRACTED
        assert (session.state.turn.request_id, session.state.turn.attempt) == (request.id, number)
        assert request.session is session
        assert request.turn == session.state.turn
        assert history(llm, session.id) == before
        assert session.held_tokens > len(before)
        with pytest.raises(SessionRefused, match="retracted"):
            start_turn(llm, session.id, [7, 8], SHORT)
    assert not llm.core.close_session(session.id)
    assert session.state.phase is Phase.CLOSING
    finish_all(llm)
    assert request.output_ids == expected[1]
    assert session.stats.num_turns == 2
    assert session.state.phase is Phase.CLOSED
    assert_idle(llm)


@pytest.mark.parametrize("demoted", [False, True])
def test_a_retracted_turn_that_is_aborted_never_was(tiny_path, expected, demoted):
    """1.6 (6): the next turn continues from the turn before it."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, TURNS[0], SHORT)
    before = history(llm, session.id)
    request = start_turn(llm, session.id, [9] * 20, LONG)
    for _ in range(3):
        llm.core.step()
    llm.core.scheduler.retract(request)
    if demoted:
        llm.core.sessions.demote_all()
    assert request.status is RequestStatus.WAITING
    assert llm.core.abort(request.id)
    assert history(llm, session.id) == before
    assert session.held_tokens <= len(before)
    assert run_turn(llm, session.id, TURNS[1], SHORT).output_ids == expected[1]
    assert history(llm, session.id) == before + TURNS[1] + expected[1]


def test_a_thousand_sessions_are_opened_used_and_left():
    """No wedge: four rows and 32 pages serve them one after another, and again in any order."""
    core = make_core(page_size=4, num_pages=32, num_rows=4, limits=SessionLimits(max_sessions=1000))
    for i in range(1000):
        session = core.sessions.open()
        request = core.add_turn(session.id, np.array([1, i % 39 + 1, 2, 3, 4], np.int32), params(4))
        while core.has_work:
            core.step()
        assert request.output_ids == answer_to([1, i % 39 + 1, 2, 3, 4], 4)
    assert core.audit() == []
    assert core.stats()["num_sessions"] == 1000
    everyone = list(core.sessions.sessions())
    for session in everyone[::100]:
        context = [*session.log.tokens.tolist(), 5]
        request = core.add_turn(session.id, np.array([5], np.int32), params(4))
        while core.has_work:
            core.step()
        assert request.output_ids == answer_to(context, 4)
    for session in everyone:
        assert core.close_session(session.id)
    assert core.audit() == []
    stats = core.stats()
    assert stats["free_pages"] + stats["tree_evictable_pages"] == 32


def test_a_plain_prompt_meets_a_session_that_says_the_same(tiny_path, expected):
    """A prompt that repeats a conversation beside it shares the tree's pages, never the session's own."""
    llm = make_llm(tiny_path, page_size=16)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, TURNS[0], SHORT)
    turn = start_turn(llm, session.id, TURNS[1], SHORT)
    same = add(llm, history(llm, session.id) + TURNS[1], SHORT)
    finish_all(llm)
    assert turn.output_ids == same.output_ids == expected[1]
    llm.core.close_session(session.id)
    assert_idle(llm)


def hash_turn(core, name: str, ids: list[int], max_new: int):
    """A turn on the engine without a model, to its end."""
    request = core.add_turn(name, np.array(ids, np.int32), params(max_new))
    while core.has_work:
        core.step()
        assert core.audit() == []
    return request


def test_the_row_protects_the_first_prompt_and_no_more():
    """While the row is held the tree has the first turn's prompt only; a row that was lost starts anew."""
    core = make_core(page_size=4)
    session = core.sessions.open("s")
    hash_turn(core, "s", list(range(1, 10)), 5)
    record = session.slot.record
    for new in ([1, 2, 3, 4, 5], [6] * 8):
        hash_turn(core, "s", new, 5)
        assert record.cache_protected_len == 8
    core.sessions.demote_all()
    history = len(session.log)
    request = hash_turn(core, "s", [7] * 5, 3)
    assert request.cached_tokens == (history - 1) // 4 * 4
    assert record.cache_protected_len == (history + 5) // 4 * 4


def test_an_aborted_first_turn_leaves_its_pages_to_the_tree():
    """The session has no history then; a prompt that says the same need not compute it again."""
    core = make_core(page_size=4)
    core.sessions.open("s")
    request = core.add_turn("s", np.arange(1, 10, dtype=np.int32), params(20))
    for _ in range(8):
        core.step()
    said = request.output_ids
    assert len(said) == 8
    core.abort(request.id)
    assert core.stats()["tree_evictable_pages"] == 4
    again = core.add(np.array([*range(1, 10), *said], np.int32), params(2))[0]
    core.step()
    assert again.cached_tokens == 16


@pytest.mark.parametrize("in_session", [False, True])
def test_a_forward_that_went_wrong_leaves_nothing(in_session):
    """What it wrote is in no cache, and the history is that of the turn before it."""
    core = make_core(page_size=4)
    session = core.sessions.open("s")
    said = hash_turn(core, "s", [1, 2, 3], 4).output_ids if in_session else []
    before = [1, 2, 3, *said] if in_session else []
    assert session.log.tokens.tolist() == before
    core.runner.fail_next = 1
    request = hash_turn(core, "s", list(range(9, 20)), 5)
    assert request.finish.reason == "error"
    assert session.log.tokens.tolist() == before
    assert session.held_tokens == 0
    assert hash_turn(core, "s", list(range(9, 20)), 5).output_ids == answer_to([*before, *range(9, 20)], 5)
    core.close_session("s")
    assert core.stats()["tree_protected_pages"] == 0


def test_a_first_turn_that_went_wrong_is_found_by_nobody():
    core = make_core(page_size=4)
    core.sessions.open("s")
    core.runner.fail_next = 1
    assert hash_turn(core, "s", list(range(1, 12)), 5).finish.reason == "error"
    assert core.stats()["free_pages"] == core.stats()["num_pages"]


def branch_with_shared_tail(num_pages: int):
    """An engine with a trunk of 13 written tokens in four pages, and a branch cut to 10 that shares its third page."""
    core = make_core(page_size=4, num_pages=num_pages)
    trunk = core.sessions.open("trunk")
    hash_turn(core, "trunk", [1, 2, 3, 4, 5], 9)
    core.sessions.fork("trunk", length=12, new_id="branch")
    core.sessions.rewind("branch", 10)
    return core, trunk.log.tokens.tolist()


def test_a_branch_copies_the_page_that_it_shares_before_it_writes():
    core, history = branch_with_shared_tail(16)
    assert hash_turn(core, "branch", [6, 7], 5).output_ids == answer_to([*history[:10], 6, 7], 5)
    assert hash_turn(core, "trunk", [8], 5).output_ids == answer_to([*history, 8], 5)


def test_the_page_for_the_copy_may_be_the_trees():
    """No page is free, and the copy has the only one that nobody uses."""
    core, history = branch_with_shared_tail(6)
    core.add(np.full(8, 9, np.int32), params(1))
    while core.has_work:
        core.step()
    assert (core.stats()["free_pages"], core.stats()["tree_evictable_pages"]) == (0, 2)
    request = core.add_turn("branch", np.array([6, 7], np.int32), params(1))
    for _ in range(5):
        core.step()
    assert request.output_ids == answer_to([*history[:10], 6, 7], 1)


def test_a_row_leaves_what_is_behind_pages_that_the_tree_knows():
    """Pages that a branch shares as well are no obstacle when the tree has them already."""
    core = make_core(page_size=4)
    trunk = core.sessions.open("trunk")
    hash_turn(core, "trunk", [1, 2, 3, 4], 13)
    history = trunk.log.tokens.tolist()
    core.sessions.fork("trunk", length=12, new_id="branch")
    core.add(np.array(history[:13], np.int32), params(1))
    while core.has_work:
        core.step()
    core.sessions.demote_all()
    again = core.add(np.array([*history, 1], np.int32), params(1))[0]
    core.step()
    assert again.cached_tokens == 16


def test_a_turn_that_cannot_be_admitted_yet_keeps_its_row_and_lock(tiny_path):
    """It is lent its row, finds no pages for its new tokens, and gives the row back as it was."""
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=100)
    session = llm.core.sessions.open()
    run_turn(llm, session.id, [5] * 12, SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True))
    assert session.slot.record.cache_protected_len == 12
    beside = add(llm, [9] * 40, SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
    llm.core.step()
    turn = start_turn(llm, session.id, [6] * 40)
    for _ in range(5):
        llm.core.step()
        assert turn.status is RequestStatus.WAITING
        assert session.slot.held.lock is not None
        assert session.slot.is_idle
        assert session.held_tokens == 12
    finish_all(llm)
    assert beside.num_output == turn.num_output == 24
