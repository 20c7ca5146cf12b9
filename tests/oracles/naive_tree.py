"""The prefix cache as a dictionary: a page of a prefix, under a namespace, has an id. No nodes, no queue, no counters.

The tree keeps its times, hits and priorities on edges, so a use marks whole edges. `_ends` is all the dictionary needs
to know of that: the prefixes at which an edge ends. Slow on purpose: every question is a loop over all pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from mem_cache.tree.keys import Namespace

Prefix = tuple[Namespace, tuple[int, ...]]
"""A namespace and the tokens from the root to the end of a page: what that page's KV was computed from."""


@dataclass
class CachedPage:
    """A page of the cache: its id and what the policies ask about it."""

    page: int
    last_use: int = 0
    hits: int = 0
    priority: int = 0


NAIVE_ORDER: dict[str, Callable[[CachedPage], tuple[int, ...]]] = {
    "lru": lambda page: (page.last_use,),
    "lfu": lambda page: (page.hits, page.last_use),
    "slru": lambda page: (1 if page.hits >= 2 else 0, page.last_use),
    "priority": lambda page: (page.priority, page.last_use),
}


class NaiveTree:
    """A dictionary of cached prefixes, with locks and an order of eviction."""

    def __init__(self, page_size: int, policy: str = "lru") -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, CachedPage] = {}
        self.locks: list[Prefix] = []
        self._order = NAIVE_ORDER[policy]
        self._ends: set[Prefix] = set()
        self._now = 0

    def prefixes(self, namespace: Namespace, tokens: Sequence[int]) -> list[Prefix]:
        """The whole-page prefixes of `tokens`, shortest first."""
        ids = tuple(int(token) for token in tokens)
        return [(namespace, ids[:end]) for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Page ids of the leading run that is cached."""
        found: list[int] = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix].page)
        return found

    def insert(self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int], priority: int = 0) -> int:
        """Cache the whole pages of `tokens`; returns how many leading ones were known (they keep their ids)."""
        wanted = self.prefixes(namespace, tokens)
        known = len(self.match(namespace, tokens))
        if known < len(wanted):
            if known:
                self._ends.add(wanted[known - 1])
            for prefix, page in zip(wanted[known:], pages[known:], strict=True):
                self.pages[prefix] = CachedPage(int(page))
            used = wanted
        else:
            used = wanted + (self._rest_of_edge(wanted[-1]) if wanted else [])
        self._use(used)
        for prefix in used:
            self.pages[prefix].priority = max(self.pages[prefix].priority, priority)
        return known

    def lock(self, namespace: Namespace, tokens: Sequence[int], *, count_hit: bool = False) -> Prefix:
        """Lock the cached run of `tokens`; returns what was locked."""
        held = self.prefixes(namespace, tokens)[: len(self.match(namespace, tokens))]
        self._use(held)
        for prefix in held:
            self.pages[prefix].hits += count_hit
        locked = held[-1] if held else (namespace, ())
        if held:
            self._ends.add(locked)
        self.locks.append(locked)
        return locked

    def unlock(self, locked: Prefix) -> None:
        self.locks.remove(locked)

    def protected(self) -> set[Prefix]:
        """Pages that a lock stands on or passes through."""
        return {prefix for prefix in self.pages if any(_is_head(prefix, lock) for lock in self.locks)}

    def evictable(self) -> set[Prefix]:
        return self.pages.keys() - self.protected()

    def evict(self, num_pages: int) -> list[int]:
        """Drop the last page of the worst leaf, again and again; returns the ids in that order."""
        gone: list[int] = []
        while len(gone) < num_pages and (leaves := list(self._evictable_leaves())):
            victim = min(leaves, key=lambda prefix: self._order(self.pages[prefix]))
            gone.append(self.pages.pop(victim).page)
            self._ends.discard(victim)
        return gone

    def hashes(self) -> set[bytes]:
        """The chained hash of every cached page, from the definition: sha256(parent || tokens as int32)."""
        return {chained_hash(prefix, self.page_size) for prefix in self.pages}

    def _evictable_leaves(self) -> Iterator[Prefix]:
        inner = {self._parent(prefix) for prefix in self.pages}
        yield from (prefix for prefix in self.evictable() if prefix not in inner)

    def _parent(self, prefix: Prefix) -> Prefix:
        return prefix[0], prefix[1][: -self.page_size]

    def _rest_of_edge(self, prefix: Prefix) -> list[Prefix]:
        """Pages behind `prefix` on the same edge."""
        rest: list[Prefix] = []
        while prefix not in self._ends:
            behind = [other for other in self.pages if self._parent(other) == prefix]
            if not behind:
                break
            (prefix,) = behind
            rest.append(prefix)
        return rest

    def _use(self, prefixes: list[Prefix]) -> None:
        self._now += 1
        for prefix in prefixes:
            self.pages[prefix].last_use = self._now


def chained_hash(prefix: Prefix, page_size: int) -> bytes:
    """Hash of the last page of `prefix`."""
    namespace, tokens = prefix
    digest = sha256(b"rung-prefix-v1" + namespace.encoded).digest()
    for start in range(0, len(tokens), page_size):
        page = b"".join(int(token).to_bytes(4, "little", signed=True) for token in tokens[start : start + page_size])
        digest = sha256(digest + page).digest()
    return digest


def _is_head(prefix: Prefix, of: Prefix) -> bool:
    return prefix[0] == of[0] and of[1][: len(prefix[1])] == prefix[1]
