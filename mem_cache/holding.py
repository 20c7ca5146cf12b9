"""What somebody holds of the KV: a record with the lock on its prefix; and rows that give way when pages are short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mem_cache.kv_info import ReqKvInfo
from mem_cache.tree.prefix_tree import LockReceipt


@dataclass(slots=True, eq=False)
class Holding:
    """What a request or a session holds of the KV: a record, and the receipt that protects the record's prefix.

    A session lends the very same object to its running turn.
    """

    record: ReqKvInfo
    lock: LockReceipt | None = None


class IdleRows(Protocol):
    """Rows that nobody computes on; they give way when pages or rows are short."""

    def __iter__(self) -> Iterator[Holding]:
        """Those that hold a row, least worth keeping first."""
        ...

    def demote(self, holding: Holding) -> None:
        """Leave the row's whole pages to the tree and give the row back."""
        ...


class NoIdleRows:
    """An engine without sessions."""

    def __iter__(self) -> Iterator[Holding]:
        return iter(())

    def demote(self, holding: Holding) -> None:
        raise AssertionError(f"{holding.record} is not idle")
