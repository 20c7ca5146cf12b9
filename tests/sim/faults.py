"""Deliberate faults, each one line of the engine changed, with the checker that must catch it.

A fault is an edit of a function's own source: the line must be there, once, so a fault whose line has gone says so
instead of passing. The edited function replaces the real one for one test.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from engine.sim.profiles import draw
from engine.sim.run import run_seed
from engine.sim.soak import Totals

ALLOCATOR = "mem_cache.allocation:KvAllocator"
TREE = "mem_cache.tree.prefix_tree:PrefixTree"
POOL = "devices.page_pool:PagePool"
SCHEDULER = "engine.scheduler.scheduler:Scheduler"
QUEUE = "engine.scheduler.queue:WaitingQueue"
CORE = "engine.core:EngineCore"

NUM_STEPS = 150
"""Of the scripts in which a fault is looked for."""


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        name: what is wrong, as a bug report would say it.
        target: "module:function" or "module:Class.method".
        old, new: the line's text and what stands there instead.
        checker: who must catch it.
        profile: of the worlds in which it shows soonest.
        max_seeds: seeds within which it must be caught.
    """

    name: str
    target: str
    old: str
    new: str
    checker: str
    profile: str = "tiny"
    max_seeds: int = 80

    def inject(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module_name, _, path = self.target.partition(":")
        owner: Any = import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        plain = inspect.getattr_static(owner, name)
        function = plain.fget if isinstance(plain, property) else plain
        edited = self._edited(function)
        monkeypatch.setattr(owner, name, property(edited) if isinstance(plain, property) else edited)

    def _edited(self, function: Any) -> Any:
        source = textwrap.dedent(inspect.getsource(function)).replace("@property\n", "")
        assert source.count(self.old) == 1, f"{self.target} has {source.count(self.old)} times: {self.old}"
        flags = annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<{self.name}>", "exec", flags, dont_inherit=True)
        scope: dict[str, Any] = {}
        exec(code, function.__globals__, scope)
        return scope[function.__name__]


def seeds_to_catch(fault: Fault, first_seed: int = 0, others: set[str] | None = None) -> int | None:
    """Seeds, from `first_seed` on, until the injected fault is caught by its own checker; None when it is not.

    Args:
        others: takes the names of checkers that caught it before.
    """
    for seed in range(first_seed, first_seed + fault.max_seeds):
        failure = run_seed(draw(seed, NUM_STEPS, fault.profile), Totals())
        if failure is not None and failure.checker == fault.checker:
            return seed - first_seed + 1
        if failure is not None and others is not None:
            others.add(failure.checker)
    return None


FAULTS = (
    # Who owns a page.
    Fault("a fork does not retain", f"{ALLOCATOR}.fork", "self.families.retain(both)", "pass", "audit"),
    Fault("a fork retains the tree's pages too", f"{ALLOCATOR}.fork", "[in_tree:whole]", "[:whole]", "audit"),
    Fault("a fork shares the partial page", f"{ALLOCATOR}.fork", "self._copies.append(", "bool(", "tokens", "siblings"),
    Fault(
        "a fork keeps more than it reads", f"{ALLOCATOR}.fork", "(lock, in_tree)", "(lock, lock.num_pages)", "tokens"
    ),
    Fault("publish does not repoint", f"{ALLOCATOR}.publish", "self.rows.write(", "(lambda *_: None)(", "audit"),
    Fault("publish keeps duplicates", f"{ALLOCATOR}.publish", ".release(own[own != trees])", "", "audit"),
    Fault(
        "publish frees one duplicate too many",
        f"{ALLOCATOR}.publish",
        ".release(own[own != trees])",
        ".release(self.rows.pages(name, record.row, protected, (known + 1) * page_size))",
        "audit",
        "siblings",
    ),
    Fault("publish keeps the old lock", f"{ALLOCATOR}.publish", "self.tree.unlock(lock)", "", "audit"),
    Fault("publish protects too little", f"{ALLOCATOR}.publish", "protect(end)", "protect(end - page_size)", "audit"),
    Fault(
        "publish counts tokens, not KV",
        f"{ALLOCATOR}._publishable_len",
        "min(record.kv_committed_len, len(tokens))",
        "len(tokens)",
        "crash",
    ),
    Fault("release forgets the row", f"{ALLOCATOR}.release", "self.rows.free(record.row)", "", "audit"),
    Fault("release frees the tree's pages", f"{ALLOCATOR}.release", "part.start, part.end)", "0, part.end)", "audit"),
    Fault("release keeps the lock", f"{ALLOCATOR}.release", "self.tree.unlock(lock)", "pass", "audit"),
    Fault(
        "release frees what is committed only",
        "mem_cache.allocation:plan_release",
        "record.cache_protected_len, record.kv_allocated_len",
        "record.cache_protected_len, ceil_page(record.kv_committed_len, geometry.page_size) - geometry.page_size",
        "audit",
    ),
    Fault("a match may be the whole prompt", f"{ALLOCATOR}.match", "tokens[:-1]", "tokens", "progress"),
    Fault(
        "eviction is one page short",
        f"{ALLOCATOR}._make_room",
        "(num_pages - free - self.num_arriving)",
        "(num_pages - free - self.num_arriving - 1)",
        "progress",
    ),
    Fault(
        "eviction takes a page too many",
        f"{ALLOCATOR}._make_room",
        "(num_pages - free - self.num_arriving)",
        "(num_pages - free - self.num_arriving + 1)",
        "evictions",
    ),
    Fault(
        "a whole leaf is evicted",
        f"{TREE}.evict",
        "min(num_pages - gone, leaf.num_pages)",
        "leaf.num_pages",
        "evictions",
    ),
    Fault("nothing matches", f"{ALLOCATOR}.match", "if not self.caching:", "if True:", "hits", "mixed"),
    Fault("nothing is published", f"{ALLOCATOR}.publish", "if not self.caching:", "if True:", "hits", "mixed"),
    Fault(
        "an ended request publishes nothing",
        f"{SCHEDULER}._let_go",
        "if publish and",
        "if False and",
        "hits",
        "branches",
    ),
    Fault(
        "a turn keeps reserved pages",
        "session.slot:SessionSlot.rewind",
        "self._allocator.trim(self.record)",
        "pass",
        "width",
        "chat",
    ),
    Fault(
        "a session is never late",
        "session.controller:SessionController.expire",
        "if session.expires_s(now) < now]",
        "if False]",
        "timeouts",
        "mixed",
    ),
    Fault(
        "a retracted request that is aborted stays in the queue",
        f"{QUEUE}.remove",
        "self._retracted.remove(request)",
        "pass",
        "audit",
    ),
    Fault(
        "a new page is written one entry late",
        f"{ALLOCATOR}._grow",
        "page_count(start, self.geometry.page_size)",
        "page_count(start + 1, self.geometry.page_size)",
        "audit",
    ),
    Fault(
        "a record forgets to reset one length",
        "mem_cache.kv_info:ReqKvInfo.mark_released",
        "self._reset_lengths()",
        "self._protected = self._committed = self._scheduled = 0",
        "audit",
    ),
    Fault("two borrow one row", "mem_cache.rows:RowPool.alloc", "self._free.pop()", "self._free[-1]", "audit"),
    Fault(
        "a change of a table is lost",
        "mem_cache.rows:RowPool.take_changes",
        "tuple(self._changes)",
        "tuple(self._changes[:-1])",
        "tokens",
    ),
    # Pages and fences.
    Fault("a released page is not fenced", f"{POOL}.release", "if self._fences:", "if False:", "fences", "trouble"),
    Fault("a page waits for one fence only", f"{POOL}.lift", "if batch.waits_for:", "if False:", "fences", "trouble"),
    Fault("pending pages never come back", f"{POOL}.lift", "if batch.waits_for:", "if True:", "progress"),
    Fault(
        "retain counts the first page only",
        f"{POOL}.retain",
        "np.add.at(self._refs, pages, 1)",
        "np.add.at(self._refs, pages[:1], 1)",
        "audit",
        "trouble",
    ),
    Fault("release frees shared pages", f"{POOL}.release", "pages[after == 0]", "pages", "audit"),
    # The tree.
    Fault("a split forgets the lock", f"{TREE}._split_at", "front.lock_count, front.hits", "_, front.hits", "audit"),
    Fault(
        "a split inside a page",
        f"{TREE}._split_at",
        "cut = at * self.page_bytes",
        "cut = at * self.page_bytes - 4",
        "audit",
    ),
    Fault(
        "unlock starts at the wrong node",
        f"{TREE}.unlock",
        "node = receipt.node",
        "node = receipt.node.parent or receipt.node",
        "audit",
    ),
    Fault("unlock forgets to queue the leaf", f"{TREE}.unlock", "self._enqueue(node)", "pass", "audit"),
    Fault(
        "a locked leaf is evicted",
        "mem_cache.tree.node:Node.is_evictable_leaf",
        "self.lock_count == 0 and ",
        "",
        "audit",
    ),
    Fault(
        "an evicted node gives all its pages back",
        f"{TREE}._trim",
        "component.drop(gone)",
        "component.drop(np.concatenate([leaf.held[component.family], gone]))",
        "audit",
    ),
    Fault("insert calls known pages new", f"{TREE}.insert", "key.num_pages), depth)", "key.num_pages), 0)", "audit"),
    Fault(
        "half a page matches",
        "mem_cache.tree.keys:PrefixKey.shared_pages",
        "return tokens * TOKEN_BYTES // self.page_bytes",
        "return -(-tokens * TOKEN_BYTES // self.page_bytes)",
        "hits",
        "mixed",
    ),
    Fault(
        "KV of old weights is found",
        "mem_cache.tree.keys:Namespace.__post_init__",
        '("weights", str(self.weights_version))',
        '("weights", "0")',
        "hits",
        "trouble",
    ),
    Fault(
        "salts share prefixes",
        "mem_cache.tree.keys:Namespace.__post_init__",
        '("salt", self.cache_salt)',
        '("salt", None)',
        "hits",
    ),
    Fault("a flush flushes nothing", f"{TREE}.flush", "self.evict(self.num_evictable)", "pass", "flush", "siblings"),
    # One step.
    Fault(
        "the fence of a step stays up",
        f"{SCHEDULER}.process",
        "self.allocator.families.lift(launched.fences)",
        "pass",
        "progress",
    ),
    Fault(
        "a step commits one token less",
        f"{SCHEDULER}._result_of",
        "commit(chunk.end)",
        "commit(max(request.kv.kv_committed_len, chunk.end - 1))",
        "abort",
    ),
    Fault(
        "KV of a result that is no number is cached",
        f"{SCHEDULER}._result_of",
        "publish=False",
        "publish=True",
        "tokens",
        "trouble",
    ),
    Fault(
        "KV of an aborted request's result that is no number is cached",
        f"{SCHEDULER}._result_of",
        "publish=is_finite",
        "publish=True",
        "tokens",
        "chat",
    ),
    Fault(
        "a token is shown after an abort",
        f"{SCHEDULER}._result_of",
        "if request.abort_requested:",
        "if False:",
        "tokens",
    ),
    Fault(
        "a request is named twice",
        f"{SCHEDULER}._result_of",
        "return [request] if new_tokens",
        "return [request, request] if new_tokens",
        "reports",
    ),
    Fault(
        "a chunk ends inside a page",
        f"{SCHEDULER}._chunk_len",
        "max(0, align_resume(start + budget, self._page_size, self.capabilities) - start)",
        "budget",
        "crash",
        "wide",
    ),
    Fault(
        "no rollback when an admission finds no pages",
        f"{SCHEDULER}._try_admit",
        "self._put_back(request)",
        "pass",
        "audit",
    ),
    Fault(
        "a step is launched without its pages",
        f"{SCHEDULER}._continue_running",
        "return [], ended\n            if retracted",
        "return chunks, ended\n            if retracted",
        "crash",
    ),
    Fault(
        "a step reserves a page too many",
        f"{SCHEDULER}._continue_running",
        "plan(extend(r.kv, end)",
        "plan(extend(r.kv, min(end + self._page_size, r.kv.geometry.row_width))",
        "width",
    ),
    Fault(
        "a request ends although another could be sent back",
        f"{SCHEDULER}._continue_running",
        "len(self.running) == 1",
        "len(self.running) <= 2",
        "tokens",
    ),
    Fault("a retraction keeps the row", f"{SCHEDULER}.retract", "self._let_go(request)", "pass", "retract"),
    Fault(
        "siblings of an ended request wait for ever",
        f"{SCHEDULER}._end",
        "for ended in self._end(sibling, finish)",
        "for ended in ()",
        "idle",
        "siblings",
    ),
    Fault(
        "a waiting request is never late",
        f"{SCHEDULER}._end_late",
        "(*self.running, *self.waiting)",
        "self.running",
        "deadlines",
    ),
    Fault(
        "a preempted request stays in the step",
        f"{SCHEDULER}._preempted_by",
        "chunk.request is not victim",
        "True",
        "crash",
    ),
    Fault("nobody is preempted", f"{SCHEDULER}._preempted_by", 'self.waiting.policy != "priority"', "True", "fairness"),
    Fault("low priority goes first", f"{QUEUE}.in_order", "-request.priority", "request.priority", "fairness"),
    Fault(
        "a retracted request goes to the end of the queue",
        f"{QUEUE}.add_retracted",
        "self._retracted.appendleft(request)",
        "self._fresh[request.id] = request",
        "fairness",
    ),
    Fault("an aborted request stays in the queue", f"{SCHEDULER}.abort", "self.waiting.remove(request)", "", "audit"),
    Fault(
        "finished requests are remembered",
        f"{CORE}._forget_finished",
        "self._requests.pop(request.id, None)",
        "pass",
        "abort",
    ),
    Fault(
        "an aborted sibling waits on for its prompt",
        f"{SCHEDULER}.abort",
        "request.status is RequestStatus.FORKING",
        "False",
        "abort",
        "siblings",
    ),
    Fault(
        "a prompt as long as the pool is refused",
        f"{CORE}._check_prompt",
        "page_size) > num_pages",
        "page_size) >= num_pages",
        "arrive",
    ),
    Fault("new weights skip a version", f"{CORE}.bump_weights_version", "+= 1", "+= 2", "bump"),
    Fault("siblings draw alike", f"{CORE}.add", "seed=seed + i", "seed=seed", "tokens"),
    Fault("a stop id is missed", "engine.request:Request.append", "token_id in self.stop_ids", "False", "tokens"),
    Fault(
        "an answer is one token too long",
        "engine.request:Request.append",
        "self.num_known >= self.max_tokens",
        "self.num_known > self.max_tokens",
        "tokens",
    ),
    Fault(
        "a token is drawn for the wrong place",
        "engine.scheduler.columns:_sampling_columns",
        "request.num_known + request.num_ahead for",
        "request.num_known + request.num_ahead - 1 for",
        "tokens",
    ),
    # Steps that run ahead of results.
    Fault(
        "a token that nobody saw is drawn for the place before",
        "engine.scheduler.columns:_sampling_columns",
        "request.num_known + request.num_ahead for",
        "request.num_known for",
        "tokens",
    ),
    Fault(
        "a reference names the first token of the step before",
        "engine.scheduler.columns:_token_ids",
        "refer(unseen[request])",
        "refer(0)",
        "tokens",
    ),
    Fault(
        "a retraction remembers what was ahead",
        f"{SCHEDULER}.retract",
        "request.num_ahead = 0",
        "pass",
        "crash",
    ),
    Fault(
        "a result goes to the attempt after it",
        "engine.scheduler.scheduler:_is_current",
        " and chunk.attempt == request.num_retractions",
        "",
        "tokens",
    ),
    # Sessions.
    Fault("a page of two rows is published", f"{ALLOCATOR}._publishable_len", "shared.any()", "False", "audit", "chat"),
    Fault(
        "a row of old weights serves a turn",
        "session.slot:SessionSlot.lend",
        "length == 0 or namespace != self._namespace",
        "length == 0",
        "tokens",
        "chat",
    ),
    Fault(
        "an aborted turn stays in the row",
        "session.session:Session.abort",
        "self.slot.rewind(len(self.log), self.log.readable(known))",
        "pass",
        "audit",
        "chat",
    ),
    Fault(
        "a turn that went wrong stays in the row",
        "session.session:Session.abort",
        "if trust_kv:",
        "if True:",
        "tokens",
        "chat",
    ),
    Fault(
        "an ended turn keeps the loan",
        "session.session:Session._end",
        "self.slot.give_back(turn)",
        "pass",
        "audit",
        "mixed",
    ),
    Fault(
        "a rewind forgets the row",
        "session.session:Session.rewind",
        "self.slot.rewind(length, written)",
        "pass",
        "audit",
        "chat",
    ),
    Fault(
        "a closed session keeps its row",
        "session.session:Session._closed_if_due",
        "if self.slot.has_row:",
        "if False:",
        "audit",
        "mixed",
    ),
    Fault(
        "a branch forgets the answer",
        "session.branching:BranchingSession.context",
        "if not params.drop_previous_output:",
        "if False:",
        "tokens",
        "branches",
    ),
    Fault(
        "a fork forgets the history",
        "session.controller:SessionController.fork",
        "child.log = log",
        "pass",
        "fork",
        "mixed",
    ),
    Fault(
        "a branch counts its offset from the wrong end",
        "session.branching:BranchingSession.context",
        "context[: params.offset]",
        "context[params.offset :]",
        "tokens",
        "branches",
    ),
    Fault(
        "a replaced request is not forgotten",
        "session.branching:BranchingSession._forget_below",
        "self._nodes.pop(name, None)",
        "self._nodes.get(name)",
        "branch",
        "branches",
    ),
    Fault(
        "a replaced request runs on",
        f"{CORE}.add_branch",
        "self.abort(replaced)",
        "pass",
        "tokens",
        "branches",
    ),
    Fault(
        "a fork starts from the log alone",
        "session.controller:SessionController.fork",
        "parent.slot.fork_into(child.slot, length)",
        "pass",
        "fork",
        "chat",
    ),
    Fault(
        "a turn leaves its row and takes what the tree has",
        "session.slot:SessionSlot.lend",
        "length == 0 or namespace != self._namespace",
        "True",
        "turn hits",
        "chat",
    ),
    Fault(
        "every idle row gives way when one is enough",
        f"{ALLOCATOR}._make_room",
        "break",
        "pass",
        "demotions",
        "chat",
    ),
    Fault(
        "a logprob is taken one place late",
        "engine.scheduler.columns:_score_columns",
        "places.append(first + position - 1 - start)",
        "places.append(first + min(position, end - 1) - start)",
        "logprobs",
        "siblings",
    ),
    Fault(
        "what scores a prompt token comes from the cache",
        "engine.request:Request.max_cached_len",
        "return min(self.num_known - 1, scoring_from)",
        "return self.num_known - 1",
        "logprobs",
        "siblings",
    ),
    Fault(
        "siblings do not get the prompt's logprobs",
        f"{SCHEDULER}._fork_siblings",
        "sibling.scores.prompt = list(request.scores.prompt)",
        "pass",
        "logprobs",
        "siblings",
    ),
)
