"""A real `EngineCore` over an executor that costs nothing and notices every wrong page.

What it stores for a token is a digest of everything before it, read through its own copy of the page tables; the next
token is that digest. So a page that is another row's, was freed, was written too early or was not copied gives another
token than `answer_to`, which knows the conversation and no page. Pages that nobody holds are spoilt before each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from devices.base import Capabilities, ResumeUnit
from devices.page_pool import PageFamilies, PageFamily
from devices.pages import align_resume, ceil_page, page_count
from engine.core import EngineCore
from engine.scheduler.scheduler import Scheduler
from engine.step import StepInput, StepOutput
from mem_cache.allocation import KvAllocator
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import RowPool, table_width
from mem_cache.tree.components import FullPages
from mem_cache.tree.prefix_tree import PrefixTree
from session.session import SessionLimits

VOCAB_SIZE = 40
EOS = 0
SPOILT = -1

_MASK = (1 << 61) - 1


def _digest(past: int, position: int, token_id: int, version: int) -> int:
    x = (past * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + token_id * 0x94D049BB133111EB + version) & _MASK
    x ^= x >> 29
    return (x * 0xD6E8FEB86659FD93) & _MASK


def _token(past: int) -> int:
    return (past >> 17) % VOCAB_SIZE


class HashExecutor:
    """What `EngineCore` needs of a runner.

    Attributes:
        version: of the weights; KV of another one is of no use.
        fail_next: so many requests of the next steps, one a step, have a result that is not a number.
    """

    def __init__(
        self, families: PageFamilies, geometry: RowGeometry, num_rows: int, capabilities: Capabilities
    ) -> None:
        pool = families.pools["full"]
        self._pool = pool
        self._page_size = geometry.page_size
        self._capabilities = capabilities
        self._kv = np.full((pool.num_pages + 1, geometry.page_size), SPOILT, dtype=np.int64)
        self._tables = np.zeros((num_rows + 1, table_width(geometry, geometry.families[0])), dtype=np.int32)
        self.version = 0
        self.fail_next = 0
        self.prepare_s = self.device_s = 0.0
        self._launched: deque[StepInput] = deque()
        self._sampled: list[int] = []
        self.counts: dict[str, int] = {}

    def launch(self, step: StepInput) -> None:
        self._launched.append(step)

    def collect(self) -> StepOutput:
        """Computed as late as can be: whatever a launched step reads must be there until its result is taken."""
        step = self._launched.popleft()
        for change in step.table_changes:
            self._tables[change.row, change.start : change.start + len(change.pages)] = change.pages
        for copy in step.page_copies:
            self._kv[copy.target] = self._kv[copy.source]
        self._kv[self._pool.free_pages()] = SPOILT
        token_ids = iter(
            [token_id if token_id >= 0 else self._sampled[-1 - token_id] for token_id in step.token_ids.tolist()]
        )
        next_ids = [
            self._compute(row, start, [next(token_ids) for _ in range(num_new)])
            for row, start, num_new in zip(step.rows.tolist(), step.starts.tolist(), step.num_new.tolist(), strict=True)
        ]
        is_finite = np.ones(len(step.rows), dtype=np.bool_)
        if self.fail_next:
            self.fail_next -= 1
            is_finite[-1] = False
            self._spoil(int(step.rows[-1]), int(step.starts[-1]), int(step.num_new[-1]))
        has_token = step.is_sampled & is_finite
        self._sampled = [token for token, is_sampled in zip(next_ids, step.is_sampled, strict=True) if is_sampled]
        return StepOutput(
            step.step_id, has_token.astype(np.int32), np.array(next_ids, dtype=np.int32)[has_token], is_finite
        )

    def _compute(self, row: int, start: int, token_ids: list[int]) -> int:
        end = start + len(token_ids)
        pages = self._tables[row, : page_count(end, self._page_size)]
        assert pages.all(), "the row names the padding page"
        if len(token_ids) > 1:
            assert start == align_resume(start, self._page_size, self._capabilities), "this device cannot resume here"
        kv = self._kv[pages].reshape(-1)
        # Every token read is one that was written, and all were written one behind the other.
        past = _joined(kv[:start])
        for position, token_id in enumerate(token_ids, start):
            kv[position] = _digest(past, position, token_id, self.version)
            past = _joined_with(past, position, int(kv[position]))
        self._kv[pages[start // self._page_size :]] = kv.reshape(-1, self._page_size)[start // self._page_size :]
        return _token(past)

    def _spoil(self, row: int, start: int, num_new: int) -> None:
        for position in range(start, start + num_new):
            self._kv[self._tables[row, position // self._page_size], position % self._page_size] = SPOILT


_WEIGHTS = np.random.default_rng(5).integers(1, 1 << 62, 4096).astype(np.int64) | 1


def _joined(kv: np.ndarray) -> int:
    """A sum over all stored values, each by its place."""
    with np.errstate(over="ignore"):
        return int((kv * _WEIGHTS[: len(kv)]).sum()) & _MASK


def _joined_with(past: int, position: int, value: int) -> int:
    return (past + value * int(_WEIGHTS[position])) & _MASK


def answer_to(token_ids: Sequence[int], num_new: int, version: int = 0) -> list[int]:
    """The `num_new` tokens that follow, whatever ends an answer left aside."""
    past = 0
    for position, token_id in enumerate(token_ids):
        past = _joined_with(past, position, _digest(past, position, token_id, version))
    answer: list[int] = []
    for position in range(len(token_ids), len(token_ids) + num_new):
        answer.append(_token(past))
        past = _joined_with(past, position, _digest(past, position, answer[-1], version))
    return answer


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_core(
    *,
    page_size: int = 4,
    num_pages: int = 16,
    num_rows: int = 4,
    context_len: int = 64,
    resume_unit: ResumeUnit = "token",
    caching: bool = True,
    chunk_tokens: int | None = None,
    policy: str = "fcfs",
    conservativeness: float = 1.0,
    limits: SessionLimits | None = None,
    clock: Clock | None = None,
    overlap: bool = False,
) -> EngineCore:
    """An engine whose parts are all real but the model."""
    capabilities = Capabilities(
        page_sizes=(page_size,), default_page_size=page_size, resume_unit=resume_unit, overlap=overlap
    )
    family = PageFamily("full", page_size)
    families = PageFamilies([(family, num_pages)])
    rows = RowPool(num_rows, RowGeometry(page_size, ceil_page(context_len, page_size), (family,)))
    tree = PrefixTree((FullPages(families.pools["full"]),), page_size)
    allocator = KvAllocator(families, rows, tree, caching=caching)
    scheduler = Scheduler(
        allocator,
        capabilities,
        policy=policy,
        conservativeness=conservativeness,
        chunk_tokens=chunk_tokens,
        clock=clock or Clock(),
    )
    executor = HashExecutor(families, rows.geometry, num_rows, capabilities)
    return EngineCore(
        scheduler,
        executor,  # type: ignore[arg-type]
        context_len=context_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        random_seed=0,
        log_interval=10**9,
        session_limits=limits or SessionLimits(),
    )
