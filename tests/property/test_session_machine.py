"""Sessions in any order of events: a machine of rules over a real engine with a tiny pool, against a list of turns.

The model of a session is the list of its finished turns. Whatever happens between and inside turns, the engine must
agree with it, give every turn the tokens of its history alone, and have clean books after every rule.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
import pytest
import strategies as domain  # noqa: F401  (its profile)
from hash_engine import EOS, VOCAB_SIZE, Clock, HashExecutor, answer_to, make_core
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from devices.pages import page_count
from engine.core import EngineCore
from engine.errors import BadRequest, SessionRefused
from engine.request import Request, RequestStatus
from engine.sampling.params import SamplingParams
from session.errors import SessionBusy, SessionError
from session.session import Session
from session.state import Phase

CONTEXT = 64
MAX_SESSIONS = 5
NAMES = ("a", "b", "c")
HEADS = [np.random.default_rng(seed).integers(1, VOCAB_SIZE, 40).tolist() for seed in range(2)]
TIMEOUTS = (None, 5.0, 50.0)


@dataclass(eq=False)
class Talk:
    """The naive session.

    Attributes:
        turns: what each finished turn added to the history.
        running: the turn under way.
    """

    session: Session
    turns: list[list[int]] = field(default_factory=list)
    running: Ask | None = None
    closing: bool = False

    @property
    def history(self) -> list[int]:
        return [token for turn in self.turns for token in turn]

    def cut(self, length: int) -> None:
        kept, self.turns = self.turns, []
        for turn in kept:
            self.turns.append(turn[: max(0, length - len(self.history))])
        self.turns = [turn for turn in self.turns if turn]


@dataclass(eq=False)
class Ask:
    """A request and what must become of it.

    Attributes:
        new: what a turn adds to its history.
        wanted: its output if nothing ends it early, and why it then ends.
    """

    request: Request
    new: list[int]
    wanted: list[int]
    reason: str
    talk: Talk | None = None


def predicted(prompt: list[int], max_new: int, limit: int, stops: set[int], version: int) -> tuple[list[int], str]:
    answer = answer_to(prompt, min(max_new, limit - len(prompt)), version)
    for i, token_id in enumerate(answer):
        if token_id in stops:
            return answer[: i + 1], "stop"
    return answer, "length"


def lengths(most: int) -> st.SearchStrategy[int]:
    """Of a cut: mostly near the end, where rows and pages are; sometimes anywhere, or not in the history."""
    near = st.integers(max(0, most - 6), most)
    return st.one_of(near, near, st.integers(-1, most + 1))


class Sessions(RuleBasedStateMachine):
    """Rules that a session allows now are played, and now and then one that it must refuse."""

    core: EngineCore

    @initialize(
        page_size=st.sampled_from([1, 4, 4, 16]),
        unit=st.sampled_from(["token", "page"]),
        caching=st.booleans(),
        chunk=st.sampled_from([None, 1, 2]),
        num_pages=st.integers(3, 12),
        num_rows=st.sampled_from([1, 2, 4]),
        eager=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        overlap=st.booleans(),
    )
    def build(self, page_size, unit, caching, chunk, num_pages, num_rows, eager, policy, overlap):
        self.clock = Clock()
        self.core = make_core(
            page_size=page_size,
            num_pages=num_pages if page_size > 1 else 4 * num_pages,
            num_rows=num_rows,
            context_len=CONTEXT,
            resume_unit=unit,
            caching=caching,
            chunk_tokens=None if chunk is None else chunk * max(page_size, 4) + (unit == "token"),
            policy=policy,
            overlap=overlap,
            conservativeness=0.001 if eager else 1.0,
            clock=self.clock,
        )
        self.talks: dict[str, Talk] = {name: Talk(self.core.sessions.open(name)) for name in NAMES[:2]}
        self.asks: list[Ask] = []
        self.closed: list[Talk] = []
        self.room = self.core.allocator.num_pages * page_size
        self.page_size = page_size

    # Helpers.

    @property
    def executor(self) -> HashExecutor:
        return self.core.runner  # type: ignore[return-value]

    @property
    def in_flight(self) -> bool:
        return self.core.num_in_flight > 0

    @property
    def may_launch(self) -> bool:
        return len(self.core._launched) <= self.core.depth

    def flying(self, ask: Ask) -> bool:
        return any(step.awaits(ask.request) for step in self.core.scheduler._launched)

    def talk(self, data: st.DataObject, *, idle: bool | None = None) -> Talk | None:
        fitting = [t for t in self.talks.values() if idle is None or (t.running is None) is idle]
        return data.draw(st.sampled_from(fitting), label="session") if fitting else None

    def settle(self) -> None:
        """Take note of everything that has ended."""
        for ask in [ask for ask in self.asks if ask.request.finish is not None]:
            self.asks.remove(ask)
            request, finish = ask.request, ask.request.finish
            said = request.output_ids
            event(f"ended: {finish.reason}")
            assert said == ask.wanted[: len(said)]
            if finish.reason in ("stop", "length"):
                assert (said, finish.reason) == (ask.wanted, ask.reason)
            elif finish.reason == "capacity":
                assert page_count(request.num_known, self.page_size) > self.core.allocator.num_pages
            if ask.talk is not None:
                ask.talk.running = None
                if finish.reason in ("stop", "length"):
                    ask.talk.turns.append(ask.new + said)
        self.forget_closed()

    def forget_closed(self) -> None:
        for name, talk in list(self.talks.items()):
            if talk.closing and talk.running is None:
                del self.talks[name]
                self.closed.append(talk)
                assert talk.session.state.phase is Phase.CLOSED
                assert not talk.session.slot.has_row

    def prompt(self, data: st.DataObject) -> list[int]:
        """Often the head of another prompt, or of a conversation."""
        heads = HEADS + [t.history for t in self.talks.values() if t.turns]
        head = data.draw(st.sampled_from(heads), label="head")
        n = data.draw(st.integers(0, min(len(head), 24)), label="head length")
        return head[:n] + data.draw(st.lists(st.integers(1, 3), min_size=0 if n else 1, max_size=3), label="tail")

    # Sessions.

    @rule(name=st.sampled_from(NAMES), timeout=st.sampled_from(TIMEOUTS), capacity=st.sampled_from([None, None, 30]))
    def open(self, name, timeout, capacity):
        if name in self.talks or len(self.talks) >= MAX_SESSIONS:
            with pytest.raises(SessionError):
                self.core.sessions.open(name if name in self.talks else next(iter(self.talks)))
            return
        session = self.core.sessions.open(name, timeout_s=timeout, capacity=capacity)
        assert all(session.generation > talk.session.generation for talk in [*self.closed, *self.talks.values()])
        self.talks[name] = Talk(session)

    @rule(data=st.data(), max_new=st.integers(1, 8), stop=st.booleans(), limit=st.booleans())
    def turn(self, data, max_new, stop, limit):
        """Begun and left waiting."""
        talk = self.talk(data, idle=data.draw(st.sampled_from([True, True, None]), label="idle"))
        if talk is not None:
            self.begin(data, talk, max_new, {EOS, 7, 11, 13} if stop else {EOS}, limit)

    @precondition(lambda self: not self.in_flight)
    @rule(data=st.data(), max_new=st.sampled_from([1, 5, 9]), retract_at=st.sets(st.integers(1, 8), max_size=2))
    def whole_turn(self, data, max_new, retract_at):
        """Begun and brought to its end, with everything else that waits."""
        talk = self.talk(data, idle=True)
        if not self.asks and data.draw(st.integers(0, 5), label="new weights") == 0:
            self.core._weights_version += 1
            self.executor.version += 1
        if talk is not None:
            self.begin(data, talk, max_new, {EOS})
            self.run(400, retract_at)
            assert not self.core.has_work, "no progress"

    @precondition(lambda self: not self.in_flight)
    @rule(data=st.data(), then_parent=st.booleans())
    def branch(self, data, then_parent):
        """A fork that is cut inside the pages that it shares, and goes its own way beside its parent."""
        fitting = [talk for talk in self.talks.values() if talk.running is None and talk.turns]
        if not fitting or len(self.talks) >= MAX_SESSIONS:
            return
        talk = data.draw(st.sampled_from(fitting), label="session")
        child = Talk(self.core.sessions.fork(talk.session.id), list(talk.turns))
        self.talks[child.session.id] = child
        keep = data.draw(lengths(len(child.history)).filter(lambda n: 0 <= n <= len(child.history)), label="keep")
        self.core.sessions.rewind(child.session.id, keep)
        child.cut(keep)
        self.begin(data, child, 5, {EOS})
        if then_parent:
            self.begin(data, talk, 5, {EOS})
        self.run(400)
        assert not self.core.has_work, "no progress"

    def begin(self, data: st.DataObject, talk: Talk, max_new: int, stops: set[int], limit: bool = False) -> None:
        history, session = talk.history, talk.session
        kept = data.draw(st.none() | lengths(len(history)), label="keep") if history else None
        base = history if kept is None else history[: max(0, kept)]
        new = data.draw(st.lists(st.integers(1, 3), min_size=0 if base else 1, max_size=9), label="new")
        params = SamplingParams(
            temperature=0.0,
            max_new_tokens=max_new,
            stop_token_ids=sorted(stops),
            time_limit_s=data.draw(st.sampled_from([1.0, 30.0])) if limit else None,
        )
        prompt = base + new
        is_legal = kept is None or 0 <= kept <= len(history)
        fits = (
            len(prompt) < session.capacity and page_count(len(prompt), self.page_size) <= self.core.allocator.num_pages
        )
        if talk.running is not None or talk.closing or not is_legal or not fits:
            before = (str(session.state), session.state.turn, str(session.slot.record))
            with pytest.raises(BadRequest):
                self.core.add_turn(session.id, np.array(new, np.int32), params, keep=kept)
            assert (str(session.state), session.state.turn, str(session.slot.record)) == before
            return
        request = self.core.add_turn(session.id, np.array(new, np.int32), params, keep=kept)
        if kept is not None:
            talk.cut(kept)
        wanted, reason = predicted(prompt, max_new, session.capacity, stops, self.executor.version)
        talk.running = Ask(request, new, wanted, reason, talk)
        self.asks.append(talk.running)

    @rule(name=st.sampled_from(["gone", *NAMES]))
    def turn_of_what_is_not_open(self, name):
        if name not in self.talks:
            with pytest.raises(SessionRefused, match="not open"):
                self.core.add_turn(name, np.ones(1, np.int32), SamplingParams())

    @rule(data=st.data(), max_new=st.integers(1, 6))
    def plain(self, data, max_new):
        prompt = self.prompt(data)
        if len(self.asks) > 6 or len(prompt) > self.room:
            return
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new)
        request = self.core.add(np.array(prompt, np.int32), params)[0]
        wanted, reason = predicted(prompt, max_new, CONTEXT, {EOS}, self.executor.version)
        self.asks.append(Ask(request, prompt, wanted, reason))

    @precondition(lambda self: len(self.talks) > 1)
    @rule(data=st.data(), abort=st.booleans())
    def close(self, data, abort):
        talk = self.talk(data)
        if talk is None:
            return
        talk.closing = True
        launched = talk.running is not None and self.flying(talk.running)
        closed = self.core.close_session(talk.session.id, abort=abort)
        self.settle()
        assert closed is (talk.session.state.phase is Phase.CLOSED)
        assert closed or launched or not abort
        assert self.core.close_session(talk.session.id) is closed

    @rule(data=st.data())
    def fork(self, data):
        talk = self.talk(data)
        if talk is None or len(self.talks) >= MAX_SESSIONS:
            return
        history = talk.history
        length = data.draw(lengths(len(history)), label="length")
        if not 0 <= length <= len(history):
            with pytest.raises(SessionError):
                self.core.sessions.fork(talk.session.id, length=length)
            return
        parent = (str(talk.session.slot.record), str(talk.session.state), talk.session.slot.record.borrower)
        child = Talk(self.core.sessions.fork(talk.session.id, length=length), list(talk.turns))
        assert (str(talk.session.slot.record), str(talk.session.state), talk.session.slot.record.borrower) == parent
        child.cut(length)
        self.talks[child.session.id] = child

    @rule(data=st.data())
    def rewind(self, data):
        talk = self.talk(data)
        if talk is None:
            return
        history = talk.history
        length = data.draw(lengths(len(history)), label="length")
        if talk.running is not None:
            with pytest.raises(SessionBusy):
                self.core.sessions.rewind(talk.session.id, length)
        elif not 0 <= length <= len(history):
            with pytest.raises(SessionError):
                self.core.sessions.rewind(talk.session.id, length)
        else:
            self.core.sessions.rewind(talk.session.id, length)
            talk.cut(length)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 3.0]), priority=st.sampled_from([0.5, 2.0]))
    def hold(self, data, seconds, priority):
        talk = self.talk(data)
        if talk is not None:
            self.core.sessions.hold(talk.session.id, seconds, priority)

    @rule()
    def demote(self):
        """Also: what idle rows would give is exactly what they give."""
        allocator = self.core.allocator
        promised = allocator.num_available + allocator.num_arriving + allocator.num_reclaimable
        self.core.sessions.demote_all()
        assert allocator.num_available + allocator.num_arriving == promised
        assert allocator.num_reclaimable == 0

    @rule()
    def flush(self):
        if self.core.has_work:
            with pytest.raises(BadRequest):
                self.core.flush_cache()
            return
        self.core.flush_cache()
        assert self.core.allocator.num_available == self.core.stats()["free_pages"] == self.core.allocator.num_pages

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    # Requests.

    @precondition(lambda self: self.may_launch)
    @rule()
    def launch(self):
        self.expire_then(self.core.launch)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def collect(self, fails):
        self.executor.fail_next = int(fails)
        self.core.collect()
        self.executor.fail_next = 0
        self.settle()

    @precondition(lambda self: not self.in_flight and self.asks)
    @rule(n=st.sampled_from([1, 2, 5, 40]))
    def steps(self, n):
        self.run(n)

    def run(self, n: int, retract_at: Container[int] = ()) -> None:
        for step in range(n):
            if not self.core.has_work:
                return
            if step in retract_at and (fitting := self.retractable()):
                self.core.scheduler.retract(fitting[-1].request)
                event("retracted")
            self.step()

    def step(self) -> None:
        """Both halves, with a look between them."""
        self.expire_then(self.core.launch)
        assert self.core.audit() == []
        if self.core.is_due:
            self.core.collect()
        self.settle()

    def expire_then(self, launch) -> None:
        for talk in self.talks.values():
            session = talk.session
            idle_s = self.clock.now_s - session.last_used_s
            if talk.running is None and session.timeout_s is not None and idle_s > session.timeout_s:
                talk.closing = True
        launch()
        self.forget_closed()
        self.settle()

    @rule(data=st.data())
    def retract(self, data):
        if fitting := self.retractable():
            self.core.scheduler.retract(data.draw(st.sampled_from(fitting), label="request").request)
            event("retracted")

    def retractable(self) -> list[Ask]:
        """What runs, but not what knows more than the pool can hold: that is about to end and would not come back."""
        running = [ask for ask in self.asks if ask.request.status is RequestStatus.RUNNING]
        return [ask for ask in running if ask.request.num_known <= self.room]

    @rule(data=st.data())
    def abort(self, data):
        if not self.asks:
            assert not self.core.abort("nobody")
            return
        ask = data.draw(st.sampled_from(self.asks), label="request")
        state = "launched" if self.flying(ask) else ask.request.status.value
        event(f"abort: {state}, retracted {ask.request.num_retractions > 0}, output {ask.request.num_output > 0}")
        assert self.core.abort(ask.request.id)
        assert (ask.request.finish is None) is self.flying(ask)
        self.settle()

    # What is always so.

    @invariant()
    def the_books_are_clean(self):
        assert self.core.audit() == []
        stats = self.core.stats()
        assert stats["request_pages"] >= 0
        if not self.core.has_work:
            assert stats["request_pages"] == 0

    @invariant()
    def every_history_is_its_finished_turns(self):
        for talk in self.talks.values():
            log = talk.session.log
            assert log.tokens.tolist() == talk.history
            assert [turn.end - turn.start for turn in log.turns] == [len(turn) for turn in talk.turns]

    @invariant()
    def every_turn_has_one_owner_and_every_owner_its_turn(self):
        live = {ask.request.id: ask.request for ask in self.asks}
        assert live == self.core._requests
        records = [talk.session.slot.record for talk in self.talks.values()]
        assert len({id(record) for record in records}) == len(records)
        borrowers = [record.borrower for record in records if record.borrower is not None]
        assert len(set(borrowers)) == len(borrowers)
        for talk in self.talks.values():
            state, running = talk.session.state, talk.running
            assert (state.turn is None) is (running is None)
            assert talk.closing is (state.phase is Phase.CLOSING)
            if running is not None:
                assert live[state.turn.request_id] is running.request
                assert running.request.turn == state.turn
                assert running.request.session is talk.session
                assert running.request.held is talk.session.slot.held
                is_running = running.request.status is RequestStatus.RUNNING
                assert is_running is (state.activity is Phase.RUNNING)
                assert is_running is (talk.session.slot.record.borrower == state.turn)
        assert {session.id for session in self.core.sessions.sessions()} == self.talks.keys()

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(600):
            if not self.core.has_work:
                break
            if self.may_launch:
                self.step()
            else:
                self.core.collect()
                self.settle()
        assert not self.core.has_work, "no progress"
        assert self.asks == []
        self.every_history_is_its_finished_turns()
        for talk in list(self.talks.values()):
            assert self.core.close_session(talk.session.id)
        assert self.core.audit() == []
        assert len(self.core.sessions) == 0
        stats = self.core.stats()
        assert stats["free_rows"] == stats["num_rows"]
        assert stats["tree_protected_pages"] == 0
        assert stats["free_pages"] + stats["tree_evictable_pages"] == stats["num_pages"]


def test_sessions_in_any_order_of_events():
    run_state_machine_as_test(Sessions, settings=settings(max_examples=90, stateful_step_count=50, deadline=None))
