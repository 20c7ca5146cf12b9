"""KV events: what a router or an outside index may hear of the tree. One block is one page.

A page's hash is `sha256(hash of the page before || its token ids)`; the chain starts from the namespace, so equal
tokens in another namespace, or behind another prefix, have another hash. The tree itself never looks anything up by
hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from mem_cache.tree.keys import Namespace


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Pages are readable from now on. `token_ids` are those of all the pages, `page_size` each."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes
    token_ids: tuple[int, ...]
    block_size: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages are gone."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole cache was flushed."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class KvEventLog:
    """Collects events until somebody takes them."""

    _events: list[KvEvent] = field(default_factory=list)

    def add(self, event: KvEvent) -> None:
        self._events.append(event)

    def take(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events


def namespace_hash(namespace: Namespace) -> bytes:
    """The hash that a first page chains from."""
    return sha256(b"rung-prefix-v1" + namespace.encoded).digest()


def page_hashes(parent: bytes, raw: bytes, page_bytes: int) -> list[bytes]:
    """Chained hashes of the pages of `raw`."""
    hashes = []
    for start in range(0, len(raw), page_bytes):
        parent = sha256(parent + raw[start : start + page_bytes]).digest()
        hashes.append(parent)
    return hashes
