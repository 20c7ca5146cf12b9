"""A branching session: each request continues any finished one, and finds in the tree what is left of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devices.pages import page_count
from engine.errors import BadRequest
from engine.sampling.params import SamplingParams
from engine.sim.events.kinds import Swarm
from engine.sim.events.requests import NUM_HEADS, text_of
from engine.sim.failures import BrokenPromise
from engine.sim.world import BranchNode, Ticket, World
from session.branching import SessionParams

NAME = "branches"


@dataclass(frozen=True, slots=True)
class Branch:
    """A request that continues the one of `after`; a root where that is None or was never taken.

    Attributes:
        offset, replace, drop: `offset`, `replace` and `drop_previous_output` of SGLang's session parameters.
    """

    key: int
    after: int | None
    tail: int
    own: int
    max_new: int
    offset: int | None = None
    replace: bool = False
    drop: bool = False

    def apply(self, world: World) -> str:
        if len(world.tickets) >= world.config.max_live or self.key in world.texts or world.find(self.key):
            return f"full#{self.key}"
        sessions = world.core.sessions
        if sessions.get_branching(NAME) is None:
            sessions.open_branching(NAME)
        parent = None if self.after is None else world.branches.get(self.after)
        live = None if parent is None or self.after is None else world.find(self.after)
        if live is not None and live.request.finish is not None:
            return f"branch?{self.key}"
        own = text_of(NUM_HEADS + self.tail)[: self.own]
        prompt = self._context(world, parent, live) + own
        must_refuse = self._must_refuse(world, parent, live, len(prompt))
        rid = None if parent is None else parent.request_id
        asked = SessionParams(
            id=NAME, rid=rid, offset=self.offset, replace=self.replace, drop_previous_output=self.drop
        )
        params = SamplingParams(max_new_tokens=self.max_new, temperature=0.0)
        try:
            requests = world.core.add_branch(asked, np.array(own, dtype=np.int32), params)
        except BadRequest as error:
            if not must_refuse:
                raise BrokenPromise("branch", f"{len(prompt)} tokens were refused: {error}") from error
            world.marks["branch refused"] += 1
            return f"branch?{self.key}"
        if must_refuse:
            raise BrokenPromise("branch", f"of {len(prompt)} tokens was taken, and {must_refuse}")
        if self.replace:
            self._forget(world, live)
        world.branches[self.key] = BranchNode(requests[0].id, len(prompt), self.after if parent else None)
        world.expect(self.key, requests, prompt, None)
        world.marks["branch" if parent is None else "branch continues"] += 1
        world.marks["branch cut"] += bool(self.offset) and parent is not None
        return f"branch#{self.key}"

    def _context(self, world: World, parent: BranchNode | None, live: Ticket | None) -> list[int]:
        """What SGLang's parameters say that the request sees before its own tokens."""
        if parent is None or self.after is None:
            return []
        context = world.texts.get(self.after, []) if live is None else live.tokens
        if self.drop:
            context = context[: parent.prompt_len]
        return context[: self.offset] if self.offset else list(context)

    def _must_refuse(self, world: World, parent: BranchNode | None, live: Ticket | None, length: int) -> str:
        """Why it cannot be taken; empty when it can."""
        if parent is not None and parent.is_forgotten:
            return "its parent was forgotten"
        if live is not None and not self.replace:
            return "its parent runs"
        if length >= world.config.context_len:
            return "it is longer than the context"
        return "it never fits" if page_count(length, world.config.page_size) > world.config.num_pages else ""

    def _forget(self, world: World, live: Ticket | None) -> None:
        """`replace` ends what is replaced if it runs, and forgets what continued it; without a parent, everything."""
        if live is not None:
            live.is_abort_asked = True
            world.marks["branch replaces a running one"] += 1
        is_root = self.after not in world.branches
        gone = set() if is_root else {self.after}
        for key, node in world.branches.items():  # in the order of their making: parents first
            if is_root or node.after in gone:
                node.is_forgotten = True
                gone.add(key)
        world.marks["branch forgets"] += len(gone) > 1


def draw_branch(swarm: Swarm) -> Branch:
    rng, key, page = swarm.rng, swarm.num_keys, swarm.config.page_size
    swarm.num_keys += 1
    swarm.branch_keys.append(key)
    return Branch(
        key=key,
        after=rng.choice(swarm.branch_keys[-8:]) if rng.random() < 0.8 else None,
        tail=rng.choice((key, rng.randrange(3))),
        own=rng.randrange(1, 2 * page + 2),
        max_new=rng.choice((1, 2, 3, 5, 8)),
        offset=rng.randrange(-page, 3 * page) if rng.random() < 0.25 else None,
        replace=rng.random() < 0.15,
        drop=rng.random() < 0.15,
    )
