"""The simulated world: a real engine core over the null device, a clock that is a number, and what was asked of it.

Nothing here draws anything: a world is a function of its configuration and of the events that are applied to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from devices.base import ResumeUnit
from devices.null.device import Pair, null_capabilities
from devices.page_pool import Fence, PageFamily
from engine.core import EngineCore
from engine.request import Request, RequestStatus
from engine.scheduler.scheduler import Scheduler
from engine.sim.executor import NullRunner
from engine.sim.oracle import Cursor, KnownPrefixes, continuation
from engine.sim.watched import RationedFamilies, WatchedAllocator, WatchedIdle, WatchedTree
from mem_cache.kv_info import RowGeometry
from mem_cache.rows import RowPool
from mem_cache.sizing import row_width
from mem_cache.tree.components import FullPages

VOCAB_SIZE = 4096
EOS_TOKEN_IDS = frozenset(range(16))
STEP_S = 0.001
"""Virtual seconds that a step takes."""


def name_of(session: int) -> str:
    return f"session-{session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """One engine. The arguments are those of `engine.config`, as far as a simulation has them.

    Attributes:
        num_pages, num_rows: sizes of the pools.
        context_len: most tokens of a request; it may be more than the pool holds.
        chunk_tokens: most prompt tokens in a step; None takes prompts whole.
        max_live: arrivals are dropped while so many requests are not finished.
        audits_halves: the books are audited after both halves of each step, not only after the whole.
        is_canary: the executor errs now and then, so a run that ends clean proves that nobody looks.
    """

    page_size: int = 4
    num_pages: int = 32
    num_rows: int = 4
    context_len: int = 64
    resume_unit: ResumeUnit = "token"
    chunk_tokens: int | None = None
    policy: str = "fcfs"
    eviction: str = "lru"
    conservativeness: float = 1.0
    preemption_threshold: int = 0
    caching: bool = True
    overlap: bool = False
    max_live: int = 12
    audits_halves: bool = True
    is_canary: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size


@dataclass(slots=True)
class Ticket:
    """What was asked for by one request, and what must become of it.

    Attributes:
        key: of the arrival it belongs to; `index`: which of its n answers.
        expected: the answer when nothing ends it early, and `reason`: how it ends then.
        is_abort_asked, is_nan_due: what was done to it; it may end so.
        certain: leading output tokens that are certain; fewer than all once the weights changed under it.
        num_seen: output tokens that were there at the last look.
        num_retractions: retractions that were there at the last look.
        session: whose turn it is; the session keeps the row when the turn ends.
        cursor: how much of its text the cache may know because of it; None before it was admitted.
    """

    key: int
    index: int
    request: Request
    prompt: list[int]
    expected: list[int]
    reason: str
    weights_version: int
    salt: str | None
    is_abort_asked: bool = False
    is_nan_due: bool = False
    certain: int = 1 << 30
    num_seen: int = 0
    num_retractions: int = 0
    session: int | None = None
    cursor: Cursor | None = None

    @property
    def namespace(self) -> tuple[int, str | None]:
        """What besides the tokens decides its KV."""
        return self.weights_version, self.salt

    @property
    def are_weights_mixed(self) -> bool:
        """Whether the weights changed since it arrived."""
        return self.certain < 1 << 30

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.request.output_ids


@dataclass(slots=True)
class BranchNode:
    """A request of the branching session. `after`: key of the one it continues; `is_forgotten`: it was replaced."""

    request_id: str
    prompt_len: int
    after: int | None
    is_forgotten: bool = False


@dataclass(slots=True)
class LateFence:
    """Somebody outside still reads pages; those that are the tree's may not change until the fence is lifted."""

    fences: dict[str, Fence]
    lift_at: int
    pages: list[int]
    content: list[list[Pair]]


@dataclass(slots=True)
class Clock:
    """Virtual time in seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class World:
    """Everything that an event may touch.

    Attributes:
        tickets: requests that are not finished, or finished since the last look.
        texts: prompt and answer of finished arrivals by key, for prompts that continue them.
        changed: requests that the last half step named: they have a new token or ended.
        has_launched: the last launch had a step; `is_ahead`: it was planned while a result was on its way.
        known: what the tree may know; `published`: what it must know, as long as nothing is evicted.
        histories: tokens of each open session's finished turns; `closing`: sessions that close with their turn.
        branches: requests of the branching session, by the key of their arrival.
        row_versions: weights that computed each session's row.
        timeouts: idle seconds after which sessions close, where they do; `last_used_s`: since when they are idle.
        marks: how often each rare thing happened; a test asserts that none stays at zero.
        step: number of the current step, from 0.
        num_launched, num_tokens, num_ended: launched steps, output tokens and ends so far.
    """

    config: WorldConfig
    clock: Clock
    families: RationedFamilies
    allocator: WatchedAllocator
    runner: NullRunner
    core: EngineCore
    known: KnownPrefixes
    published: KnownPrefixes
    tickets: list[Ticket] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)
    changed: list[Request] = field(default_factory=list)
    histories: dict[int, list[int]] = field(default_factory=dict)
    closing: set[int] = field(default_factory=set)
    branches: dict[int, BranchNode] = field(default_factory=dict)
    row_versions: dict[int, int] = field(default_factory=dict)
    timeouts: dict[int, float] = field(default_factory=dict)
    last_used_s: dict[int, float] = field(default_factory=dict)
    fences: list[LateFence] = field(default_factory=list)
    marks: Counter[str] = field(default_factory=Counter)
    weights_version: int = 0
    has_launched: bool = False
    is_ahead: bool = False
    step: int = 0
    num_launched: int = 0
    num_tokens: int = 0
    num_ended: int = 0

    @property
    def is_blocked(self) -> bool:
        """Whether something outside the engine may keep it from working right now."""
        return bool(self.fences) or self.families.has_failed

    def find(self, key: int, index: int = 0) -> Ticket | None:
        """The live ticket of an arrival's answer."""
        for ticket in self.tickets:
            if ticket.key == key and ticket.index == index:
                return ticket
        return None

    def turn_of(self, session: int) -> Ticket | None:
        """The turn that a session is in."""
        return next((t for t in self.tickets if t.session == session and t.request.finish is None), None)

    def ticket_of(self, request: Request) -> Ticket:
        return next(ticket for ticket in self.tickets if ticket.request is request)

    def expect(self, key: int, requests: Sequence[Request], prompt: list[int], salt: str | None) -> None:
        """Write down what each answer of an arrival must be."""
        for index, request in enumerate(requests):
            asked = request.params.seed
            seed = None if request.params.temperature == 0 or asked is None else asked + index
            num_new = min(request.params.max_new_tokens, self.config.context_len - len(prompt))
            stop_ids = EOS_TOKEN_IDS.union(request.params.stop_token_ids)
            expected = continuation(prompt, num_new, seed, self.weights_version, VOCAB_SIZE, stop_ids)
            reason = "stop" if expected[-1] in stop_ids else "length"
            self.tickets.append(Ticket(key, index, request, prompt, expected, reason, self.weights_version, salt))

    def running(self, place: int) -> Ticket | None:
        """A ticket of the running requests, counted round and round."""
        running = self.core.scheduler.running
        return self.ticket_of(running[place % len(running)]) if running else None

    def state_of(self, ticket: Ticket) -> str:
        """Where a live request is, in finer steps than its status."""
        request = ticket.request
        if request.status is RequestStatus.WAITING:
            return "retracted" if request.num_retractions else "waiting"
        if request.status is RequestStatus.FORKING:
            return "forking"
        state = "prefill" if request.num_known - request.kv.kv_committed_len > 1 else "decode"
        return state + ("-in-flight" if request.kv.kv_scheduled_len > request.kv.kv_committed_len else "")


def build(config: WorldConfig) -> World:
    """An engine with nothing in it."""
    page_size = config.page_size
    family = PageFamily("full", page_size)
    families = RationedFamilies([(family, config.num_pages)])
    width = row_width(config.context_len, 0, page_size)
    geometry = RowGeometry(page_size, width, (family,))
    rows = RowPool(config.num_rows, geometry)
    tree = families.tree = WatchedTree((FullPages(families.pools["full"]),), page_size, config.eviction)
    clock = Clock()
    capabilities = null_capabilities(page_size, resume_unit=config.resume_unit, overlap=config.overlap)
    allocator = WatchedAllocator(families, rows, tree, caching=config.caching)
    scheduler = Scheduler(
        allocator,
        capabilities,
        policy=config.policy,
        conservativeness=config.conservativeness,
        preemption_threshold=config.preemption_threshold,
        chunk_tokens=config.chunk_tokens,
        clock=clock,
    )
    runner = NullRunner(
        config.num_pages, config.num_rows, geometry, capabilities, VOCAB_SIZE, is_canary=config.is_canary
    )
    families.pools["full"].on_free = runner.on_free
    core = EngineCore(
        scheduler,
        runner,
        context_len=config.context_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_TOKEN_IDS,
        random_seed=0,
        log_interval=1 << 60,
    )
    allocator.idle = WatchedIdle(core.sessions, allocator)
    return World(config, clock, families, allocator, runner, core, KnownPrefixes(page_size), KnownPrefixes(page_size))
