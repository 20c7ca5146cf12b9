"""What a session keeps of its KV between turns: one row with its record, and the lock on what the tree protects.

    0        protected            committed               allocated
    |  tree's   |  the session's, readable  |  cut off when a turn resumes  |

The slot owns the record for the session's whole life and lends it, the same object, to the turn that runs. How much of
the row may be kept or continued is one predicate, `legal_len`, for resuming, aborting, rewinding and forking alike. A
row that cannot serve goes back whole, its pages to the tree; the history is in the log and loses nothing.
"""

from __future__ import annotations

from devices.base import Capabilities
from devices.pages import IntArray, align_resume
from mem_cache.allocation import KvAllocator
from mem_cache.holding import Holding
from mem_cache.kv_info import Owner, OwnerKind, OwnershipError, ReqKvInfo, Turn
from mem_cache.tree.keys import Namespace


def legal_len(record: ReqKvInfo, wanted: int) -> int:
    """The largest length, at most `wanted`, that a row may be cut to and continued from by some device. Pure.

    It was written, does not cut into the tree's part, still has its window of KV, and with recurrent layers it is where
    their state was taken. 0 when there is none.
    """
    length = min(wanted, record.kv_committed_len)
    if record.state is not None:
        length = record.state.seq_len if record.state.seq_len <= length else 0
    reach = max((family.window for family in record.geometry.families if family.window is not None), default=0)
    # The token at `length` is computed next: it reads `[length + 1 - reach, length]`.
    has_window = record.swa_evicted_seqlen == 0 or length + 1 - reach >= record.swa_evicted_seqlen
    return length if length >= record.cache_protected_len and has_window else 0


def resumable_len(record: ReqKvInfo, wanted: int, capabilities: Capabilities) -> int:
    """`legal_len` on this device, which may resume at page borders only. Pure.

    Returns:
        0 when no part of the row may be continued.
    """
    length = legal_len(record, wanted)
    aligned = align_resume(length, record.geometry.page_size, capabilities)
    return aligned if legal_len(record, aligned) == aligned else 0


class SessionSlot:
    """Attributes:
    held: the record and the lock on its prefix; one object for the session's life.
    publishes_prompt: whether the turn that runs is the row's first, whose prompt becomes the tree's.
    """

    def __init__(self, allocator: KvAllocator, capabilities: Capabilities, owner_id: str, namespace: Namespace) -> None:
        """`namespace`: of the session's KV."""
        self.held = Holding(ReqKvInfo(allocator.geometry, Owner(OwnerKind.SESSION, owner_id)))
        self.publishes_prompt = False
        self._allocator = allocator
        self._capabilities = capabilities
        self._namespace = namespace

    @property
    def record(self) -> ReqKvInfo:
        return self.held.record

    @property
    def has_row(self) -> bool:
        return self.record.req_pool_idx is not None

    @property
    def is_idle(self) -> bool:
        """Whether it holds KV that no turn computes on."""
        return self.has_row and self.record.borrower is None

    def lend(self, turn: Turn, wanted: int, tokens: IntArray, namespace: Namespace) -> int:
        """Lend the record to a turn, cut to what the turn may continue from; what lies behind is given back.

        Args:
            wanted: most tokens that the turn may take over, its last known token excluded.
            tokens: ids of the row's tokens, for pages that go to the tree.
            namespace: of the turn's KV; a row of another one (older weights) cannot serve.
        Returns:
            How many tokens of the row it continues from; 0 means that the record is empty now.
        Raises:
            OwnershipError: another turn has it.
        """
        self.record.lend(turn)
        if self.has_row:
            length = resumable_len(self.record, wanted, self._capabilities)
            if length == 0 or namespace != self._namespace:
                self._let_go(tokens)
            else:
                self.record.rewind(length)
                self._allocator.trim(self.record)
        self._namespace = namespace
        if not self.has_row:
            self.publishes_prompt = True
        return self.record.kv_committed_len

    def give_back(self, turn: Turn) -> None:
        """End the loan. Raises OwnershipError when `turn` is not the borrower."""
        self.record.give_back(turn)

    def rewind(self, length: int, tokens: IntArray) -> None:
        """Forget what was written behind `length`; a row that cannot be cut there goes back whole.

        Where exactly the next turn may resume is the device's matter, and decided when it comes.
        """
        if not self.has_row:
            return
        wanted = min(length, self.record.kv_committed_len)
        legal = legal_len(self.record, wanted)
        if legal == 0:
            self._let_go(tokens)
        else:
            self.record.rewind(legal)
            self._allocator.trim(self.record)
            self._allocator.slide_window(self.record)  # an aborted turn's last result was committed, and no more

    def demote(self, tokens: IntArray) -> None:
        """Leave the whole pages to the tree and give the row back. Raises OwnershipError while a turn has it."""
        if self.record.borrower is not None:
            raise OwnershipError(f"{self.record} cannot be demoted: {self.record.borrower} borrows it")
        self._let_go(tokens)

    def drop(self) -> None:
        """Give everything back and publish nothing: the KV is not to be trusted."""
        self._allocator.release(self.record, self.held.lock)
        self.held.lock = None

    def _let_go(self, tokens: IntArray) -> None:
        held = self.held
        if self.has_row and held.lock is not None:
            held.lock = self._allocator.publish(self.record, tokens, self._namespace, held.lock)
        self.drop()

    def fork_into(self, other: SessionSlot, length: int) -> int:
        """Give an empty slot `[0, length)` of this row, as far as it is written and a turn could resume there.

        Returns:
            How many tokens it got.
        Raises:
            OutOfRows, OutOfPages: nothing changed.
        """
        if not self.has_row or self.held.lock is None:
            return 0
        length = resumable_len(self.record, length, self._capabilities)
        if length:
            other.held.lock = self._allocator.fork(self.record, self.held.lock, other.record, length)
            other._namespace = self._namespace
        return length
