"""Opening, limits, timeouts, closing, forking and who gives way first, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from devices.base import Capabilities
from devices.page_pool import PageFamilies, PageFamily
from mem_cache.allocation import KvAllocator
from mem_cache.audit import audit
from mem_cache.growth import extend, plan
from mem_cache.kv_info import ReqKvInfo, RowGeometry
from mem_cache.rows import RowPool
from mem_cache.tree.components import FullPages
from mem_cache.tree.prefix_tree import Match, PrefixTree
from session.controller import SessionController
from session.errors import SessionBusy, SessionError, SessionFull, UnknownSession
from session.session import Session, SessionLimits
from session.state import Phase


@dataclass
class World:
    """A controller over a real allocator; the test is the scheduler."""

    num_pages: int = 64
    num_rows: int = 8
    limits: SessionLimits = field(default_factory=SessionLimits)
    now: float = 0.0

    def __post_init__(self) -> None:
        family = PageFamily("full", 4)
        families = PageFamilies([(family, self.num_pages)])
        rows = RowPool(self.num_rows, RowGeometry(4, 256, (family,)))
        tree = PrefixTree((FullPages(families.pools["full"]),), 4)
        self.allocator = KvAllocator(families, rows, tree)
        capabilities = Capabilities(page_sizes=(4,), default_page_size=4, resume_unit="token")
        self.sessions = SessionController(
            self.allocator, capabilities, context_len=256, limits=self.limits, clock=lambda: self.now
        )

    def begin(self, session: Session, num_new: int, name: str = "r"):
        return self.sessions.begin(session.id, name, np.arange(num_new, dtype=np.int32) + session.generation, 1)

    def turn(self, session: Session, num_new: int, name: str = "r") -> None:
        """A whole turn with one generated token."""
        self.now += 1.0
        begun = self.begin(session, num_new, name)
        self.compute(session, begun)
        begun.tokens[begun.prompt_len] = 7
        assert session.finish(begun.turn, begun.prompt_len, begun.prompt_len + 1, self.now)
        self.check()

    def compute(self, session: Session, begun) -> None:
        wanted = begun.prompt_len - 1
        start = session.resume(begun.turn, wanted, begun.prompt_len, session.namespace)
        if not start:
            session.slot.held.lock = self.allocator.tree.lock(Match((), 0))
        record = session.slot.record
        self.allocator.own_tail(record)
        self.allocator.commit(
            plan([extend(record, begun.prompt_len, None if start else {"full": np.empty(0, np.int32)})])
        )
        session.start(begun.turn, start, wanted)
        record.schedule(begun.prompt_len)
        record.commit(begun.prompt_len)

    def check(self) -> None:
        assert audit(self.allocator, self.sessions.holdings()) == []
        assert self.sessions.audit() == []

    def rows(self) -> list[str]:
        return [session.id for session in self.sessions.sessions() if session.slot.has_row]


def test_a_turn_costs_its_new_tokens():
    world = World()
    session = world.sessions.open("a")
    for num_new in (10, 3, 5):
        world.turn(session, num_new)
    assert len(session.log) == 21
    assert session.stats.computed_tokens == 10 + 4 + 6
    assert session.held_tokens == 20


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"session_id": "x" * 300}, "256"),
        ({"session_id": "taken"}, "open already"),
        ({"capacity": 1}, "256 tokens"),
        ({"capacity": 257}, "256 tokens"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"timeout_s": float("inf")}, "timeout"),
    ],
)
@pytest.mark.parametrize("kind", ["open", "open_branching"])
def test_what_cannot_be_opened_changes_nothing(kind, kwargs, names):
    world = World()
    world.sessions.open("taken")
    with pytest.raises(SessionError, match=names):
        getattr(world.sessions, kind)(**kwargs)
    assert len(world.sessions) == 1


def test_as_many_sessions_as_the_limit_allows():
    world = World(limits=SessionLimits(max_sessions=2))
    world.sessions.open("a")
    world.sessions.open_branching("b")
    with pytest.raises(SessionFull, match="max-sessions"):
        world.sessions.open("c")
    world.sessions.close("b")
    world.sessions.open("c")


def test_a_full_history_refuses_the_turn_and_says_why():
    world = World()
    session = world.sessions.open("a", capacity=12)
    world.turn(session, 6)
    with pytest.raises(SessionFull, match="capacity is 12"):
        world.begin(session, 5)
    assert session.state.phase is Phase.IDLE
    world.turn(session, 4)
    assert len(session.log) == 12


def test_all_histories_together_have_a_limit():
    world = World(limits=SessionLimits(max_total_tokens=20))
    first, second = world.sessions.open(), world.sessions.open()
    world.turn(first, 10)
    with pytest.raises(SessionFull, match="max-session-tokens"):
        world.begin(second, 10)
    world.turn(second, 9)
    with pytest.raises(SessionFull, match="max-session-tokens"):
        world.begin(first, 1)
    world.sessions.rewind(first.id, 3)
    world.turn(first, 1)


@pytest.mark.parametrize("name", ["never", "closed", 3, None])
def test_a_session_that_is_not_there(name):
    world = World()
    world.sessions.open("closed")
    assert world.sessions.close("closed")
    for ask in (
        lambda: world.sessions.begin(name, "r", np.zeros(1, np.int32), 1),
        lambda: world.sessions.fork(name),
        lambda: world.sessions.rewind(name, 0),
        lambda: world.sessions.hold(name, 1.0),
    ):
        with pytest.raises(UnknownSession, match="not open"):
            ask()
    assert world.sessions.close("closed"), "closing twice is no error"


def test_a_name_that_is_opened_again_is_another_session():
    world = World()
    old = world.sessions.open("a")
    world.turn(old, 9)
    begun = world.begin(old, 2, "late")
    assert not world.sessions.close("a")
    assert not old.abort(begun.turn.__class__("late", 5), 0, 0.0)
    with pytest.raises(SessionError, match="open already"):
        world.sessions.open("a")
    assert old.abort(begun.turn, begun.prompt_len, world.now)
    new = world.sessions.open("a")
    assert new.generation > old.generation
    assert len(new.log) == 0
    assert not old.finish(begun.turn, 0, 0, 0.0), "a late end of the old one changes nothing"
    world.check()


def test_a_closing_session_takes_no_turn():
    world = World()
    session = world.sessions.open("a")
    begun = world.begin(session, 5)
    assert not world.sessions.close("a")
    with pytest.raises(SessionBusy, match="closed"):
        world.begin(session, 1, "r2")
    world.compute(session, begun)
    session.finish(begun.turn, begun.prompt_len, begun.prompt_len + 1, world.now)
    assert len(world.sessions) == 0
    world.check()
    assert world.rows() == []


def test_idle_sessions_expire_and_busy_ones_do_not():
    world = World()
    short, long, never = world.sessions.open(timeout_s=5.0), world.sessions.open(timeout_s=50.0), world.sessions.open()
    busy = world.sessions.open(timeout_s=5.0)
    begun = world.begin(busy, 3)
    world.now = 5.0
    world.sessions.expire()
    assert len(world.sessions) == 4
    world.now = 5.1
    world.sessions.expire()
    assert short.state.phase is Phase.CLOSED
    assert {session.id for session in world.sessions.sessions()} == {long.id, never.id, busy.id}
    world.now = 30.0
    busy.abort(begun.turn, begun.prompt_len, world.now)
    world.sessions.expire()
    assert busy.state.phase is Phase.IDLE
    world.now = 35.1
    world.sessions.expire()
    assert busy.state.phase is Phase.CLOSED
    world.now = 1e9
    world.sessions.expire()
    assert [session.id for session in world.sessions.sessions()] == [never.id]


def test_the_longest_unused_gives_way_first_and_a_hold_fades():
    world = World(num_pages=16)
    names = [world.sessions.open(name) for name in "abc"]
    for session in names:
        world.turn(session, 15)  # four pages each
    world.sessions.hold("a", 10.0, 2.0)
    world.sessions.hold("b", 10.0, 1.0)
    order = [next(s.id for s in names if s.slot.held is held) for held in world.sessions]
    assert order == ["c", "b", "a"]
    world.now += 8.0
    world.sessions.hold("c", 1.0, 0.3)
    assert [next(s.id for s in names if s.slot.held is held) for held in world.sessions] == ["b", "c", "a"]
    world.now += 2.0
    assert [next(s.id for s in names if s.slot.held is held) for held in world.sessions] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("seconds", "priority"), [(-1.0, 1.0), (float("nan"), 1.0), (1e9, 1.0), (1.0, 0.0), (1.0, float("inf"))]
)
def test_a_hold_has_a_range(seconds, priority):
    world = World()
    world.sessions.open("a")
    with pytest.raises(SessionError):
        world.sessions.hold("a", seconds, priority)


def test_idle_rows_give_way_page_by_page_and_no_more_than_needed():
    world = World(num_pages=16)
    names = [world.sessions.open(name) for name in "abcd"]
    for session in names:
        world.turn(session, 15)
    assert world.allocator.families.pools["full"].num_free == 0
    assert world.allocator.num_available == 0
    assert world.allocator.lacking(16) == 0
    assert world.allocator.lacking(17) == 1
    record = ReqKvInfo(world.allocator.geometry)
    world.allocator.commit(plan([extend(record, 20, {"full": np.empty(0, np.int32)})]))
    assert world.rows() == ["c", "d"]
    assert names[0].stats.num_demotions == names[1].stats.num_demotions == 1
    # `a` was let go whole; of `b` three pages are still the tree's.
    assert world.allocator.tree.num_evictable == 3
    assert world.sessions.audit() == []


def test_rows_are_scarce_as_well():
    world = World(num_rows=2)
    for name in "abcde":
        world.turn(world.sessions.open(name), 5)
    assert len(world.rows()) == 2
    assert world.rows() == ["d", "e"]


def test_pages_that_forks_share_count_once_and_only_when_all_give_way():
    world = World(num_pages=16)
    trunk = world.sessions.open("trunk")
    world.turn(trunk, 16)
    twin = world.sessions.fork("trunk", new_id="twin")
    world.check()
    assert world.allocator.num_reclaimable == 4
    begun = world.begin(twin, 2)
    twin.resume(begun.turn, len(twin.log) + 1, begun.prompt_len, twin.namespace)
    assert world.allocator.num_reclaimable == 0, "the twin computes on all four pages"
    twin.put_back(begun.turn)
    assert world.allocator.num_reclaimable == 4


def test_a_fork_never_takes_its_parents_row_to_make_room():
    world = World(num_pages=5, num_rows=3)
    trunk = world.sessions.open("trunk")
    world.turn(trunk, 18)  # five pages, the last partial
    child = world.sessions.fork("trunk")
    assert trunk.slot.has_row
    assert not child.slot.has_row, "there was no page for its copy of the last one"
    assert child.log.tokens.tolist() == trunk.log.tokens.tolist()
    world.check()


@pytest.mark.parametrize("length", [-1, 12, 1000])
def test_what_is_not_history_cannot_be_forked_or_kept(length):
    world = World()
    session = world.sessions.open("a")
    world.turn(session, 10)
    for ask in (lambda: world.sessions.fork("a", length=length), lambda: world.sessions.rewind("a", length)):
        with pytest.raises(SessionError, match="11 tokens"):
            ask()
    assert len(world.sessions) == 1
    assert len(session.log) == 11
    world.check()


def test_a_running_turn_can_be_forked_up_to_the_last_finished_one():
    world = World()
    session = world.sessions.open("a")
    world.turn(session, 10)
    begun = world.begin(session, 6)
    world.compute(session, begun)
    child = world.sessions.fork("a")
    assert child.log.tokens.tolist() == session.log.tokens.tolist()
    with pytest.raises(SessionError, match="11 tokens"):
        world.sessions.fork("a", length=14)
    with pytest.raises(SessionBusy, match="running"):
        world.sessions.rewind("a", 0)
    world.check()
    session.abort(begun.turn, begun.prompt_len, world.now)
    world.check()
    assert session.held_tokens == 11
