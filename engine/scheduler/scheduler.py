"""Decides what the next step computes, and what its result means for records, pages and requests.

    admit -> plan (pages, rows: all or nothing) -> launch -> result: commit, stop, publish, release

Every running request has some tokens whose KV no step writes yet: one in decode, many in prefill. A step takes some of
them from each, so prefill, chunk and decode mix. When the pool is short the request with the fewest outputs to lose is
retracted; one that is alone and still does not fit ends by itself. A finish, an abort and a retraction are the same
act: publish what is committed, then release.

Steps may be planned while results are on their way. Such a step names tokens that nobody has seen by their place in the
step before; it takes what is free and never takes anything away from a request; and when a result ends a request, what
was launched of it beyond is ignored: its pages wait behind the launched step's fence.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from devices.base import Capabilities
from devices.page_pool import OutOfPages
from devices.pages import IntArray, align_resume, floor_page, page_count
from engine.request import Finish, Request, RequestStatus
from engine.scheduler.columns import Batch, Chunk, deliver_scores, step_input
from engine.scheduler.estimate import OutputEstimate
from engine.scheduler.launched import LaunchedStep
from engine.scheduler.queue import WaitingQueue
from engine.step import StepInput, StepOutput
from mem_cache.allocation import KvAllocator
from mem_cache.growth import Plan, extend, plan
from mem_cache.kv_info import ReqKvInfo, Turn
from mem_cache.rows import OutOfRows
from mem_cache.tree.misses import MissReason
from session.session import Session


class Scheduler:
    """Owns waiting and running requests.

    Attributes:
        running: admitted requests, oldest first; each holds a row.
        clock: seconds; every decision about time is taken on it.
        num_retracted: retractions since the start.
        num_prompt_tokens, num_cached_tokens: prompt tokens of admitted requests, and how many were not computed.
        misses: admitted requests that found less than all of their prompt's pages, by the reason.
    """

    def __init__(
        self,
        allocator: KvAllocator,
        capabilities: Capabilities,
        *,
        policy: str = "fcfs",
        conservativeness: float = 1.0,
        preemption_threshold: int = 0,
        chunk_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args beside the parts:

        preemption_threshold: a waiting request displaces running ones whose priority is lower by more than this.
        chunk_tokens: most prefill tokens in one step; None takes prompts whole.
        """
        self.allocator = allocator
        self.running: list[Request] = []
        self.num_retracted = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.misses: Counter[MissReason] = Counter()
        self.waiting = WaitingQueue(policy, self._cached_pages)
        self.capabilities = capabilities
        self._estimate = OutputEstimate(conservativeness)
        self._preemption_threshold = preemption_threshold
        self._chunk_tokens = chunk_tokens
        self.clock = clock
        self._launched: deque[LaunchedStep] = deque()
        self._waits_for_results = False
        self._next_deadline_s = math.inf
        self._batch: Batch | None = None
        self._step_id = 0
        self._page_size = allocator.geometry.page_size

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        for member in (request, *request.siblings):
            member.timings.arrival_s = self.clock()
            self._next_deadline_s = min(self._next_deadline_s, member.deadline_s)
        self.waiting.add(request)

    def abort(self, request: Request) -> bool:
        """End a request wherever it is, with what waits for its prompt.

        False when the result of a launched step must come first: it will end then.
        """
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self._end(request, Finish("abort"))
        elif request.status is RequestStatus.FORKING:
            self._end(request, Finish("abort"))
        elif request.status is RequestStatus.RUNNING:
            if any(step.awaits(request) for step in self._launched):
                request.abort_requested = True
                return False
            self._end(request, Finish("abort"))
        return True

    def retract(self, request: Request) -> None:
        """Send a running request back to the queue; its outputs stay, its KV is left to the tree.

        What launched steps compute of it is forgotten, and will be computed again. One that ends with the next result
        is left alone.
        """
        if request.abort_requested:
            return
        self.running.remove(request)
        self._batch = None  # its next row may be another
        self._drop_results(request)
        request.num_ahead = 0
        request.kv.rewind(request.kv.kv_committed_len)
        if request.session is not None and request.turn is not None:
            request.turn = request.session.retract(request.turn)
        else:
            self._let_go(request)
        request.status = RequestStatus.WAITING
        request.num_retractions += 1
        self.num_retracted += 1
        self.waiting.add_retracted(request)

    # Planning.

    def launch(self) -> tuple[StepInput | None, list[Request]]:
        """Plan the next step and promise it. Returns it and the requests that ended here.

        None: nothing can run, or nothing before the result of a launched step is known.
        """
        ended = self._end_late()
        if self._launched and (self._waits_for_results or any(request.must_be_seen for request in self.running)):
            return None, ended
        self._waits_for_results = False
        chunks, full = self._continue_running()
        ended += full
        self._admit(chunks)
        if not chunks:
            if not self.running:
                self._estimate.reset()
            return None, ended
        self._step_id += 1
        allocator = self.allocator
        unseen = {request: i for i, request in enumerate(self._launched[-1].sampled)} if self._launched else {}
        changes, copies = allocator.rows.take_changes(), allocator.take_copies()
        step, self._batch, scored = step_input(self._step_id, chunks, changes, copies, unseen, self._batch)
        for request, _, end, is_sampled in chunks:
            request.kv.schedule(end)
            request.num_ahead += is_sampled
        fences = allocator.families.fence(f"step {step.step_id}")
        self._launched.append(LaunchedStep(step, chunks, self._batch.sampled, scored, fences))
        return step, ended

    def _end_late(self) -> list[Request]:
        """End requests whose time is up, running or not."""
        if self._next_deadline_s == math.inf:
            return []
        now = self.clock()
        if now < self._next_deadline_s:
            return []
        both = (*self.running, *self.waiting)
        late = [request for request in both if request.deadline_s <= now]
        # A request's time never changes, so none is due before this.
        self._next_deadline_s = min(
            (request.deadline_s for request in both if request.deadline_s > now), default=math.inf
        )
        for request in late:
            if request.status is RequestStatus.WAITING:
                self.waiting.remove(request)
        return [ended for request in late for ended in self._end(request, Finish("timeout"))]

    def _continue_running(self) -> tuple[list[Chunk], list[Request]]:
        """Chunks of the running requests with their pages taken; retracts, and at last ends one, when pages lack."""
        ended: list[Request] = []
        retracted = False
        while self.running:
            chunks = self._chunks_of_running()
            wanted = plan(
                [extend(request.kv, end) for request, _, end, _ in chunks if end > request.kv.kv_allocated_len]
            )
            lacking = self.allocator.lacking_pages(wanted)
            if not lacking:
                if not self._take(wanted):
                    return [], ended
                if retracted:
                    self._estimate.retracted(list(self.running))
                else:
                    self._estimate.step_passed()
                return chunks, ended
            if self._launched or lacking <= self.allocator.num_arriving:
                return [], ended
            if len(self.running) == 1:
                message = f"the pool of {self.allocator.num_pages} pages of {self._page_size} tokens is full"
                ended += self._end(self.running[0], Finish("capacity", message=message))
            else:
                self.retract(min(self.running, key=_loss))
                retracted = True
        return [], ended

    def _chunks_of_running(self) -> list[Chunk]:
        """All decoding requests, and prefills in admission order while the step has room for their tokens."""
        chunks: list[Chunk] = []
        budget = self._chunk_tokens
        for request in self.running:
            start = request.kv.kv_scheduled_len
            end = request.num_known + request.num_ahead
            if request.num_ahead and (request.abort_requested or start + 1 >= request.max_tokens):
                continue  # it ends with a token that is on its way
            if end == start + 1:
                chunks.append((request, 1, end, True))
            elif n := self._chunk_len(start, end - start, budget):
                budget = None if budget is None else budget - n
                chunks.append((request, n, start + n, start + n == end))
        return chunks

    def _chunk_len(self, start: int, wanted: int, budget: int | None) -> int:
        """How many of `wanted` tokens from `start` on fit; all chunks but the last end where the device resumes."""
        if budget is None or wanted <= budget:
            return wanted
        return max(0, align_resume(start + budget, self._page_size, self.capabilities) - start)

    def _admit(self, chunks: list[Chunk]) -> None:
        """Move waiting requests into `chunks`, in the queue's order, while rows, pages and the step's tokens last."""
        if not self.waiting:
            return
        budget = self._chunk_tokens
        if budget is not None:
            budget -= sum(num_new for _, num_new, _, is_sampled in chunks if num_new > 1 or not is_sampled)
        promised = sum(self._pages_to_come(request) for request in self.running)
        for request in self.waiting.in_order():
            if budget is not None and budget <= 0:
                return
            chunk = self._try_admit(request, budget, promised)
            while chunk is None and (victim := self._preempted_by(request, chunks)) is not None:
                self.retract(victim)
                promised = sum(self._pages_to_come(other) for other in self.running)
                chunk = self._try_admit(request, budget, promised)
            if chunk is None:
                return
            chunks.append(chunk)
            promised += self._pages_to_come(request)
            if budget is not None:
                budget -= chunk[1]

    def _preempted_by(self, request: Request, chunks: list[Chunk]) -> Request | None:
        """A running request that gives way to one of clearly higher priority; its chunk leaves the step.

        The queue is in order of priority, so what was admitted into this step is never lesser.
        """
        if self.waiting.policy != "priority":
            return None
        least = request.priority - self._preemption_threshold
        victim = min((other for other in self.running if other.priority < least), key=_loss, default=None)
        if victim is not None and self._launched:
            self._waits_for_results = True  # its pages would only be pending now
            return None
        chunks[:] = [chunk for chunk in chunks if chunk[0] is not victim]
        return victim

    def _try_admit(self, request: Request, budget: int | None, promised: int) -> Chunk | None:
        """Take over what is cached of a request, and take row and pages of its first chunk; or nothing of it."""
        allocator, record = self.allocator, request.kv
        if record.req_pool_idx is None and not allocator.has_row():
            return None
        start, prefix, miss = self._take_over(request)
        num_new = self._chunk_len(start, request.num_known - start, budget)
        # Alone it needs its known tokens only; beside others, what everybody will probably use must fit.
        length = self._estimate.expected_len(request) if self.running else request.num_known
        needed = page_count(length, self._page_size) - page_count(start, self._page_size)
        needed += self._pages_of_siblings(request)
        if not self.running and allocator.lacking(needed + allocator.shares_tail(record)):
            # Nobody's end will bring a page for the copy of a shared one, and whoever shares it is idle.
            allocator.unshare_tail(record)
        is_short = num_new == 0 or allocator.lacking(needed + allocator.shares_tail(record) + promised) > 0
        if is_short or not self._take(plan([extend(record, start + num_new, prefix)]), record):
            self._put_back(request)
            return None
        self.waiting.admitted(request)
        request.status = RequestStatus.RUNNING
        if request.session is not None and request.turn is not None:
            request.session.start(request.turn, start, request.num_known - 1)
            request.lost_to_alignment = request.session.turn_lost_tokens
        if request.cached_tokens is None:
            request.cached_tokens = start
            self.num_prompt_tokens += request.prompt_len
            self.num_cached_tokens += start
            if miss is not None:
                self.misses[miss] += 1
            request.timings.scheduled_s = self.clock()
        self.running.append(request)
        return request, num_new, start + num_new, start + num_new == request.num_known

    def _take_over(self, request: Request) -> tuple[int, dict[str, IntArray] | None, MissReason | None]:
        """Where a request may start: in the row that its session lends it, or behind a prefix that the tree has.

        Returns:
            Tokens that need not be computed, the pages to start a row from when it has none, and why there are no more.
        """
        clamped: MissReason | None = None
        if request.session is not None and request.turn is not None:
            wanted, known = request.max_cached_len, request.num_known
            start = request.session.resume(request.turn, wanted, known, request.namespace)
            clamped = "clamped" if request.session.turn_lost_tokens else None
            if start:
                return start, None, clamped
        allocator, tokens = self.allocator, request.tokens[: request.max_cached_len + 1]
        match = allocator.match(tokens, request.namespace)
        miss = clamped or allocator.miss_reason(tokens, request.namespace, match)
        lock = request.held.lock = allocator.tree.lock(match, count_hit=True)
        return lock.num_pages * self._page_size, allocator.tree.row_pages(lock), miss

    def _put_back(self, request: Request) -> None:
        """Undo `_take_over`."""
        if request.lock is not None and request.kv.req_pool_idx is None:
            self.allocator.tree.unlock(request.lock)
            request.held.lock = None
        if request.session is not None and request.turn is not None:
            request.session.put_back(request.turn)

    def _take(self, wanted: Plan, resumed: ReqKvInfo | None = None) -> bool:
        """Commit a plan that lacks no page; False when some are pending first: a fence is up, and they will arrive.

        `resumed`: a record of the plan that may be about to write into a page it shares.
        """
        try:
            if resumed is not None:
                self.allocator.own_tail(resumed)
            self.allocator.commit(wanted)
        except OutOfPages:
            return False
        return True

    def _pages_to_come(self, request: Request) -> int:
        """Pages that a running request will probably still take."""
        length = max(self._estimate.expected_len(request), request.kv.kv_allocated_len)
        return page_count(length - request.kv.kv_allocated_len, self._page_size) + self._pages_of_siblings(request)

    def _pages_of_siblings(self, request: Request) -> int:
        """Pages that answers which start from this request's prompt will probably take of their own."""
        shared = floor_page(request.prompt_len, self._page_size)
        lengths = (self._estimate.expected_len(sibling) - shared for sibling in request.siblings)
        return sum(page_count(length, self._page_size) for length in lengths) if self.running else 0

    def _cached_pages(self, request: Request) -> int:
        if request.kv.req_pool_idx is not None:
            return page_count(request.kv.kv_committed_len, self._page_size)
        return self.allocator.match(request.tokens[: request.max_cached_len + 1], request.namespace).num_pages

    # Results.

    def process(self, output: StepOutput) -> list[Request]:
        """Take the oldest step's result; returns its requests that have a new token or ended."""
        launched = self._launched.popleft()
        assert launched.step.step_id == output.step_id
        self.allocator.families.lift(launched.fences)
        unwanted, token_ids = launched.unwanted, output.token_ids.tolist()
        num_tokens = output.num_tokens.tolist()
        if output.scores is not None:
            deliver_scores(launched.scored, output.scores, launched.first_tokens(num_tokens, token_ids), unwanted)
        changed: list[Request] = []
        first = 0
        for chunk, n, is_finite in zip(launched.chunks, num_tokens, output.is_finite.tolist(), strict=True):
            if chunk[0] not in unwanted:
                if ended := self._result_of(chunk, token_ids[first : first + n], is_finite):
                    changed += ended
                elif n:
                    changed.append(chunk[0])
            first += n
        return changed

    def _result_of(self, chunk: Chunk, new_tokens: list[int], is_finite: bool) -> Sequence[Request]:
        """Commit one request's part of a step; returns it when it ended, with what ended with it."""
        request, num_new, end, is_sampled = chunk
        record = request.kv
        record.commit(end)
        request.num_ahead -= is_sampled
        if request.abort_requested:
            return self._end(request, Finish("abort"), publish=is_finite)
        if not is_finite:
            if request.grammar is not None and request.grammar.problem:
                return self._end(request, Finish("error", message=request.grammar.problem))
            message = "the model's logits are not finite (NaN or inf); its KV was not cached"
            return self._end(request, Finish("error", message=message), publish=False)
        is_first = request.num_known == request.prompt_len
        if num_new > 1 or is_first:
            self._publish(request)
        if self.allocator.has_window:
            self.allocator.slide_window(record)
        if new_tokens and request.siblings:
            self._fork_siblings(request)
        if new_tokens and is_first:
            request.timings.first_token_s = self.clock()
        for token_id in new_tokens:
            finish = request.append(token_id)
            if finish is not None:
                return self._end(request, finish)
        return ()

    def _fork_siblings(self, request: Request) -> None:
        """Let the other answers start from the prompt's KV: each computes the last prompt token and draws its own."""
        siblings, request.siblings = request.siblings, ()
        for sibling in siblings:
            if sibling.status is not RequestStatus.FORKING:
                continue
            if request.scores is not None and sibling.scores is not None:
                sibling.scores.prompt = list(request.scores.prompt)
            length = request.prompt_len - 1
            try:
                assert request.lock is not None
                if length:
                    sibling.held.lock = self.allocator.fork(request.kv, request.lock, sibling.kv, length)
            except (OutOfRows, OutOfPages):
                pass  # it waits like any other and finds the prompt in the tree
            if sibling.lock is None:
                sibling.status = RequestStatus.WAITING
                self.waiting.add(sibling)
                continue
            sibling.status = RequestStatus.RUNNING
            sibling.cached_tokens = length
            sibling.timings.scheduled_s = self.clock()
            self.running.append(sibling)

    def _end(self, request: Request, finish: Finish, *, publish: bool = True) -> list[Request]:
        """End a request, and the answers that would have started from its prompt; returns them all."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._drop_results(request)
        request.timings.finished_s = self.clock()
        if request.session is not None and request.turn is not None:
            _end_turn(request, request.session, request.turn, finish, trust_kv=publish)
        else:
            self._let_go(request, publish=publish)
        request.status = RequestStatus.FINISHED
        request.finish = finish
        siblings, request.siblings = request.siblings, ()
        waiting = [sibling for sibling in siblings if sibling.status is RequestStatus.FORKING]
        return [request, *(ended for sibling in waiting for ended in self._end(sibling, finish))]

    def _drop_results(self, request: Request) -> None:
        """Nobody wants what launched steps compute of it."""
        for step in self._launched:
            step.unwanted.add(request)

    def _publish(self, request: Request) -> None:
        """Give the tree what is committed; of a session's turn the prompt only, and only when its row is new."""
        tokens, held = request.tokens, request.held
        if request.session is not None:
            if not request.session.slot.publishes_prompt:
                return
            tokens = tokens[: request.prompt_len]
        assert held.lock is not None
        held.lock = self.allocator.publish(held.record, tokens, request.namespace, held.lock, request.priority)

    def _let_go(self, request: Request, *, publish: bool = True) -> None:
        """Leave committed pages to the tree, give the rest back."""
        if publish and request.kv.req_pool_idx is not None:
            self._publish(request)
        self.allocator.release(request.kv, request.lock)
        request.held.lock = None


def _end_turn(request: Request, session: Session, turn: Turn, finish: Finish, *, trust_kv: bool) -> None:
    """What a stop and a length end goes into the history; anything else leaves the history as it was."""
    now = request.timings.finished_s
    if finish.reason in ("stop", "length"):
        session.finish(turn, request.prompt_len, request.num_known, now)
    else:
        session.abort(turn, request.num_known, now, trust_kv=trust_kv)


def _loss(request: Request) -> tuple[int, int, int, int]:
    """What retracting a request costs: low priority first, then few outputs; ties: the longest prompt, the latest."""
    return (request.priority, request.num_output, -request.prompt_len, -request.arrival)
