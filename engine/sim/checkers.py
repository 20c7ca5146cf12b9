"""What must hold, looked at from outside after each half of each step; none of it relies on asserts in the engine.

A checker looks at the world at four moments: before a launch ("start"), after it ("launched"), after the result
("collected"), and when everything has ended ("idle"). It raises a `SimFailure` or says nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol

from devices.pages import ceil_page, floor_page, is_whole_pages, page_count
from engine.request import Request, RequestStatus, TokenLogprob
from engine.scheduler.queue import PATIENCE
from engine.sim.failures import BrokenPromise, Leak, NoProgress, Unfair, WrongToken
from engine.sim.oracle import INDEX, MASK, Cursor, extended_hash, next_token, score, text_hash
from engine.sim.window_checker import Windows
from engine.sim.world import VOCAB_SIZE, Ticket, World, WorldConfig, name_of

Moment = Literal["start", "launched", "collected", "idle"]


class Checker(Protocol):
    """Looks at a world at its moments; what it remembers between looks is of one run."""

    @property
    def moments(self) -> tuple[Moment, ...]: ...

    def look(self, world: World, moment: Moment) -> None: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """The owner census, after every step or after both halves of it."""

    moments: tuple[Moment, ...]

    def look(self, world: World, moment: Moment) -> None:
        if violations := world.core.audit():
            raise Leak("audit", "; ".join(map(str, violations[:4])))


class Idle:
    """Nothing runs: every page is free or the tree's, every row is free, no lock is out."""

    moments: tuple[Moment, ...] = ("idle",)

    def look(self, world: World, moment: Moment) -> None:
        stats = world.core.stats()
        if stats["free_pages"] + stats["tree_evictable_pages"] != stats["num_pages"]:
            raise Leak("idle", f"pages are lost: {stats}")
        for component in world.families.tree.components:
            pool = world.families.pools[component.family]
            in_tree = sum(len(component.owned(n.held[component.family])) for n in world.families.tree.nodes())
            if pool.num_free + in_tree != pool.num_pages:
                raise Leak("idle", f"{pool.num_free} of {pool.num_pages} {pool.family} pages are free, {in_tree} kept")
        if stats["free_rows"] != stats["num_rows"] or world.core.allocator.tree.receipts:
            raise Leak("idle", f"rows or locks are lost: {stats}")
        if world.tickets:
            raise Leak("idle", f"{[ticket.request.id for ticket in world.tickets]} are not finished")


class Tokens:
    """The oracle: every output token at the moment it appears, and every end with its reason."""

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        for ticket in world.tickets:
            request, seen = ticket.request, ticket.num_seen
            if request.num_output != seen:
                self._check_new(ticket, moment)
            elif request.finish is None and seen == len(ticket.expected) and ticket.certain > seen:
                raise WrongToken("tokens", f"{request.id} said its {seen} tokens and goes on")
            if request.finish is not None:
                self._check_end(world, ticket)

    def _check_new(self, ticket: Ticket, moment: Moment) -> None:
        request, seen = ticket.request, ticket.num_seen
        num_new = request.num_output - seen
        if num_new != 1 or moment != "collected":
            raise WrongToken("tokens", f"{request.id} has {num_new} new tokens after a step was {moment}")
        if ticket.is_abort_asked:
            raise WrongToken("tokens", f"{request.id} shows a token after its abort")
        if seen < ticket.certain:
            got = request.output_ids[seen:]
            if got != ticket.expected[seen : seen + 1]:
                want = ticket.expected[seen : seen + 1] or f"end by {ticket.reason}"
                raise WrongToken("tokens", f"{request.id}: token {seen} is {got}, should be {want}; {request.kv}")
        ticket.num_seen = request.num_output

    def _check_end(self, world: World, ticket: Ticket) -> None:
        request, finish = ticket.request, ticket.request.finish
        assert finish is not None
        own = [t for t in world.tickets if t.key == ticket.key and t.index in (0, ticket.index)]
        allowed = {
            "abort": any(t.is_abort_asked for t in own),
            "error": any(t.is_nan_due for t in own),
            "timeout": request.deadline_s <= world.clock.now_s,
            "capacity": any(
                page_count(t.request.num_known, world.config.page_size) > world.config.num_pages for t in own
            ),
        }
        is_right = allowed.get(finish.reason)
        if is_right is None and request.num_output >= ticket.certain:
            last = request.output_ids[-1]
            is_right = last in request.stop_ids if finish.reason == "stop" else request.num_known == request.max_tokens
        elif is_right is None:
            is_right = (finish.reason, request.output_ids) == (ticket.reason, ticket.expected)
        if not is_right:
            want = f"{ticket.reason} after {len(ticket.expected)}"
            raise WrongToken("tokens", f"{request.id} ended by {finish} after {request.num_output}, should: {want}")
        if ticket.session is None and (request.kv.req_pool_idx is not None or request.lock is not None):
            raise Leak("tokens", f"{request.id} ended and holds {request.kv}")
        world.marks[f"end {finish.reason}"] += 1


class Logprobs:
    """A request that ended by itself has the logprob of every token that it asked for, each behind the right text."""

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        for ticket in world.tickets:
            finish, scores = ticket.request.finish, ticket.request.scores
            if finish is None or scores is None or finish.reason not in ("stop", "length") or ticket.are_weights_mixed:
                continue
            start = ticket.request.params.logprob_start_len
            want: list[object] = [] if start else [None]
            want += self._wanted(ticket, max(1, start) if start >= 0 else len(ticket.prompt), world.config.window)
            got = [*scores.prompt, *scores.output]
            if len(scores.output) != ticket.request.num_output or got != want:
                place = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), "the end")
                raise WrongToken("logprobs", f"{ticket.request.id} has {len(got)} of {len(want)}, wrong at {place}")
            world.marks["scored"] += 1
            world.marks["scored prompt"] += start >= 0

    def _wanted(self, ticket: Ticket, first: int, window: int | None) -> list[TokenLogprob]:
        """Of the tokens from place `first` on, with what the request wants to see beside each."""
        params, tokens, version = ticket.request.params, ticket.tokens, ticket.weights_version
        full, wanted = extended_hash(0, 0, tokens[:first], version), []
        for place, token in enumerate(tokens[first:], start=first):
            text = text_hash(full, window, tokens, place, version)
            best = [
                next_token((text + (n + 1) * INDEX) & MASK, 0, None, VOCAB_SIZE) for n in range(params.top_logprobs_num)
            ]
            top = tuple((one, score(text, one)) for one in best)
            extra = tuple((one, score(text, one)) for one in params.token_ids_logprob)
            wanted.append(TokenLogprob(token, score(text, token), top, extra))
            full = extended_hash(full, place, (token,), version)
        return wanted


class Reports:
    """The engine names each request that ended, once, unless an abort ended it at once."""

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        named: set[int] = set()
        if world.changed:
            live = {id(ticket.request) for ticket in world.tickets}
            for request in world.changed:
                if id(request) not in live or id(request) in named:
                    raise BrokenPromise("reports", f"{request.id} was named again after its end")
                named.add(id(request))
        for ticket in world.tickets:
            if ticket.request.finish is not None and id(ticket.request) not in named and not ticket.is_abort_asked:
                raise BrokenPromise("reports", f"{ticket.request.id} ended and nobody was told")


class Deadlines:
    """A request whose time is up does not get past the next launch."""

    moments: tuple[Moment, ...] = ("launched",)

    def look(self, world: World, moment: Moment) -> None:
        for ticket in world.tickets:
            request = ticket.request
            if request.params.time_limit_s is None or request.finish is not None:
                continue
            if request.deadline_s <= world.clock.now_s:
                raise BrokenPromise("deadlines", f"{ticket.request.id} is late and goes on")


@dataclass(slots=True)
class Hits:
    """What a request takes from the cache was computed before, in its own namespace and since the last flush.

    And it takes all that there is: what a request left behind when it ended by itself, if nothing was evicted since.
    """

    moments: tuple[Moment, ...] = ("launched", "collected")
    num_evicted: int = 0

    def look(self, world: World, moment: Moment) -> None:
        if world.families.tree.num_evicted != self.num_evicted:
            self.num_evicted = world.families.tree.num_evicted
            world.published.clear()
        for ticket in world.tickets:
            request = ticket.request
            if request.cached_tokens is not None and ticket.cursor is None:
                self._check(world, ticket, request.cached_tokens)
                ticket.cursor, ticket.num_evicted = Cursor(), self.num_evicted
                world.known.add(ticket.namespace, ticket.prompt, ticket.cursor)
            if request.finish is not None or request.num_retractions != ticket.num_retractions:
                ticket.num_retractions = request.num_retractions
                world.known.add(ticket.namespace, ticket.tokens, ticket.cursor or Cursor())
                self._remember(world, ticket)

    def _remember(self, world: World, ticket: Ticket) -> None:
        """A row that nobody shares leaves all its whole pages to the tree; the last token has no KV."""
        finish = ticket.request.finish
        is_alone = ticket.session is None and ticket.request.params.n == 1
        if world.config.caching and is_alone and finish is not None and finish.reason in ("stop", "length"):
            if world.config.window is None:
                world.published.add(ticket.namespace, ticket.tokens[:-1], Cursor())
            else:
                self._remember_windows(world, ticket)

    def _remember_windows(self, world: World, ticket: Ticket) -> None:
        """Where its windows are whole: at its end, and in the part of its prompt that it computed.

        Its lock kept the last of them only, so that part holds when nothing was evicted since it was admitted.
        """
        page_size, tokens = world.config.page_size, ticket.tokens[:-1]
        start = (ticket.request.cached_tokens or 0) + page_size
        num_owed = len(ticket.prompt) if ticket.num_evicted == self.num_evicted else 0
        for end in range(start, num_owed + 1, page_size):
            world.published.add_one(ticket.namespace, tokens[:end])
        world.published.add_one(ticket.namespace, tokens[: floor_page(len(tokens), page_size)])

    def _check(self, world: World, ticket: Ticket, hit: int) -> None:
        length, page_size = len(ticket.prompt), world.config.page_size
        if ticket.index and hit == length - 1:
            world.marks["fork"] += 1
            return
        if ticket.session is not None and hit < length:
            world.marks["turn resumes"] += hit > 0
            return  # of its own row, to the token; the oracle sees whether it was right
        if hit and (not world.config.caching or hit >= length or not is_whole_pages(hit, page_size)):
            raise BrokenPromise("hits", f"{ticket.request.id} took {hit} of {length} tokens, pages of {page_size}")
        if not world.known.has(ticket.namespace, ticket.prompt[:hit]):
            raise BrokenPromise("hits", f"{ticket.request.id} took {hit} tokens that nobody like it has computed")
        if ticket.session is None:
            scored_from = ticket.request.params.logprob_start_len  # whatever scores a prompt token is computed
            most = length - 1 if scored_from < 0 else max(0, min(scored_from, length) - 1)
            owed = world.published.longest(ticket.namespace, ticket.prompt[:most])
            if hit < owed:
                raise BrokenPromise("hits", f"{ticket.request.id} took {hit} tokens where {owed} are cached")
            world.marks["hit owed"] += owed > 0
        world.marks["hit"] += hit > 0
        if hit and world.config.window is not None and ticket.request.lock is not None:
            pages = world.families.tree.pages(ticket.request.lock, "window")
            world.marks["hit behind a lost window"] += not pages[: page_count(hit, page_size)].all()


@dataclass(slots=True)
class Progress:
    """Whoever can run does run.

    Work without anything in its way launches a step or ends something at every launch; and within a bound of steps
    somebody gets a token or ends, however often requests are sent back.
    """

    moments: tuple[Moment, ...] = ("launched", "collected")
    num_stuck: int = 0
    num_fruitless: int = 0
    fruit: int = 0

    def look(self, world: World, moment: Moment) -> None:
        if moment == "launched":
            is_idle = not world.changed and world.core.has_work and not world.has_launched and not world.is_ahead
            self.num_stuck = self.num_stuck + 1 if is_idle and not world.is_blocked else 0
            if self.num_stuck > 1:
                raise NoProgress("progress", f"nothing was launched twice, and work waits: {world.core.stats()}")
        else:
            fruit = world.num_ended + sum(ticket.request.num_output for ticket in world.tickets)
            is_fruitless = world.core.has_work and fruit == self.fruit and not world.is_blocked
            self.num_fruitless = self.num_fruitless + 1 if is_fruitless else 0
            self.fruit = fruit
            bound = 64 + 4 * page_count(world.config.capacity, world.config.chunk_tokens or world.config.capacity)
            if self.num_fruitless > bound:
                raise NoProgress("progress", f"no token for {self.num_fruitless} steps: {world.core.stats()}")


@dataclass(slots=True)
class Fairness:
    """Who is admitted has the best claim of all who wait.

    fcfs: sent back before, or older. priority: nobody more important waits, and nobody far less important runs while
    one waits. lpm: at most `PATIENCE` younger ones, and those of the same step, go before one that never ran.

    Attributes:
        waiting: who waited before the launch.
        passed: younger ones admitted before each arrival that waits.
        num_late: launches in a row after which a lesser one runs while a more important one waits.
    """

    moments: tuple[Moment, ...] = ("start", "launched")
    waiting: list[Request] = field(default_factory=list)
    passed: Counter[int] = field(default_factory=Counter)
    num_late: int = 0

    def look(self, world: World, moment: Moment) -> None:
        if moment == "start":
            self.waiting = list(world.core.scheduler.waiting)
            return
        admitted = [request for request in self.waiting if request.status is RequestStatus.RUNNING]
        still = [request for request in self.waiting if request.status is RequestStatus.WAITING]
        if not admitted and world.config.policy != "priority":
            return
        if world.config.policy == "fcfs":
            self._by_arrival(world, admitted, still)
        elif world.config.policy == "priority":
            self._by_priority(world, admitted, still)
        else:
            self._by_hits(world, admitted, still)

    def _by_arrival(self, world: World, admitted: list[Request], still: list[Request]) -> None:
        siblings = {id(ticket.request) for ticket in world.tickets if ticket.index}
        for request in admitted:
            for other in still:
                is_older = other.arrival < request.arrival and id(other) not in siblings
                if _is_fresh(request) and (not _is_fresh(other) or is_older):
                    raise Unfair("fairness", f"{request.id} was admitted while {other.id} waits")

    def _by_priority(self, world: World, admitted: list[Request], still: list[Request]) -> None:
        for request in admitted:
            for other in still:
                if other.priority > request.priority:
                    raise Unfair("fairness", f"{request.id} was admitted while {other.id} waits, more important")
        if world.config.chunk_tokens is not None or world.is_blocked or not still:
            self.num_late = 0
            return
        best = max(request.priority for request in still)
        lesser = [o for o in world.core.scheduler.running if o.priority < best - world.config.preemption_threshold]
        self.num_late = self.num_late + 1 if lesser else 0
        # A step planned ahead displaces nobody; one that is not does.
        if self.num_late > (2 if world.config.overlap else 0):
            raise Unfair("fairness", f"{lesser[0].id} of priority {lesser[0].priority} runs while one of {best} waits")

    def _by_hits(self, world: World, admitted: list[Request], still: list[Request]) -> None:
        for other in filter(_is_fresh, still):
            self.passed[other.arrival] += sum(_is_fresh(r) and r.arrival > other.arrival for r in admitted)
            num_passed = self.passed[other.arrival]
            if num_passed > PATIENCE + world.config.num_rows:
                raise Unfair("fairness", f"{other.id} was passed over {num_passed} times")


def _is_fresh(request: Request) -> bool:
    return request.num_retractions == 0


class Fences:
    """What the tree had when a reader outside put its fence up is unchanged until the fence is lifted."""

    moments: tuple[Moment, ...] = ("collected",)

    def look(self, world: World, moment: Moment) -> None:
        for late in world.fences:
            if any(world.runner.kv[f].content(pages) != late.content[f] for f, pages in late.pages.items()):
                raise BrokenPromise("fences", f"pages changed under a reader, {late.lift_at - world.step} steps early")


class Evictions:
    """The tree lets go what an allocation lacks, and no page more."""

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        if world.families.num_excess:
            raise BrokenPromise("evictions", f"{world.families.num_excess} pages were evicted that nobody needed")


class Demotions:
    """An idle row gives way when something lacks, and not when nothing does any more."""

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        if world.allocator.num_wasted:
            raise BrokenPromise("demotions", f"{world.allocator.num_wasted} idle rows gave way and nothing lacked")
        if world.allocator.demoted and moment == "collected":
            world.marks["row gave way"] += len(world.allocator.demoted)
            world.allocator.demoted.clear()


@dataclass(slots=True)
class TurnHits:
    """A turn continues from all that its session's row holds when it is admitted, as far as the device can.

    Attributes:
        held: before the launch, of each session with an idle row: readable tokens, and where its turn continues.
    """

    moments: tuple[Moment, ...] = ("start", "launched")
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, world: World, moment: Moment) -> None:
        turns = [t for t in world.tickets if t.session is not None and t.cursor is None]
        if moment == "start":
            self.held = {t.session: held for t in turns if t.session is not None and (held := _held(world, t))}
            return
        for ticket in turns:
            hit, session = ticket.request.cached_tokens, ticket.session
            if hit is None or session is None:
                continue
            readable, owed = self.held.get(session, (0, 0))
            is_right = world.row_versions.get(session) == ticket.weights_version
            gave_way = any(one is ticket.request.held for one in world.allocator.demoted)
            world.row_versions[session] = ticket.weights_version
            if owed and is_right and not gave_way:
                world.marks["turn owed"] += 1
                if hit < owed:
                    raise BrokenPromise("turn hits", f"{ticket.request.id} took {hit} tokens of its row's {readable}")


def _held(world: World, ticket: Ticket) -> tuple[int, int] | None:
    """Readable tokens of the idle row of a turn's session, and from which of them on the turn must continue."""
    assert ticket.session is not None
    for one in world.core.sessions.sessions():
        if one.id == name_of(ticket.session) and one.slot.is_idle:
            record = one.slot.record
            owed = min(record.kv_committed_len, len(ticket.prompt) - 1)
            if world.config.resume_unit == "page" or owed < record.cache_protected_len:
                owed = floor_page(owed, world.config.page_size)
            if world.config.window is not None and owed < record.cache_protected_len:
                owed = 0  # it comes from the tree, which keeps the windows that are locked, and only those
            is_cut = owed < record.kv_committed_len  # one that is not has its window, whatever it names
            return record.kv_committed_len, owed if not is_cut or world.has_window(record, owed) else 0
    return None


class Timeouts:
    """A session closes when it was idle for longer than its timeout, and not before."""

    moments: tuple[Moment, ...] = ("launched",)

    def look(self, world: World, moment: Moment) -> None:
        busy = {ticket.session for ticket in world.tickets}
        for session, timeout_s in list(world.timeouts.items()):
            if session not in world.histories:
                del world.timeouts[session]
                continue
            if session in world.closing:
                continue
            is_due = session not in busy and world.last_used_s[session] + timeout_s < world.clock.now_s
            if is_due is any(one.id == name_of(session) for one in world.core.sessions.sessions()):
                raise BrokenPromise("timeouts", f"session {session} is due: {is_due}, and not closed accordingly")
            if is_due:
                del world.histories[session], world.timeouts[session]
                world.marks["session timeout"] += 1


class Width:
    """No row reserves more than a page behind what it needs: a reserve that nobody wanted is lost for others.

    A session's row that no turn computes on ends with the page of its last readable token.
    """

    moments: tuple[Moment, ...] = ("launched",)

    def look(self, world: World, moment: Moment) -> None:
        for request in world.core.scheduler.running:
            # The token that a launched step samples is the input of one that was launched behind it.
            wanted = request.num_known + max(0, request.num_ahead - 1)
            if request.kv.kv_allocated_len > ceil_page(wanted, world.config.page_size):
                raise Leak("width", f"{request.id} knows {request.num_known} tokens: {request.kv}")
        for session in world.core.sessions.sessions():
            record = session.slot.record
            wanted = ceil_page(record.kv_committed_len, world.config.page_size)
            if session.slot.is_idle and record.kv_allocated_len != wanted:
                raise Leak("width", f"no turn computes on {record}")


def checkers(config: WorldConfig) -> list[Checker]:
    """New checkers for one run, in the order of their looks."""
    half_steps = (
        Audit(("launched", "collected", "idle") if config.audits_halves else ("collected", "idle")),
        Tokens(),
        Logprobs(),
        Reports(),
        Deadlines(),
        Timeouts(),
        TurnHits(),
        Hits(),
        Progress(),
        Fairness(),
        Fences(),
    )
    return [*half_steps, Evictions(), Demotions(), Width(), Windows(), Idle()]
