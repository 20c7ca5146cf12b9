"""Why prefixes are not found, against a ledger that remembers everything the tree ever held."""

from __future__ import annotations

import random

import numpy as np

from devices.page_pool import PagePool
from mem_cache.tree.components import FullPages
from mem_cache.tree.keys import Namespace, PrefixKey
from mem_cache.tree.misses import MissLedger
from mem_cache.tree.prefix_tree import PrefixTree

PAGE = 4


def key(values: list[int], salt: str | None = None) -> PrefixKey:
    """A key of pages each of which repeats one value."""
    return PrefixKey(np.repeat(np.array(values, dtype=np.int32), PAGE), PAGE, Namespace(None, salt))


def test_reasons_are_those_of_a_ledger_that_forgets_nothing():
    pool = PagePool(64)
    tree = PrefixTree((FullPages(pool),), PAGE)
    dice = random.Random(1)
    gone: set[int] = set()  # values of pages that were ever let go
    seen: set[str | None] = set()

    def evict(num_pages: int) -> None:
        before = held_prefixes(tree)
        tree.evict(num_pages)
        gone.update(prefix[-1] for _, prefix in before - held_prefixes(tree))

    for _ in range(3000):
        salt = dice.choice([None, "a"])
        values = [10 * depth + dice.randrange(3) for depth in range(dice.randint(1, 4))]
        one = key(values, salt)
        match, held = tree.match(one), held_prefixes(tree)
        n = match.num_pages
        wanted: str | None = None
        if n == 0 and any(prefix == (values[0],) for _, prefix in held):
            wanted = "other_key"
        elif n < len(values):
            wanted = "evicted" if values[n] in gone else "never_seen"
        assert tree.why_shorter(one, match) == wanted
        seen.add(wanted)
        if dice.random() < 0.5:
            if pool.num_free < 8:
                evict(8)
            pages = pool.alloc(len(values))
            inserted = tree.insert(one, {"full": pages})
            pool.release(pages[: inserted.num_known])
        elif dice.random() < 0.2:
            evict(dice.randint(1, 6))
        if len(gone) > 6:  # so that new pages stay possible
            gone.clear()
            tree.misses._evicted.clear()
    assert seen == {None, "other_key", "evicted", "never_seen"}


def held_prefixes(tree: PrefixTree) -> set[tuple[str | None, tuple[int, ...]]]:
    """Salt and values of every prefix that the tree has."""
    found = set()
    for node in tree.nodes():
        raw, edge, above = b"", node.edge, node
        while above.parent is not None:
            raw, edge, above = above.raw + raw, above.edge, above.parent
        values = np.frombuffer(raw, dtype="<i4")[::PAGE].tolist()
        found |= {("a" if b"salt" in edge else None, tuple(values[:end])) for end in range(1, len(values) + 1)}
    return found


def test_the_memory_of_evicted_pages_is_bounded():
    ledger = MissLedger(4, max_remembered=3)
    pages = [bytes([index]) * 4 for index in range(5)]
    for page in pages:
        ledger.evicted(page)
    assert [ledger.why(page, is_first=False) for page in pages] == ["never_seen"] * 2 + ["evicted"] * 3
    assert ledger.num_evicted == 5
