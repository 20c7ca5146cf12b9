"""Whatever is tried on a record, in any order, the ladder holds and a refused move leaves no trace."""

from __future__ import annotations

import strategies as domain
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_cache.kv_info import LadderError, Owner, OwnerKind, OwnershipError, ReqKvInfo, Turn


@settings(max_examples=300)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]))
def test_any_sequence_of_moves_keeps_the_ladder(data: st.DataObject, page_size: int) -> None:
    shape = domain.geometry(page_size, 4, window=True)
    record = ReqKvInfo(shape)
    record.bind(1)
    for move, n in data.draw(domain.ladder_moves(shape.row_width)):
        before = domain.snapshot_record(record)
        try:
            getattr(record, move)(n)
        except LadderError:
            assert domain.snapshot_record(record) == before
        protected, allocated = record.cache_protected_len, record.kv_allocated_len
        assert 0 <= protected <= record.kv_committed_len <= record.kv_scheduled_len <= allocated <= shape.row_width
        assert protected % page_size == allocated % page_size == record.swa_evicted_seqlen % page_size == 0
        assert record.swa_evicted_seqlen <= record.kv_committed_len


turns = st.builds(Turn, st.sampled_from(["r1", "r2"]), st.integers(0, 1))
owners = st.builds(Owner, st.sampled_from(list(OwnerKind)), st.sampled_from(["a", "b"]))


@given(
    st.lists(st.one_of(st.tuples(st.sampled_from(["lend", "give_back"]), turns), st.tuples(st.just("detach"), owners)))
)
def test_a_record_has_one_borrower_and_one_owner_whatever_is_tried(calls: list[tuple[str, Turn | Owner]]) -> None:
    record = ReqKvInfo(domain.geometry(4, 2))
    borrower: Turn | None = None
    owner = record.owner
    for call, who in calls:
        allowed = borrower == who if call == "give_back" else borrower is None
        try:
            getattr(record, call)(who)
        except OwnershipError:
            assert not allowed
        else:
            assert allowed
            if call == "detach":
                assert isinstance(who, Owner)
                owner = who
            else:
                assert isinstance(who, Turn)
                borrower = who if call == "lend" else None
        assert (record.owner, record.borrower) == (owner, borrower)
