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
from engine.sim.world import World
from session.branching import SessionParams

NAME = "branches"


@dataclass(frozen=True, slots=True)
class Branch:
    """A request that continues the one of `after`; a root where that is None or was never taken."""

    key: int
    after: int | None
    tail: int
    own: int
    max_new: int

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
        context = [] if parent is None or self.after is None else world.texts.get(self.after, [])
        own = text_of(NUM_HEADS + self.tail)[: self.own]
        prompt, config = context + own, world.config
        is_impossible = (
            len(prompt) >= config.context_len or page_count(len(prompt), config.page_size) > config.num_pages
        )
        params = SamplingParams(max_new_tokens=self.max_new, temperature=0.0)
        try:
            new_ids = np.array(own, dtype=np.int32)
            requests = world.core.add_branch(SessionParams(id=NAME, rid=parent), new_ids, params)
        except BadRequest as error:
            if live is None and not is_impossible:
                raise BrokenPromise("branch", f"{len(prompt)} tokens were refused: {error}") from error
            world.marks["branch refused"] += 1
            return f"branch?{self.key}"
        if live is not None or is_impossible:
            raise BrokenPromise("branch", f"of {len(prompt)} tokens was taken; its parent runs: {live is not None}")
        world.branches[self.key] = requests[0].id
        world.expect(self.key, requests, prompt, None)
        world.marks["branch" if parent is None else "branch continues"] += 1
        return f"branch#{self.key}"


def draw_branch(swarm: Swarm) -> Branch:
    rng, key = swarm.rng, swarm.num_keys
    swarm.num_keys += 1
    swarm.branch_keys.append(key)
    return Branch(
        key=key,
        after=rng.choice(swarm.branch_keys[-8:]) if rng.random() < 0.8 else None,
        tail=rng.choice((key, rng.randrange(3))),
        own=rng.randrange(1, 2 * swarm.config.page_size + 2),
        max_new=rng.choice((1, 2, 3, 5, 8)),
    )
