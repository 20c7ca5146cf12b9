"""The audit: clean books have no violation, and each way to spoil them is reported by its name and its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from strategies import Books, blocks, make_books, snapshot, tokens_of

from mem_cache.audit import Holding, Violation, audit
from mem_cache.growth import decode, extend, plan
from mem_cache.kv_info import Owner, OwnerKind, ReqKvInfo
from mem_cache.tree.keys import Namespace
from mem_cache.tree.node import Node

BASE = Namespace()


@dataclass
class Scene:
    """A request and a session that share a prefix, a cached branch nobody uses, free and pending pages."""

    books: Books
    request: Holding
    session: Holding

    @property
    def held(self) -> list[Holding]:
        return [self.request, self.session]

    @property
    def pool(self) -> object:
        return self.books.families.pools["full"]

    def own_page(self, who: Holding) -> np.ndarray:
        record = who.record
        return self.books.rows.pages("full", record.row, record.cache_protected_len, record.kv_allocated_len)[:1]

    def idle_node(self) -> Node:
        return next(node for node in self.books.tree.nodes() if node.is_evictable_leaf)


def play(books: Books, tokens: np.ndarray, owner: Owner) -> Holding:
    record = ReqKvInfo(books.geometry, owner)
    lock = books.tree.lock(books.allocator.match(tokens, BASE))
    prefix = {name: books.tree.pages(lock, name) for name in books.families.pools}
    books.allocator.commit(plan([extend(record, len(tokens), prefix)]))
    record.schedule(len(tokens))
    record.commit(len(tokens))
    return Holding(record, books.allocator.publish(record, tokens, BASE, lock))


@pytest.fixture
def scene() -> Scene:
    books = make_books(4, num_pages=20, window=True)
    done = play(books, blocks([0, 1, 5], 4), Owner(OwnerKind.REQUEST, "done"))
    books.allocator.release(done.record, done.lock)
    request = play(books, np.append(blocks([0, 1, 2], 4), 7), Owner(OwnerKind.REQUEST, "r1"))
    session = play(books, np.append(blocks([0, 1], 4), 7), Owner(OwnerKind.SESSION, "s1"))
    aborted = play(books, tokens_of([9, 9]), Owner(OwnerKind.REQUEST, "aborted"))
    books.families.fence("step 1")
    books.allocator.release(aborted.record, aborted.lock)
    return Scene(books, request, session)


def test_clean_books_have_no_violation_and_looking_changes_nothing(scene: Scene) -> None:
    records = [holding.record for holding in scene.held]
    assert scene.books.families.pools["full"].num_pending == 1
    before = snapshot(scene.books, records)
    assert audit(scene.books.allocator, scene.held) == []
    assert snapshot(scene.books, records) == before


def test_empty_books_have_no_violation() -> None:
    assert audit(make_books(16).allocator, []) == []


def test_a_record_that_waits_without_a_row_has_no_violation(scene: Scene) -> None:
    waiting = Holding(scene.books.record("w"), scene.books.tree.lock(scene.books.allocator.match(tokens_of([1]), BASE)))
    assert audit(scene.books.allocator, [*scene.held, waiting, Holding(scene.books.record("new"), None)]) == []


# Each spoils one thing and says what the audit must name: (kind, a word of the owner).


def leak_a_page(scene: Scene) -> None:
    scene.pool.alloc(1)


def free_a_page_in_use(scene: Scene) -> None:
    scene.pool.release(scene.own_page(scene.request))


def free_a_page_of_the_tree(scene: Scene) -> None:
    scene.books.families.pools["window"].release(scene.idle_node().held["window"])


def count_an_owner_too_many(scene: Scene) -> None:
    scene.pool.retain(scene.own_page(scene.session))


def count_an_owner_too_few(scene: Scene) -> None:
    page = scene.own_page(scene.session)
    scene.books.rows.tables["full"][scene.request.record.row, 3] = page[0]


def count_a_free_page(scene: Scene) -> None:
    scene.pool._refs[scene.pool.free_pages()[0]] = 1


def name_a_free_page_twice(scene: Scene) -> None:
    scene.pool._stack[0] = scene.pool._stack[1]


def put_a_page_on_both_lists(scene: Scene) -> None:
    scene.pool._push_free(scene.pool.pending_pages())


def wait_twice_for_a_page(scene: Scene) -> None:
    scene.pool._pending.append(scene.pool._pending[0])


def own_the_padding_page(scene: Scene) -> None:
    record = scene.request.record
    scene.books.rows.tables["full"][record.row, 3] = 0


def share_a_row(scene: Scene) -> None:
    scene.session.record._row = scene.request.record.row


def hold_a_row_that_was_given_back(scene: Scene) -> None:
    scene.books.rows._used.remove(scene.request.record.row)


def leak_a_row(scene: Scene) -> None:
    scene.books.rows.alloc()


def forget_a_record(scene: Scene) -> None:
    scene.request = Holding(scene.books.record("new"), scene.request.lock)


def leak_a_lock(scene: Scene) -> None:
    scene.books.tree.lock(scene.books.allocator.match(blocks([0, 1], 4), BASE))


def hold_a_lock_that_was_given_back(scene: Scene) -> None:
    other = scene.books.tree.lock(scene.books.allocator.match(blocks([0, 1], 4), BASE))
    scene.books.tree.unlock(other)
    scene.session = Holding(scene.session.record, other)


def lose_the_lock(scene: Scene) -> None:
    scene.books.tree.unlock(scene.request.lock)
    scene.request = Holding(scene.request.record, None)


def miscount_a_nodes_locks(scene: Scene) -> None:
    scene.idle_node().lock_count -= 1


def miscount_the_evictable(scene: Scene) -> None:
    scene.books.tree.num_evictable += 1


def miscount_the_protected(scene: Scene) -> None:
    scene.books.tree.num_protected -= 1


def rename_an_edge(scene: Scene) -> None:
    node = scene.idle_node()
    del node.parent.children[node.edge]
    node.edge = b"\0" * 16
    node.parent.children[node.edge] = node


def unhook_an_edge(scene: Scene) -> None:
    node = scene.idle_node()
    node.parent.children[b"elsewhere"] = node.parent.children.pop(node.edge)


def shorten_an_edges_tokens(scene: Scene) -> None:
    node = scene.idle_node()
    node.raw = node.raw[:-4]


def lose_a_page_of_an_edge(scene: Scene) -> None:
    node = scene.idle_node()
    scene.pool.release(node.held["full"])
    node.held["full"] = node.held["full"][:0]


def forget_to_queue_a_leaf(scene: Scene) -> None:
    scene.idle_node().queued = False


def name_another_page_in_the_protected_part(scene: Scene) -> None:
    row = scene.books.rows.tables["full"][scene.session.record.row]
    row[0], row[1] = row[1], row[0]


def name_another_window_page_in_the_protected_part(scene: Scene) -> None:
    row = scene.books.rows.tables["window"][scene.session.record.row]
    row[0], row[1] = row[1], row[0]


def commit_what_was_not_scheduled(scene: Scene) -> None:
    scene.request.record._committed = scene.request.record.kv_scheduled_len + 1


def protect_what_was_not_committed(scene: Scene) -> None:
    scene.session.record._protected = 12


def allocate_part_of_a_page(scene: Scene) -> None:
    scene.request.record._allocated -= 1


def protect_part_of_a_page(scene: Scene) -> None:
    scene.session.record._protected -= 1


def keep_a_length_after_the_row_is_gone(scene: Scene) -> None:
    scene.books.allocator.release(scene.request.record, None)
    scene.request.record._committed = scene.request.record._scheduled = scene.request.record._allocated = 4


SPOILERS: list[tuple[Callable[[Scene], None], str, str]] = [
    (leak_a_page, "leak", "nobody"),
    (free_a_page_in_use, "used-after-free", "request r1"),
    (free_a_page_of_the_tree, "used-after-free", "tree"),
    (count_an_owner_too_many, "miscounted", "session s1"),
    (count_an_owner_too_few, "miscounted", "session s1"),
    (count_a_free_page, "miscounted", "nobody"),
    (name_a_free_page_twice, "free-twice", "nobody"),
    (put_a_page_on_both_lists, "free-and-pending", "nobody"),
    (wait_twice_for_a_page, "pending-twice", "nobody"),
    (own_the_padding_page, "no-such-page", "request r1"),
    (share_a_row, "row-shared", "session s1"),
    (hold_a_row_that_was_given_back, "row-not-handed-out", "request r1"),
    (leak_a_row, "row-leak", "nobody"),
    (forget_a_record, "row-leak", "nobody"),
    (forget_a_record, "leak", "nobody"),
    (leak_a_lock, "lock-leak", "tree"),
    (hold_a_lock_that_was_given_back, "lock-leak", "tree"),
    (lose_the_lock, "unlocked", "request r1"),
    (miscount_a_nodes_locks, "lock-count", "tree"),
    (miscount_the_evictable, "tree-totals", "tree"),
    (miscount_the_protected, "tree-totals", "tree"),
    (rename_an_edge, "edge-name", "tree"),
    (unhook_an_edge, "edge-name", "tree"),
    (shorten_an_edges_tokens, "edge-length", "tree"),
    (lose_a_page_of_an_edge, "edge-pages", "tree"),
    (forget_to_queue_a_leaf, "not-queued", "tree"),
    (name_another_page_in_the_protected_part, "not-the-trees-pages", "session s1"),
    (name_another_window_page_in_the_protected_part, "not-the-trees-pages", "session s1"),
    (commit_what_was_not_scheduled, "ladder", "request r1"),
    (protect_what_was_not_committed, "ladder", "session s1"),
    (allocate_part_of_a_page, "ladder", "request r1"),
    (protect_part_of_a_page, "ladder", "session s1"),
    (keep_a_length_after_the_row_is_gone, "length-without-row", "request r1"),
]


@pytest.mark.parametrize(("spoil", "kind", "owner"), SPOILERS, ids=lambda value: getattr(value, "__name__", value))
def test_spoiled_books_are_reported_with_what_is_wrong_and_whose_it_is(
    scene: Scene, spoil: Callable[[Scene], None], kind: str, owner: str
) -> None:
    spoil(scene)
    found = audit(scene.books.allocator, scene.held)
    assert any(violation.kind == kind and owner in violation.owner for violation in found), "\n".join(map(str, found))
    assert all(violation.owner and violation.text for violation in found)


def test_a_leak_is_found_while_requests_are_alive_and_goes_away_when_it_is_mended(scene: Scene) -> None:
    pages = scene.pool.alloc(2)
    found = audit(scene.books.allocator, scene.held)
    assert [violation.kind for violation in found] == ["leak", "leak"]
    assert str(pages[0]) in found[0].text
    scene.books.allocator.commit(plan([decode(scene.request.record)]))
    scene.pool.release(pages)
    assert audit(scene.books.allocator, scene.held) == []


def test_a_violation_reads_as_one_line() -> None:
    assert (
        str(Violation("leak", "nobody", "page 3 of 'full' has 1 counts"))
        == "leak [nobody]: page 3 of 'full' has 1 counts"
    )
