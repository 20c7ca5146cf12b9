"""The record: every move from every small ladder, ownership, and what it says when it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from strategies import snapshot_record

from devices.page_pool import PageFamily
from mem_cache.kv_info import (
    NOBODY,
    HostBackup,
    LadderError,
    Owner,
    OwnerKind,
    OwnershipError,
    RecurrentState,
    ReqKvInfo,
    RowGeometry,
    Turn,
)

PAGE = 2
WIDTH = 3 * PAGE
GEOMETRY = RowGeometry(PAGE, WIDTH, (PageFamily("full", PAGE),))


@dataclass(frozen=True)
class Ladder:
    """Lengths as the rules speak of them."""

    protected: int = 0
    committed: int = 0
    scheduled: int = 0
    allocated: int = 0
    floor: int = 0
    cursor: int = 0

    @property
    def dead_lo(self) -> int:
        return max(self.protected, self.floor + self.floor % PAGE)


def reads(record: ReqKvInfo) -> Ladder:
    return Ladder(
        record.cache_protected_len,
        record.kv_committed_len,
        record.kv_scheduled_len,
        record.kv_allocated_len,
        record.swa_evict_floor,
        record.swa_evicted_seqlen,
    )


def climb(ladder: Ladder) -> ReqKvInfo:
    """A record at `ladder`, by legal moves only."""
    record = ReqKvInfo(GEOMETRY, Owner(OwnerKind.REQUEST, "r1"))
    record.bind(1)
    record.reserve(ladder.allocated)
    record.schedule(ladder.scheduled)
    record.commit(ladder.committed)
    record.protect(ladder.protected)
    record.shield_window(ladder.floor)
    if ladder.cursor:
        record.slide_window(ladder.cursor)
    return record


def ladders() -> Iterator[Ladder]:
    for allocated in range(0, WIDTH + 1, PAGE):
        for scheduled in range(allocated + 1):
            for committed in range(scheduled + 1):
                for protected in range(0, committed + 1, PAGE):
                    yield Ladder(protected, committed, scheduled, allocated)


def windows() -> Iterator[Ladder]:
    for ladder in ladders():
        for floor in range(ladder.scheduled + 1):
            low = replace(ladder, floor=floor)
            yield low
            for cursor in range(low.dead_lo, ladder.committed + 1, PAGE):
                if cursor:
                    yield replace(low, cursor=cursor)


def whole(n: int) -> bool:
    return n in range(0, WIDTH + 1, PAGE)


@dataclass(frozen=True)
class Move:
    """A move, when the architecture allows it, and where it leads."""

    name: str
    legal: Callable[[Ladder, int], bool]
    leads_to: Callable[[Ladder, int], Ladder]


MOVES = [
    Move(
        "adopt",
        lambda at, n: at.allocated == 0 and whole(n),
        lambda at, n: replace(at, protected=n, committed=n, scheduled=n, allocated=n),
    ),
    Move("reserve", lambda at, n: at.scheduled <= n and whole(n), lambda at, n: replace(at, allocated=n)),
    Move("schedule", lambda at, n: at.scheduled <= n <= at.allocated, lambda at, n: replace(at, scheduled=n)),
    Move("commit", lambda at, n: at.committed <= n <= at.scheduled, lambda at, n: replace(at, committed=n)),
    Move(
        "protect", lambda at, n: at.protected <= n <= at.committed and whole(n), lambda at, n: replace(at, protected=n)
    ),
    Move(
        "rewind",
        lambda at, n: at.protected <= n <= at.scheduled and at.cursor <= n,
        lambda at, n: replace(at, scheduled=n, committed=min(at.committed, n)),
    ),
]
WINDOW_MOVES = [
    Move(
        "shield_window",
        lambda at, n: (
            at.floor <= n <= at.scheduled and (at.cursor <= at.dead_lo or replace(at, floor=n).dead_lo == at.dead_lo)
        ),
        lambda at, n: replace(at, floor=n),
    ),
    Move(
        "slide_window",
        lambda at, n: max(at.dead_lo, at.cursor) <= n <= at.committed and whole(n),
        lambda at, n: replace(at, cursor=n),
    ),
]


def try_every_length(move: Move, ladder: Ladder) -> tuple[int, int]:
    """Make the move to every length that exists and two that do not; returns how many were legal and illegal."""
    legal = 0
    lengths = range(-1, WIDTH + 3)
    for n in lengths:
        record = climb(ladder)
        before = snapshot_record(record)
        if move.legal(ladder, n):
            getattr(record, move.name)(n)
            assert reads(record) == move.leads_to(ladder, n)
            assert snapshot_record(record)[0] == 1
            legal += 1
            continue
        with pytest.raises(LadderError) as refused:
            getattr(record, move.name)(n)
        assert snapshot_record(record) == before
        text = str(refused.value)
        assert f"{move.name}({n})" in text
        assert f"committed {ladder.committed} <= scheduled {ladder.scheduled}" in text
        assert f"protected {ladder.protected} <=" in text
        assert f"allocated {ladder.allocated} <= width {WIDTH}" in text
    return legal, len(lengths) - legal


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.name)
def test_exactly_the_legal_moves_of_every_small_ladder_succeed(move: Move) -> None:
    counts = [try_every_length(move, ladder) for ladder in ladders()]
    assert sum(legal for legal, _ in counts) > 0
    assert sum(illegal for _, illegal in counts) > 0


@pytest.mark.parametrize("move", [MOVES[-1], *WINDOW_MOVES], ids=lambda move: move.name)
def test_exactly_the_legal_moves_behind_a_sliding_window_succeed(move: Move) -> None:
    counts = [try_every_length(move, ladder) for ladder in windows()]
    assert sum(legal for legal, _ in counts) > 0
    assert sum(illegal for _, illegal in counts) > 0


def test_a_refusal_carries_the_move_the_value_and_the_rule() -> None:
    record = climb(Ladder(0, 1, 3, 4))
    with pytest.raises(LadderError) as refused:
        record.commit(4)
    assert (refused.value.move, refused.value.value) == ("commit", 4)
    assert refused.value.rule == "committed <= n <= scheduled"
    assert "request r1" in str(refused.value)


def test_a_row_is_bound_once_and_never_the_padding_row() -> None:
    record = ReqKvInfo(GEOMETRY)
    for wrong in (0, -1):
        with pytest.raises(LadderError, match=rf"bind\({wrong}\)"):
            record.bind(wrong)
    assert record.req_pool_idx is None
    with pytest.raises(LadderError, match="a row is bound"):
        _ = record.row
    record.bind(3)
    assert (record.req_pool_idx, record.row) == (3, 3)
    with pytest.raises(LadderError, match=r"bind\(4\).*row 3"):
        record.bind(4)
    assert record.row == 3


@pytest.mark.parametrize("ladder", [Ladder(), Ladder(2, 3, 4, 6), Ladder(2, 5, 6, 6, floor=3, cursor=4)], ids=str)
def test_releasing_forgets_the_row_and_every_length_and_keeps_owner_and_backup(ladder: Ladder) -> None:
    record = climb(ladder)
    record.state = RecurrentState(slot=2, seq_len=3)
    record.backup = HostBackup((7, 8), 3)
    record.mark_released()
    assert reads(record) == Ladder()
    assert record.req_pool_idx is None
    assert record.state is None
    assert record.backup == HostBackup((7, 8), 3)
    assert record.owner == Owner(OwnerKind.REQUEST, "r1")
    record.mark_released()
    record.bind(2)
    record.adopt(WIDTH)


def test_a_window_that_let_pages_go_cannot_be_told_to_have_kept_them() -> None:
    record = climb(Ladder(0, 6, 6, 6, floor=0, cursor=4))
    for floor in (1, 2, 4, 6):
        with pytest.raises(LadderError, match=rf"shield_window\({floor}\)"):
            record.shield_window(floor)
    assert (record.swa_evict_floor, record.swa_evicted_seqlen) == (0, 4)


def test_a_window_floor_inside_a_page_keeps_the_whole_page() -> None:
    record = climb(Ladder(0, 6, 6, 6, floor=3))
    assert record.swa_dead_lo(PAGE) == 4
    with pytest.raises(LadderError, match=r"slide_window\(2\).*= 4"):
        record.slide_window(2)
    record.slide_window(6)
    assert "window[3,6)" in str(record)


PROPERTIES = [
    "req_pool_idx",
    "row",
    "cache_protected_len",
    "kv_committed_len",
    "kv_scheduled_len",
    "kv_allocated_len",
    "swa_evict_floor",
    "swa_evicted_seqlen",
    "owner",
    "borrower",
]


@pytest.mark.parametrize("name", PROPERTIES)
def test_nobody_assigns_a_field(name: str) -> None:
    record = climb(Ladder(0, 1, 2, 4))
    before = snapshot_record(record)
    with pytest.raises(AttributeError):
        setattr(record, name, 1)
    assert snapshot_record(record) == before


def test_a_record_takes_no_new_fields() -> None:
    with pytest.raises(AttributeError):
        ReqKvInfo(GEOMETRY).kv_commited_len = 3  # type: ignore[attr-defined]


def test_a_row_width_must_be_whole_pages() -> None:
    with pytest.raises(ValueError, match="row_width=5 is not whole pages of 2"):
        RowGeometry(2, 5, (PageFamily("full", 2),))


TURN, OTHER = Turn("r1", 0), Turn("r1", 1)


def test_one_turn_at_a_time_borrows_a_record() -> None:
    record = ReqKvInfo(GEOMETRY, Owner(OwnerKind.SESSION, "s1"))
    record.lend(TURN)
    for second in (OTHER, TURN):
        before = snapshot_record(record)
        with pytest.raises(OwnershipError, match="borrows it"):
            record.lend(second)
        assert snapshot_record(record) == before
    record.give_back(TURN)
    record.lend(OTHER)
    assert record.borrower == OTHER


def test_a_foreign_turn_gives_nothing_back() -> None:
    record = ReqKvInfo(GEOMETRY, Owner(OwnerKind.SESSION, "s1"))
    with pytest.raises(OwnershipError, match="nobody borrows it"):
        record.give_back(TURN)
    record.lend(TURN)
    for foreign in (OTHER, Turn("r2", 0)):
        with pytest.raises(OwnershipError, match="r1"):
            record.give_back(foreign)
        assert record.borrower == TURN
    record.give_back(Turn("r1", 0))
    assert record.borrower is None


def test_a_record_passes_to_another_owner_with_all_its_lengths_but_not_while_it_is_lent() -> None:
    record = climb(Ladder(2, 3, 4, 6))
    session = Owner(OwnerKind.SESSION, "s1")
    assert record.detach(session) is record
    assert record.owner == session
    assert reads(record) == Ladder(2, 3, 4, 6)
    record.lend(TURN)
    with pytest.raises(OwnershipError, match="cannot pass to transfer t1"):
        record.detach(Owner(OwnerKind.TRANSFER, "t1"))
    assert record.owner == session


def test_a_new_record_belongs_to_nobody_and_holds_nothing() -> None:
    record = ReqKvInfo(GEOMETRY)
    assert record.owner == NOBODY
    assert str(NOBODY) == "nobody"
    assert reads(record) == Ladder()
