"""The loop: requests in, one step after another, results out. It knows token ids and no text.

`EngineCore` joins a scheduler (decides) and a runner (executes). `launch` and `collect` are the two halves of a step;
`step` does both, and where the device can overlap them it launches the next step before it takes a result. It runs in
the caller's thread and holds no other state than its requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from devices.page_pool import PagePool
from devices.pages import IntArray, page_count
from engine.errors import BadRequest, session_rules
from engine.request import Prompt, Request, RequestStatus, new_request
from engine.sampling.grammar import GrammarState
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.params import MAX_SEED, SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.status import StatusLog, StepTiming
from engine.step import Executor, StepInput
from engine.text.stream import TextStream
from mem_cache.allocation import KvAllocator
from mem_cache.audit import Violation, audit
from mem_cache.tree.keys import Namespace
from mem_cache.tree.misses import MISS_REASONS
from session.branching import SessionParams
from session.controller import SessionController
from session.session import SessionLimits

TIMINGS_KEPT = 4096
NO_LIMITS = SessionLimits()


class EngineCore:
    """One engine on one device.

    Attributes:
        scheduler, runner, allocator: its parts, for tools and tests that look inside.
        sessions: conversations that outlive their requests.
        context_len: most tokens of prompt and output together.
        depth: how many steps run ahead of the result that is taken next.
        timings: the latest steps.
        grammars: compiles those of requests; without it requests cannot have any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Executor,
        *,
        context_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        random_seed: int | None = None,
        log_interval: int = 40,
        session_limits: SessionLimits = NO_LIMITS,
        grammars: GrammarCompiler | None = None,
        overlap: bool = True,
    ) -> None:
        """`overlap`: off, no step is launched before the last one's result was taken, whatever the device can."""
        self.grammars = grammars
        self.scheduler = scheduler
        self.runner = runner
        self.allocator: KvAllocator = scheduler.allocator
        self.sessions = SessionController(
            self.allocator,
            scheduler.capabilities,
            context_len=context_len,
            limits=session_limits,
            clock=scheduler.clock,
        )
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.timings: deque[StepTiming] = deque(maxlen=TIMINGS_KEPT)
        self._requests: dict[str, Request] = {}
        self._seeds = np.random.default_rng(random_seed)
        self._num_arrived = 0
        self._status = StatusLog(log_interval)
        self._weights_version = 0
        self.depth = int(overlap and scheduler.capabilities.overlap)
        self._launched: deque[tuple[StepInput, float]] = deque()
        self._waits = False

    # Requests.

    def add(
        self,
        prompt_ids: IntArray,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        texts: Sequence[TextStream | None] = (),
        priority: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Queue a prompt; returns its `params.n` requests, of which the first computes the prompt for all.

        Args:
            texts: for each answer what watches its text, where something does.
        Raises:
            BadRequest: it could never run: empty, an id outside the vocabulary, longer than context or pool, or an id
                that is in use.
        """
        self._check_prompt(prompt_ids)
        params.check_vocabulary(self.vocab_size)
        grammars = [self._grammar_state(params) for _ in range(params.n)]
        ids = self._new_ids(request_id, params.n)
        seed = int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed
        requests = [
            new_request(
                request_id=one_id,
                prompt=Prompt.alone(
                    one_id, prompt_ids, params.max_new_tokens, self.context_len, self.allocator.geometry
                ),
                params=params,
                eos_token_ids=self.eos_token_ids,
                seed=seed + i,
                arrival=self._num_arrived + i,
                namespace=Namespace(extra_key, cache_salt, self._weights_version),
                priority=priority,
                text=texts[i] if texts else None,
                grammar=grammars[i],
                status=RequestStatus.FORKING if i else RequestStatus.WAITING,
            )
            for i, one_id in enumerate(ids)
        ]
        requests[0].siblings = tuple(requests[1:])
        self._num_arrived += params.n
        self._requests |= {request.id: request for request in requests}
        self.scheduler.add(requests[0])
        return requests

    def add_turn(
        self,
        session_id: str,
        new_ids: IntArray,
        params: SamplingParams,
        *,
        keep: int | None = None,
        request_id: str | None = None,
        text: TextStream | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue the next turn of a session.

        Args:
            new_ids: int32 [n], what the turn adds to the history; empty to go on where the last one ended.
            keep: rewind the history to so many tokens first.
            text: watches the answer's text, where something does.
        Raises:
            BadRequest: it could never run; SessionRefused, when it is a session's rule that forbids it.
        """
        with session_rules():
            session = self.sessions.get(session_id)
            history = len(session.log) if keep is None else keep
            self._check_prompt(new_ids, history)
            params.check_vocabulary(self.vocab_size)
            if params.n != 1:
                raise BadRequest("n", params.n, "a session has one history: use n=1, or fork the session")
            if -1 < params.logprob_start_len < history:
                rule = f"the history's {history} tokens are not computed again; start behind them, or use -1"
                raise BadRequest("logprob_start_len", params.logprob_start_len, rule)
            grammar = self._grammar_state(params)
            one_id = self._new_ids(request_id, 1)[0]
            begun = self.sessions.begin(session_id, one_id, new_ids, params.max_new_tokens, keep=keep)
        request = new_request(
            request_id=one_id,
            prompt=Prompt.of_turn(session, begun),
            params=params,
            eos_token_ids=self.eos_token_ids,
            seed=int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed,
            arrival=self._num_arrived,
            namespace=replace(session.namespace, weights_version=self._weights_version),
            priority=priority,
            text=text,
            grammar=grammar,
        )
        self._num_arrived += 1
        self._requests[one_id] = request
        self.scheduler.add(request)
        return request

    def add_branch(
        self,
        session_params: SessionParams,
        new_ids: IntArray,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        texts: Sequence[TextStream | None] = (),
        priority: int = 0,
    ) -> list[Request]:
        """Queue a request that continues a branching session; see `session.branching`. Otherwise as `add`.

        Raises SessionRefused: no such session, or it is closing; its parameters name what it does not have.
        """
        with session_rules():
            session = self.sessions.get_branching(session_params.id)
            if session is None:
                self.sessions.get(session_params.id)  # says that there is none
                raise BadRequest("session_params", session_params.id, "is a streaming session; use add_turn")
            prompt = np.concatenate([session.context(session_params), new_ids])
            session.check_begin(len(prompt))
        limited = replace(params, max_new_tokens=min(params.max_new_tokens, session.capacity - len(prompt)))
        namespace = session.namespace
        requests = self.add(
            prompt,
            limited,
            request_id=request_id,
            texts=texts,
            priority=priority,
            extra_key=namespace.extra_key,
            cache_salt=namespace.cache_salt,
        )
        replaced = session.replace(session_params)
        if replaced is not None:
            self.abort(replaced)
        session.last_used_s = self.scheduler.clock()
        for request in requests:
            session.add(session_params, request, params.max_new_tokens)
        return requests

    def _new_ids(self, wanted: str | None, n: int) -> list[str]:
        """Ids of a request and of its further answers. Raises BadRequest when one is in use."""
        first = f"r{self._num_arrived}" if wanted is None else wanted
        ids = [first, *(f"{first}-{i}" for i in range(1, n))]
        taken = next((one for one in ids if one in self._requests), None)
        if taken is not None:
            raise BadRequest("request_id", taken, "a request with this id is still running; choose another")
        return ids

    def _grammar_state(self, params: SamplingParams) -> GrammarState | None:
        """Waits for the compiler where `grammars.compile` was not called before. Raises BadRequest."""
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise BadRequest(params.grammar.kind, params.grammar.text, "this engine has no grammar compiler")
        return self.grammars.state(params.grammar, self.eos_token_ids, params.min_new_tokens)

    def close_session(self, session_id: str, *, abort: bool = False) -> bool:
        """Close a session now, or at the end of its turn; `abort` ends the turn. True when it is closed on return."""
        if self.sessions.close(session_id):
            return True
        for request_id in self.sessions.running(session_id) if abort else ():
            self.abort(request_id)
        return self.sessions.close(session_id)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; an id that is unknown or finished is no error and gives False."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        members = [request, *request.siblings]
        if self.scheduler.abort(request):
            self._forget_finished(members)
        return True

    def _check_prompt(self, prompt_ids: IntArray, history: int = 0) -> None:
        """`history`: tokens that stand before the prompt already."""
        n = history + len(prompt_ids)
        if n == 0:
            raise BadRequest("prompt", [], "is empty; give at least one token")
        if len(prompt_ids):
            low, high = int(prompt_ids.min()), int(prompt_ids.max())
            if low < 0 or high >= self.vocab_size:
                wrong = low if low < 0 else high
                raise BadRequest("prompt", wrong, f"is no token id of this model; they are 0..{self.vocab_size - 1}")
        if n >= self.context_len:
            rule = f"tokens leave no room for an answer: the context is {self.context_len} tokens; shorten the prompt"
            raise BadRequest("prompt", n, rule)
        page_size, num_pages = self.allocator.geometry.page_size, self.allocator.num_pages
        if page_count(n, page_size) > num_pages:
            rule = f"tokens can never fit: the KV pool holds {num_pages * page_size}; raise --max-total-tokens"
            raise BadRequest("prompt", n, rule)

    # Steps.

    @property
    def has_work(self) -> bool:
        return len(self._launched) > 0 or len(self.scheduler) > 0

    @property
    def num_in_flight(self) -> int:
        """Launched steps that wait for `collect`."""
        return len(self._launched)

    @property
    def is_due(self) -> bool:
        """Whether a result must be taken before anything more can be launched."""
        return len(self._launched) > (0 if self._waits else self.depth)

    def step(self) -> list[Request]:
        """Launch a step if one can be, and take a result if one is due; returns requests with a new token or an end.

        depth 0    launch 1, collect 1, launch 2, collect 2, ...
        depth 1    launch 1, launch 2, collect 1, launch 3, collect 2, ...
        """
        changed = self.launch()
        if self.is_due:
            changed += self.collect()
        return changed

    def launch(self) -> list[Request]:
        """First half: plan a step, promise it and hand it to the runner. Returns requests that ended in planning."""
        start = time.perf_counter()
        self.sessions.expire()
        step, ended = self.scheduler.launch()
        self._waits = step is None
        if step is not None:
            self._launched.append((step, time.perf_counter() - start))
            self.runner.launch(step)
        return self._forget_finished(ended)

    def collect(self) -> list[Request]:
        """Second half: take the result of the oldest launched step; nothing when there is none."""
        if not self._launched:
            return []
        step, host_s = self._launched.popleft()
        output = self.runner.collect()
        prepare_s, device_s = self.runner.prepare_s, self.runner.device_s
        start = time.perf_counter()
        changed = self.scheduler.process(output)
        host_s += time.perf_counter() - start
        self.timings.append(StepTiming(len(step.rows), len(step.token_ids), host_s, prepare_s, device_s))
        if self._status.step(self.timings[-1]):
            self._status.write(self.stats())
        return self._forget_finished(changed)

    def _forget_finished(self, changed: list[Request]) -> list[Request]:
        for request in changed:
            if request.finish is not None:
                self._requests.pop(request.id, None)
        return changed

    # What it holds.

    def flush_cache(self) -> None:
        """Empty the prefix tree; sessions keep their histories and lose their rows.

        Raises BadRequest while requests run: their prefixes are in use.
        """
        if self.has_work:
            raise BadRequest("flush_cache", len(self.scheduler), "requests are not finished; flush when idle")
        self.sessions.demote_all()
        self.allocator.tree.flush()

    def bump_weights_version(self) -> int:
        """Say that the weights changed: no later request starts from KV of before. Returns the new version.

        Requests that run go on, with KV of both; what they publish stays under the version that they arrived with.
        """
        self._weights_version += 1
        return self._weights_version

    def audit(self) -> list[Violation]:
        """What is wrong with the books; empty when they are right. Works while requests and sessions are alive."""
        held = [request.held for request in self._requests.values()]
        return audit(self.allocator, [*held, *self.sessions.holdings()]) + self.sessions.audit()

    def stats(self) -> Mapping[str, int]:
        """Pages of the full family by owner, of the others free, pending and in use; rows, and counters."""
        pool, tree, rows = self.allocator.families.pools["full"], self.allocator.tree, self.allocator.rows
        in_tree = tree.num_evictable + tree.num_protected
        idle_pages, num_sessions, held_tokens = self.sessions.census()
        return {
            "num_pages": pool.num_pages,
            "page_size": self.allocator.geometry.page_size,
            "free_pages": pool.num_free,
            "pending_pages": pool.num_pending,
            "tree_evictable_pages": tree.num_evictable,
            "tree_protected_pages": tree.num_protected,
            "session_pages": idle_pages,
            "request_pages": pool.num_pages - pool.num_free - pool.num_pending - in_tree - idle_pages,
            "num_rows": rows.num_rows,
            "free_rows": rows.num_free,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_prefilling": sum(request.num_output == 0 for request in self.scheduler.running),
            "num_retracted_total": self.scheduler.num_retracted,
            "prompt_tokens_total": self.scheduler.num_prompt_tokens,
            "cached_tokens_total": self.scheduler.num_cached_tokens,
            "num_sessions": num_sessions,
            "session_held_tokens": held_tokens,
            "evicted_tokens_total": tree.misses.num_evicted * tree.page_size,
            **_family_pages(self.allocator.families.pools),
            **{f"prefix_miss_{reason}_total": self.scheduler.misses[reason] for reason in MISS_REASONS},
            **self.runner.counts,
        }


def _family_pages(pools: Mapping[str, PagePool]) -> dict[str, int]:
    """Pages of every family but the full one."""
    counts = {}
    for name, pool in pools.items():
        if name != "full":
            used = pool.num_pages - pool.num_free - pool.num_pending
            for owner, count in (("free", pool.num_free), ("pending", pool.num_pending), ("used", used)):
                counts[f"family_pages_{owner}_{name}"] = count
    return counts
