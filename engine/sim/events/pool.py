"""Trouble with pages: an allocation that fails although there are pages, and a reader outside that takes its time."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sim.events.kinds import Kind
from engine.sim.world import LateFence, World


@dataclass(frozen=True, slots=True)
class FailAllocation:
    """The allocation after `after` more successful ones fails, once."""

    after: int

    def apply(self, world: World) -> str:
        world.families.fails_in = self.after
        world.marks["allocation fails"] += 1
        return f"fail+{self.after}"


@dataclass(frozen=True, slots=True)
class HoldFence:
    """Somebody outside reads the tree's pages for `num_steps` steps: what is released meanwhile must stay as it is."""

    num_steps: int

    def apply(self, world: World) -> str:
        tree = world.core.allocator.tree
        pages = {
            component.family: [
                p for node in tree.nodes() for p in component.owned(node.held[component.family]).tolist()
            ]
            for component in tree.components
        }
        content = {family: world.runner.kv[family].content(ids) for family, ids in pages.items()}
        fences = world.families.fence(f"reader of step {world.step}")
        lift_at = world.step + self.num_steps
        world.fences.append(LateFence(fences, lift_at, pages, content))
        world.marks["fence held"] += 1
        return f"fence+{self.num_steps}"


KINDS = (
    Kind("fail allocation", lambda swarm: FailAllocation(swarm.rng.randrange(4))),
    Kind("hold fence", lambda swarm: HoldFence(swarm.rng.randrange(1, 6))),
)
