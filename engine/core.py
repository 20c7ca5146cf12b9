"""The loop: requests in, one step after another, results out. It knows token ids and no text.

`EngineCore` joins a scheduler (decides) and a runner (executes). `launch` and `collect` are the two halves of a step;
`step` does both. It runs in the caller's thread and holds no other state than its requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from devices.pages import IntArray, page_count
from engine.errors import BadRequest
from engine.request import Request, RequestStatus, new_request
from engine.sampling.params import MAX_SEED, SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.status import StatusLog, StepTiming
from engine.step import Executor, StepInput
from engine.text.stream import TextStream
from mem_cache.allocation import KvAllocator
from mem_cache.audit import Violation, audit
from mem_cache.tree.keys import Namespace

TIMINGS_KEPT = 4096


class EngineCore:
    """One engine on one device.

    Attributes:
        scheduler, runner, allocator: its parts, for tools and tests that look inside.
        context_len: most tokens of prompt and output together.
        timings: the latest steps.
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
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.allocator: KvAllocator = scheduler.allocator
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.timings: deque[StepTiming] = deque(maxlen=TIMINGS_KEPT)
        self._requests: dict[str, Request] = {}
        self._seeds = np.random.default_rng(random_seed)
        self._num_arrived = 0
        self._status = StatusLog(log_interval)
        self._weights_version = 0
        self._launched: tuple[StepInput, float] | None = None

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
        first_id = f"r{self._num_arrived}" if request_id is None else request_id
        ids = [first_id, *(f"{first_id}-{i}" for i in range(1, params.n))]
        taken = next((one for one in ids if one in self._requests), None)
        if taken is not None:
            raise BadRequest("request_id", taken, "a request with this id is still running; choose another")
        seed = int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed
        requests = [
            new_request(
                request_id=one_id,
                prompt_ids=prompt_ids,
                params=params,
                geometry=self.allocator.geometry,
                context_len=self.context_len,
                eos_token_ids=self.eos_token_ids,
                seed=seed + i,
                arrival=self._num_arrived + i,
                namespace=Namespace(extra_key, cache_salt, self._weights_version),
                priority=priority,
                text=texts[i] if texts else None,
                status=RequestStatus.FORKING if i else RequestStatus.WAITING,
            )
            for i, one_id in enumerate(ids)
        ]
        requests[0].siblings = tuple(requests[1:])
        self._num_arrived += params.n
        self._requests |= {request.id: request for request in requests}
        self.scheduler.add(requests[0])
        return requests

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; an id that is unknown or finished is no error and gives False."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        members = (request, *request.siblings)
        if self.scheduler.abort(request):
            self._forget_finished(members)
        return True

    def _check_prompt(self, prompt_ids: IntArray) -> None:
        n = len(prompt_ids)
        if n == 0:
            raise BadRequest("prompt", [], "is empty; give at least one token")
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
        return self._launched is not None or len(self.scheduler) > 0

    @property
    def in_flight(self) -> bool:
        """Whether a launched step waits for `collect`."""
        return self._launched is not None

    def step(self) -> list[Request]:
        """Run one step; returns the requests that have a new token or ended."""
        return self.launch() + self.collect()

    def launch(self) -> list[Request]:
        """First half: plan and promise a step. Returns requests that ended in planning."""
        start = time.perf_counter()
        step, ended = self.scheduler.launch()
        if step is not None:
            self._launched = (step, time.perf_counter() - start)
        return self._forget_finished(ended)

    def collect(self) -> list[Request]:
        """Second half: execute the launched step and take its result; nothing when none was launched."""
        if self._launched is None:
            return []
        step, host_s = self._launched
        self._launched = None
        start = time.perf_counter()
        changed = self.scheduler.process(self.runner.execute(step))
        prepare_s, device_s = self.runner.prepare_s, self.runner.device_s
        host_s += time.perf_counter() - start - prepare_s - device_s
        self.timings.append(StepTiming(len(step.rows), len(step.token_ids), host_s, prepare_s, device_s))
        if self._status.step(self.timings[-1]):
            self._status.write(self.stats())
        return self._forget_finished(changed)

    def _forget_finished(self, requests: Iterable[Request]) -> list[Request]:
        changed = list(requests)
        for request in changed:
            if request.finish is not None:
                self._requests.pop(request.id, None)
        return changed

    # What it holds.

    def flush_cache(self) -> None:
        """Empty the prefix tree. Raises BadRequest while requests run: their prefixes are in use."""
        if self.has_work:
            raise BadRequest("flush_cache", len(self.scheduler), "requests are not finished; flush when idle")
        self.allocator.tree.flush()

    def bump_weights_version(self) -> int:
        """Say that the weights changed: no later request starts from KV of before. Returns the new version.

        Requests that run go on, with KV of both; what they publish stays under the version that they arrived with.
        """
        self._weights_version += 1
        return self._weights_version

    def audit(self) -> list[Violation]:
        """What is wrong with the books; empty when they are right. Works while requests are alive."""
        return audit(self.allocator, [request.holding for request in self._requests.values()])

    def stats(self) -> Mapping[str, int]:
        """Pages of the full family by owner, rows, and counters."""
        pool, tree, rows = self.allocator.families.pools["full"], self.allocator.tree, self.allocator.rows
        in_tree = tree.num_evictable + tree.num_protected
        return {
            "num_pages": pool.num_pages,
            "page_size": self.allocator.geometry.page_size,
            "free_pages": pool.num_free,
            "pending_pages": pool.num_pending,
            "tree_evictable_pages": tree.num_evictable,
            "tree_protected_pages": tree.num_protected,
            "request_pages": pool.num_pages - pool.num_free - pool.num_pending - in_tree,
            "num_rows": rows.num_rows,
            "free_rows": rows.num_free,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_retracted_total": self.scheduler.num_retracted,
            "prompt_tokens_total": self.scheduler.num_prompt_tokens,
            "cached_tokens_total": self.scheduler.num_cached_tokens,
        }
