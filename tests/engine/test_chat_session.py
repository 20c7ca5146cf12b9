"""Conversations as a user holds them: chat and plain text, fork, rewind, hold, statistics, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import add, assert_idle, finish_all, make_llm, start_turn
from tiny_models import save_tiny_llama

from engine import LLM, SamplingParams
from engine.errors import BadRequest, SessionRefused
from engine.request import RequestStatus
from session.branching import SessionParams
from session.state import Phase

SHORT = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True)


@pytest.fixture
def llm(tiny_path: Path) -> LLM:
    return make_llm(tiny_path, page_size=16)


def words(llm: LLM, **kwargs) -> SamplingParams:
    """The tiny model says capital letters only: no merge joins them, so its text is tokenised again as it was."""
    bytes_of = llm.tokenizer.token_bytes
    letters = {i for i in range(llm.core.vocab_size) if len(bytes_of(i)) == 1 and bytes_of(i).isupper()}
    biases = {i: -100.0 for i in range(llm.core.vocab_size) if i not in letters}
    return SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True, logit_bias=biases, **kwargs)


def chat_of(llm: LLM, *said: str, params: SamplingParams | None = None) -> list[str]:
    """The answers to these lines when the whole conversation is sent each time."""
    params = params or words(llm)
    messages, answers = [], []
    for line in said:
        messages.append({"role": "user", "content": line})
        answers.append(llm.chat(messages, params).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_chat_says_what_the_whole_conversation_would(llm):
    params = words(llm)
    lines = ["hello there", "and then? 🙂", "漢字", ""]
    with llm.open_session() as session:
        assert [session.chat(line, params).text for line in lines] == chat_of(llm, *lines)
        assert session.num_turns == 4
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 4
        assert session.stats.num_turns == 4
    assert_idle(llm)


def test_the_default_model_chats_in_a_session_as_in_whole_conversations(smollm2_path):
    llm = make_llm(smollm2_path, max_total_tokens=2048)
    lines = ["What is the capital of France?", "And of Italy?", "Which of the two has more people?"]
    params = SamplingParams(temperature=0.0, max_new_tokens=20)
    with llm.open_session() as session:
        results = [session.chat(line, params) for line in lines]
    assert [result.text for result in results] == chat_of(llm, *lines, params=params)
    for result in results[1:]:
        usage = result.usage
        assert usage.prompt_tokens - usage.cached_tokens < 25, "only what is new was computed"


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_an_answer_cut_by_a_stop_string_continues_without_what_was_cut(llm, stop_at):
    [answer] = chat_of(llm, "hello")
    params = words(llm, stop=answer[stop_at : stop_at + 2])
    with llm.open_session() as session:
        shown = [session.chat(line, params).text for line in ("hello", "go on", "more")]
        assert shown == chat_of(llm, "hello", "go on", "more", params=params)
        assert session.num_turns == 3
    assert shown[0] == answer[: answer.index(params.stop[0])]


def test_a_template_that_rewrites_older_turns_is_followed(llm, monkeypatch):
    """Like models whose template drops the thinking of older answers."""
    params = words(llm)
    plain = type(llm.tokenizer).chat_text

    def forgetful(self, messages, **kwargs):
        older = [{**m, "content": m["content"][:3]} if m["role"] == "assistant" else m for m in messages]
        return plain(self, older, **kwargs)

    monkeypatch.setattr(type(llm.tokenizer), "chat_text", forgetful)
    with llm.open_session() as session:
        shown = [session.chat(line, params).text for line in ("hello", "go on", "more")]
    assert shown == chat_of(llm, "hello", "go on", "more")


def test_messages_of_all_kinds_and_template_variables(llm):
    params = words(llm)
    opening = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with llm.open_session() as session:
        first = session.chat(opening, params)
        second = session.chat({"role": "user", "content": "more"}, params)
    whole = llm.chat(
        [*opening, {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}], params
    )
    assert first.text == llm.chat(opening, params).text
    assert second.text == whole.text


def test_streams_show_the_same_and_leaving_one_leaves_no_turn(llm):
    params = words(llm)
    expected = chat_of(llm, "hello", "go on")
    with llm.open_session() as session:
        pieces = list(session.chat("hello", params, stream=True))
        assert "".join(piece.text for piece in pieces) == expected[0]
        left = session.chat("never mind", params, stream=True)
        next(left)
        left.close()
        unread = session.chat("never read", params, stream=True)
        del unread
        assert session.num_turns == 1
        assert session.chat("go on", params).text == expected[1]


def test_plain_text_goes_on_where_it_ended(llm):
    with llm.open_session() as session:
        first = session.generate("Once upon", SHORT)
        second = session.generate("", SHORT)
        third = session.generate([5, 6, 7], SHORT)
        history = session.token_ids
    whole = llm.generate(llm.tokenizer.encode("Once upon") + first.token_ids, SHORT)
    assert second.token_ids == whole.token_ids
    assert history[-9:] == third.token_ids
    assert history[-12:-9] == [5, 6, 7]
    assert second.usage.cached_tokens == second.usage.prompt_tokens - 1


def test_bos_stands_at_the_front_only(tmp_path):
    save_tiny_llama(tmp_path)
    llm = make_llm(tmp_path)
    bos = 1
    llm.tokenizer.bos_token_id = bos
    with llm.open_session() as session:
        session.generate([bos, 5, 6], SHORT)
        session.generate([bos, 7, 8], SHORT)
        assert session.token_ids.count(bos) == 1 + session.token_ids[3:].count(bos)
        assert session.token_ids[12:14] == [7, 8]


def test_a_fork_and_a_rewind_by_turns(llm):
    params = words(llm)
    with llm.open_session() as trunk:
        for line in ("one", "two", "three"):
            trunk.chat(line, params)
        branch = trunk.fork(turns=2)
        assert branch.num_turns == 2
        assert branch.chat("other", params).text == chat_of(llm, "one", "two", "other")[-1]
        assert trunk.chat("four", params).text == chat_of(llm, "one", "two", "three", "four")[-1]
        trunk.rewind(turns=1)
        assert trunk.chat("two again", params).text == chat_of(llm, "one", "two again")[-1]
        trunk.rewind(turns=0)
        assert trunk.messages == []
        assert trunk.chat("anew", params).text == chat_of(llm, "anew")[-1]
        assert trunk.stats.num_forks == 1
        branch.close()
    assert_idle(llm)


@pytest.mark.parametrize("back", range(1, 12))
def test_a_chat_that_was_cut_anywhere_goes_on(llm, back):
    """Cut inside an answer, its turn is forgotten; the history is mended by the next turn."""
    params = words(llm)
    with llm.open_session() as session:
        session.chat("one", params)
        session.chat("two", params)
        session.rewind(tokens=len(session.token_ids) - back)
        assert session.chat("three", params).text == chat_of(llm, "one", "three")[-1]


def test_statistics_say_what_was_reused_and_what_alignment_cost(tiny_path):
    llm = make_llm(tiny_path, page_size=16, resume_unit="page")
    with llm.open_session() as session:
        session.generate([5] * 20, SHORT)  # 29 tokens, 28 of them written
        second = session.generate([6] * 3, SHORT)
        assert (second.usage.cached_tokens, second.usage.lost_to_alignment) == (16, 12)
        assert session.stats.reused_tokens == 16
        assert session.stats.computed_tokens == 20 + 32 - 16
        assert session.stats.lost_to_alignment_tokens == 12
        assert session.held_tokens == 40
        llm.core.sessions.demote_all()
        assert session.held_tokens == 0
        assert session.stats.num_demotions == 1
        third = session.generate([7], SHORT)
        assert (third.usage.cached_tokens, third.usage.lost_to_alignment) == (32, 0)
        session.hold(5.0)


def test_the_engine_counts_sessions_among_the_owners(llm):
    with llm.open_session() as session:
        session.generate([5] * 20, SHORT)
        session.generate([6] * 20, SHORT)
        stats = llm.stats()
        assert stats["num_sessions"] == 1
        assert stats["session_held_tokens"] == 57
        assert stats["session_pages"] == 3, "the first page is the tree's"
        assert stats["request_pages"] == 0
    assert llm.stats()["num_sessions"] == 0


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda s: s.fork(turns=2), "illegal"),
        (lambda s: s.fork(tokens=30), "illegal"),
        (lambda s: s.rewind(turns=-1), "illegal"),
        (lambda s: s.rewind(tokens=-1), "illegal"),
        (lambda s: s.hold(-1), "illegal"),
        (lambda s: s.generate("x", SamplingParams(n=2)), None),
        (lambda s: s.generate("x", SamplingParams(logprob_start_len=3)), None),
        (lambda s: s.generate([999], SHORT), None),
        (lambda s: s.generate([5] * 600, SHORT), None),
        (lambda s: s.generate(None, SHORT), None),
        (lambda s: s.chat("x", SHORT), None),
        (lambda s: s.rewind(), None),
        (lambda s: s.rewind(tokens=1, turns=1), None),
        (lambda s: s.rewind(turns="all"), None),
        (lambda s: s.fork(session_id="taken"), "illegal"),
    ],
)
def test_what_is_refused_changes_nothing(llm, act, kind):
    with llm.open_session("taken"), llm.open_session() as session:
        session.generate([5] * 20, SHORT)
        history, stats, held = session.token_ids, str(session.stats), session.held_tokens
        with pytest.raises(BadRequest) as caught:
            act(session)
        assert getattr(caught.value, "kind", None) == kind
        assert (session.token_ids, str(session.stats), session.held_tokens) == (history, stats, held)
        assert llm.audit() == []
        assert session.generate([6], SHORT).finish_reason == "length"


def test_a_refused_chat_after_a_cut_answer_does_not_rewind(llm):
    [answer] = chat_of(llm, "hello")
    params = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True, stop=answer[2:4])
    with llm.open_session() as session:
        session.chat("hello", params)
        history = session.token_ids
        with pytest.raises(BadRequest, match="context"):
            session.chat("x" * 2000, SHORT)
        assert session.token_ids == history
        assert session.num_turns == 1


def test_a_closed_or_busy_session_says_so(llm):
    session = llm.open_session("a")
    running = session.generate([5] * 20, SHORT, stream=True)
    for act in (lambda: session.generate([6]), lambda: session.rewind(tokens=0)):
        with pytest.raises(SessionRefused, match="queued") as caught:
            act()
        assert caught.value.kind == "busy"
    assert session.close() is False
    assert list(running)[-1].result.finish_reason == "length", "closing waits for the turn"
    assert session.close() is True
    with pytest.raises(SessionRefused, match="not open") as caught:
        session.generate([6])
    assert caught.value.kind == "unknown"
    llm.open_session("a").close()
    assert_idle(llm)


def test_a_full_session_says_so_instead_of_answering_nothing(llm):
    with llm.open_session(capacity=40) as session:
        assert session.generate([5] * 25, SamplingParams(max_new_tokens=99)).usage.completion_tokens == 15
        with pytest.raises(SessionRefused, match="capacity is 40") as caught:
            session.generate([6], SHORT)
        assert caught.value.kind == "full"
        session.rewind(tokens=20)
        assert session.generate([6], SHORT).finish_reason == "length"


def test_limits_of_the_engine(tiny_path):
    llm = make_llm(tiny_path, max_sessions=1, max_session_tokens=30)
    with llm.open_session() as session:
        with pytest.raises(SessionRefused, match="max-sessions"):
            llm.open_session()
        session.generate([5] * 20, SHORT)
        with pytest.raises(SessionRefused, match="30 may"):
            session.generate([5, 6], SHORT)


def test_prompt_logprobs_of_what_is_new(llm):
    params = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True, logprob_start_len=22)
    with llm.open_session() as session:
        session.generate([5] * 20, SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True))
        history = session.token_ids
        scored = session.generate([7, 8, 9], params).prompt_logprobs
    whole = llm.generate([*history, 7, 8, 9], params).prompt_logprobs
    assert [one.token_id for one in scored] == [7, 8, 9]
    np.testing.assert_allclose([one.logprob for one in scored], [one.logprob for one in whole], atol=1e-4)


# SGLang's non-streaming sessions.


def branch(llm: LLM, session_id: str, prompt: list[int], params: SamplingParams = SHORT, **where):
    return llm.generate(prompt, params, session_params=SessionParams(id=session_id, **where))


def test_any_request_of_a_branching_session_can_be_continued(llm):
    name = llm.open_branching_session()
    a = branch(llm, name, [5] * 20)
    b = branch(llm, name, [6, 7], rid=a.request_id)
    c = branch(llm, name, [8], rid=a.request_id, drop_previous_output=True)
    d = branch(llm, name, [9], rid=b.request_id, offset=24)
    e = branch(llm, name, [10], rid=b.request_id, offset=-3)
    fresh = branch(llm, name, [11, 12])
    seen_by_b = [*[5] * 20, *a.token_ids, 6, 7]
    seen_after_b = [*seen_by_b, *b.token_ids]
    expected = [
        (b, seen_by_b),
        (c, [*[5] * 20, 8]),
        (d, [*seen_after_b[:24], 9]),
        (e, [*seen_after_b[:-3], 10]),
        (fresh, [11, 12]),
    ]
    for result, prompt in expected:
        assert result.usage.prompt_tokens == len(prompt)
        assert result.token_ids == llm.generate(prompt, SHORT).token_ids
    assert llm.close_session(name)
    assert_idle(llm)


def test_replacing_forgets_what_continued_the_request(llm):
    name = llm.open_branching_session()
    a = branch(llm, name, [5] * 5)
    b = branch(llm, name, [6], rid=a.request_id)
    c = branch(llm, name, [7], rid=b.request_id)
    replacing = branch(llm, name, [8], rid=a.request_id, replace=True)
    assert replacing.usage.prompt_tokens == 5 + 9 + 1
    for gone in (b, c):
        with pytest.raises(SessionRefused, match="no request of session"):
            branch(llm, name, [9], rid=gone.request_id)
    assert branch(llm, name, [9], rid=a.request_id).finish_reason == "length"
    branch(llm, name, [1], replace=True)
    with pytest.raises(SessionRefused, match="no request of session"):
        branch(llm, name, [9], rid=a.request_id)


def test_a_running_request_is_continued_only_when_it_is_replaced(llm):
    name = llm.open_branching_session()
    running = llm.core.add_branch(SessionParams(id=name), np.full(5, 5, np.int32), SHORT)[0]
    llm.core.step()
    llm.core.step()
    with pytest.raises(SessionRefused, match="not finished"):
        branch(llm, name, [6], rid=running.id)
    seen = running.tokens.tolist()
    result = branch(llm, name, [6], rid=running.id, replace=True)
    assert running.finish.reason == "abort"
    assert result.token_ids == llm.generate([*seen, 6], SHORT).token_ids


def test_a_branching_session_closes_when_its_requests_have_ended(llm):
    name = llm.open_branching_session()
    running = llm.core.add_branch(SessionParams(id=name), np.full(5, 5, np.int32), SHORT)[0]
    assert llm.close_session(name) is False
    with pytest.raises(SessionRefused, match="closed"):
        branch(llm, name, [6])
    finish_all(llm)
    assert running.finish.reason == "length"
    with pytest.raises(SessionRefused, match="not open"):
        branch(llm, name, [6])
    name = llm.open_branching_session(capacity=10)
    llm.core.add_branch(SessionParams(id=name), np.full(5, 5, np.int32), SHORT)
    assert llm.close_session(name, abort=True) is True
    assert not llm.core.has_work


@pytest.mark.parametrize("field", [{"offset": 3}, {"replace": True}, {"drop_previous_output": True}])
def test_a_streaming_session_refuses_what_would_rewrite_its_history(llm, field):
    with llm.open_session("s") as session:
        session.generate([5] * 5, SHORT)
        with pytest.raises(SessionRefused, match="streaming"):
            branch(llm, "s", [6], **field)
        assert branch(llm, "s", [6], rid="ignored").usage.prompt_tokens == 15
        assert session.num_turns == 2


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"id": 3},
        {"id": "b", "rid": 3},
        {"id": "b", "offset": "x"},
        {"id": "b", "offset": True},
        {"id": "b", "replace": 1},
        {"id": "b", "unknown": 1},
        {"id": "gone"},
        {"id": "b", "rid": "gone"},
        "b",
    ],
)
def test_session_params_that_are_wrong(llm, where):
    llm.open_branching_session("b")
    with pytest.raises(BadRequest, match="session"):
        llm.generate([5], SHORT, session_params=where)
    with pytest.raises(BadRequest, match="one prompt"):
        llm.generate([[5], [6]], SHORT, session_params={"id": "b"})
    assert not llm.core.has_work


def test_a_branch_has_room_for_an_answer_or_is_refused(llm):
    name = llm.open_branching_session(capacity=12)
    a = branch(llm, name, [5] * 5)
    assert a.usage.completion_tokens == 7
    with pytest.raises(SessionRefused, match="capacity is 12"):
        branch(llm, name, [6], rid=a.request_id)


# With requests beside.


def test_a_turn_waits_its_time_and_a_request_beside_is_not_disturbed(llm):
    with llm.open_session() as session:
        session.generate([5] * 40, SHORT)
        beside = add(llm, [9] * 30)
        turn = start_turn(llm, session.id, [6] * 10, SHORT)
        finish_all(llm)
        assert turn.status is beside.status is RequestStatus.FINISHED
        assert (
            beside.output_ids
            == llm.generate([9] * 30, SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)).token_ids
        )


def test_sessions_time_out_on_the_schedulers_clock(llm):
    now = [0.0]
    llm.core.scheduler.clock = llm.core.sessions._clock = lambda: now[0]
    session = llm.open_session(timeout=5.0)
    session.generate([5] * 20, SHORT)
    now[0] = 6.0
    llm.generate([1, 2], SHORT)
    with pytest.raises(SessionRefused, match="timed out"):
        session.generate([6])
    assert session._session.state.phase is Phase.CLOSED
    assert session.close()
    assert_idle(llm)
