"""The record of one row of KV, and the only moves it can make.

    row      |<- the tree's ->|<- the owner's, readable ->|<- launched ->|<- reserved ->|
    0        cache_protected  kv_committed               kv_scheduled   kv_allocated
             _len             _len                       _len           _len

Always `0 <= protected <= committed <= scheduled <= allocated <= row width`, and `protected` and `allocated` are whole
pages. The lengths are read-only: a move is a method that checks the ladder first and, when it refuses, says both
numbers. *Committed* is what a finished forward wrote, never a count of tokens somebody received. The moves change
lengths only; pages are taken and given back beside them in `allocation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from devices.page_pool import PageFamily
from devices.pages import ceil_page, is_whole_pages


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """What every row of a pool has in common.

    Attributes:
        page_size: tokens in a page of the full family.
        row_width: most tokens that a row can hold, whole pages.
        families: kinds of page a row has, "full" first.
        coarse: those whose page stands for several of the row's.
    """

    page_size: int
    row_width: int
    families: tuple[PageFamily, ...]
    coarse: tuple[PageFamily, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "coarse", tuple(family for family in self.families if self.is_coarse(family)))
        if not is_whole_pages(self.row_width, self.page_size):
            raise ValueError(f"row_width={self.row_width} is not whole pages of {self.page_size}")
        for family in self.families:
            if not is_whole_pages(family.tokens_per_page, self.page_size):
                raise ValueError(f"{family}: its pages are not whole pages of the row's {self.page_size} tokens")
            if not is_whole_pages(self.page_size, family.ratio):
                raise ValueError(f"{family}: a page of {self.page_size} tokens ends inside an entry")
        if sum(family.window is not None for family in self.families) > 1:
            raise ValueError("a row has one window cursor: layers with windows share a family, of the largest window")

    def is_coarse(self, family: PageFamily) -> bool:
        """Whether a page of the family stands for several pages of the row: a row's own part may start inside one."""
        return family.tokens_per_page > self.page_size


class OwnerKind(Enum):
    """What can own a record."""

    NOBODY = "nobody"
    REQUEST = "request"
    SESSION = "session"
    BEAM = "beam"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Owner:
    """Exactly one of these owns a record at a time."""

    kind: OwnerKind
    id: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.id}".strip()


NOBODY = Owner(OwnerKind.NOBODY)


@dataclass(frozen=True, slots=True)
class Turn:
    """Who borrows a session's record: one attempt of one request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Slot of a recurrent layer's state that belongs to the row, and the length it was taken at."""

    slot: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class HostBackup:
    """Where a retraction left the row's KV in host memory: `length` tokens at `host_pages`."""

    host_pages: tuple[int, ...]
    length: int


class LadderError(Exception):
    """A move would break the ladder; the record is unchanged. A bug in the caller."""

    def __init__(self, move: str, value: Any, record: ReqKvInfo, rule: str) -> None:
        self.move, self.value, self.rule = move, value, rule
        super().__init__(f"{move}({value}) breaks `{rule}` on {record}")


class OwnershipError(Exception):
    """Somebody touched a record that another holds; the record is unchanged."""


class ReqKvInfo:
    """One row of KV: whose it is, which row, and how far it has climbed. Lengths are tokens."""

    __slots__ = (
        "_allocated",
        "_borrower",
        "_committed",
        "_owner",
        "_protected",
        "_row",
        "_scheduled",
        "_swa_evict_floor",
        "_swa_evicted",
        "backup",
        "geometry",
        "state",
    )

    def __init__(self, geometry: RowGeometry, owner: Owner = NOBODY) -> None:
        self.geometry = geometry
        self.state: RecurrentState | None = None
        self.backup: HostBackup | None = None
        self._owner = owner
        self._borrower: Turn | None = None
        self._row: int | None = None
        self._reset_lengths()

    def _reset_lengths(self) -> None:
        self._protected = self._committed = self._scheduled = self._allocated = 0
        self._swa_evict_floor = self._swa_evicted = 0

    # What it says. SGLang's names, so that its users feel at home.

    @property
    def req_pool_idx(self) -> int | None:
        """Row number; None means that the record holds no KV."""
        return self._row

    @property
    def row(self) -> int:
        """Row number of a record that holds one. Raises LadderError when it holds none."""
        if self._row is None:
            raise LadderError("row", "read", self, "a row is bound")
        return self._row

    @property
    def cache_protected_len(self) -> int:
        """`[0, here)` belongs to the prefix tree; the owner never frees it."""
        return self._protected

    @property
    def kv_committed_len(self) -> int:
        """`[0, here)` was written by forwards that have finished."""
        return self._committed

    @property
    def kv_scheduled_len(self) -> int:
        """`[committed, here)` is promised by a launched step."""
        return self._scheduled

    @property
    def kv_allocated_len(self) -> int:
        """`[0, here)` of the row names pages that are the tree's or the owner's."""
        return self._allocated

    @property
    def swa_evict_floor(self) -> int:
        """`[0, here)` is never let go by the window."""
        return self._swa_evict_floor

    @property
    def swa_evicted_seqlen(self) -> int:
        """The window's cursor: its pages of `[swa_dead_lo, here)` are gone."""
        return self._swa_evicted

    @property
    def owner(self) -> Owner:
        return self._owner

    @property
    def borrower(self) -> Turn | None:
        return self._borrower

    @property
    def is_sound(self) -> bool:
        """Whether the ladder climbs, on whole pages where it must, and without a row holds nothing."""
        climbs = 0 <= self._protected <= self._committed <= self._scheduled <= self._allocated
        if self._row is None:
            return climbs and self._allocated == 0
        return climbs and self._is_page_border(self._protected) and self._is_page_border(self._allocated)

    def swa_dead_lo(self, page_size: int) -> int:
        """First token whose window page the cursor may let go: behind the tree's part and the floor, whole pages."""
        return max(self._protected, ceil_page(self._swa_evict_floor, page_size))

    # The moves.

    def bind(self, row: int) -> None:
        """Take a row. Raises LadderError when one is bound already."""
        if self._row is not None or row < 1:
            raise LadderError("bind", row, self, "no row is bound and the row is not the padding row 0")
        self._row = row

    def adopt(self, n: int, swa_evicted: int = 0) -> None:
        """Start from a matched prefix: `[0, n)` is the tree's and readable.

            0           protected = committed = scheduled = allocated -> n
            |  tree's   |

        Args:
            swa_evicted: the window's cursor, when another row that had let go of its window there is forked.
        Raises LadderError unless the record is empty and `swa_evicted <= n` are whole pages within the row.
        """
        if self._allocated != 0 or not self._is_page_border(n) or not 0 <= swa_evicted <= n:
            raise LadderError("adopt", n, self, "allocated == 0 and n is whole pages <= row width")
        self._protected = self._committed = self._scheduled = self._allocated = n
        self._swa_evicted = swa_evicted

    def reserve(self, n: int) -> None:
        """Set the end of the allocated part, growing or giving back reserved pages.

            0        protected      committed      scheduled     allocated -> n
            |  tree's   |      readable     |   in flight  |  reserved   |

        Raises LadderError unless `scheduled <= n <= row width` and `n` is whole pages.
        """
        if n < self._scheduled or not self._is_page_border(n):
            raise LadderError("reserve", n, self, "scheduled <= n <= row width, whole pages")
        self._allocated = n

    def schedule(self, n: int) -> None:
        """A step that writes `[scheduled, n)` was launched. Raises LadderError unless `scheduled <= n <= allocated`."""
        if not self._scheduled <= n <= self._allocated:
            raise LadderError("schedule", n, self, "scheduled <= n <= allocated")
        self._scheduled = n

    def commit(self, n: int) -> None:
        """`[0, n)` was written by a finished forward.

            0        protected      committed -> n      scheduled     allocated
            |  tree's   |      readable        |   in flight  |  reserved   |

        Raises LadderError unless `committed <= n <= scheduled`: no step can commit what none promised.
        """
        if not self._committed <= n <= self._scheduled:
            raise LadderError("commit", n, self, "committed <= n <= scheduled")
        self._committed = n

    def protect(self, n: int) -> None:
        """The tree took `[0, n)` over. Raises LadderError unless `protected <= n <= committed`, whole pages."""
        if not self._protected <= n <= self._committed or not self._is_page_border(n):
            raise LadderError("protect", n, self, "protected <= n <= committed, whole pages")
        self._protected = n

    def rewind(self, n: int) -> None:
        """Forget `[n, scheduled)`: a stop, an abort, a rejected draft, the end of a turn.

            0        protected     scheduled -> n     allocated
            |  tree's   |  readable  |     reserved   |

        Reserved pages stay the owner's (`reserve` gives them back). Raises LadderError unless
        `protected <= n <= scheduled` and `n` lies at or behind the window's cursor, before which pages are gone.
        """
        if not max(self._protected, self._swa_evicted) <= n <= self._scheduled:
            raise LadderError("rewind", n, self, "max(protected, window cursor) <= n <= scheduled")
        self._scheduled = n
        self._committed = min(self._committed, n)

    def shield_window(self, n: int) -> None:
        """The window never lets `[0, n)` go.

        Raises LadderError unless `floor <= n <= scheduled`, and when pages it would keep are gone already.
        """
        page_size = self.geometry.page_size
        dead_lo = self.swa_dead_lo(page_size)
        is_gone = self._swa_evicted > dead_lo and ceil_page(n, page_size) > dead_lo
        if is_gone or not self._swa_evict_floor <= n <= self._scheduled:
            raise LadderError("shield_window", n, self, "floor <= n <= scheduled, and [dead_lo, n) is not gone")
        self._swa_evict_floor = n

    def slide_window(self, n: int) -> None:
        """The window let its pages of `[max(dead_lo, cursor), n)` go.

        Raises LadderError unless `max(dead_lo, cursor) <= n <= committed` and `n` is whole pages.
        """
        lo = max(self.swa_dead_lo(self.geometry.page_size), self._swa_evicted)
        if not lo <= n <= self._committed or not self._is_page_border(n):
            raise LadderError("slide_window", n, self, f"max(dead_lo, cursor) = {lo} <= n <= committed, whole pages")
        self._swa_evicted = n

    def mark_released(self) -> None:
        """Everything went back: no row, every length zero. The owner and a host backup stay."""
        self._row = None
        self.state = None
        self._reset_lengths()

    # Ownership.

    def detach(self, owner: Owner) -> ReqKvInfo:
        """Hand the record to another owner. Raises OwnershipError while a turn borrows it."""
        if self._borrower is not None:
            raise OwnershipError(f"{self} cannot pass to {owner}: {self._borrower} borrows it")
        self._owner = owner
        return self

    def lend(self, turn: Turn) -> None:
        """Let a turn move the record. Raises OwnershipError when another (or the same) turn has it."""
        if self._borrower is not None:
            raise OwnershipError(f"{self} cannot be lent to {turn}: {self._borrower} borrows it")
        self._borrower = turn

    def give_back(self, turn: Turn) -> None:
        """End the loan. Raises OwnershipError, changing nothing, when `turn` is not the borrower."""
        if self._borrower != turn:
            raise OwnershipError(f"{turn} cannot give back {self}: {self._borrower or 'nobody'} borrows it")
        self._borrower = None

    def _is_page_border(self, n: int) -> bool:
        return 0 <= n <= self.geometry.row_width and is_whole_pages(n, self.geometry.page_size)

    def __str__(self) -> str:
        window = f" window[{self._swa_evict_floor},{self._swa_evicted})" if self._swa_evicted else ""
        return (
            f"row {self._row} of {self._owner}: protected {self._protected} <= committed {self._committed} <= "
            f"scheduled {self._scheduled} <= allocated {self._allocated} <= width {self.geometry.row_width}{window}"
        )
