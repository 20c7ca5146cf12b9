"""What happens to the whole cache: a flush, and new weights."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import BadRequest
from engine.sim.events.kinds import Kind
from engine.sim.failures import BrokenPromise
from engine.sim.world import World


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty the tree; refused, and nothing changed, while requests run."""

    def apply(self, world: World) -> str:
        core, before = world.core, world.core.stats()
        was_busy = core.has_work
        try:
            core.flush_cache()
        except BadRequest as error:
            if not was_busy or core.stats() != before:
                raise BrokenPromise("flush", f"refused when busy is {was_busy}: {before} -> {core.stats()}") from error
            return "flush?"
        after = core.stats()
        if was_busy or after["tree_evictable_pages"] or after["tree_protected_pages"]:
            raise BrokenPromise("flush", f"flushed when busy is {was_busy}, and holds {after}")
        world.known.clear()
        world.families.tree.num_evicted_for_one.clear()
        world.marks["flush"] += 1
        return "flush"


@dataclass(frozen=True, slots=True)
class BumpWeights:
    """The weights change. What runs goes on with KV of both, so what it says from here on is not certain."""

    def apply(self, world: World) -> str:
        world.weights_version += 1
        version = world.core.bump_weights_version()
        if version != world.weights_version:
            raise BrokenPromise("bump", f"version {version}, should be {world.weights_version}")
        for kv in world.runner.kv.values():
            kv.weights_version = version
        for ticket in world.tickets:
            ticket.certain = min(ticket.certain, ticket.request.num_output)
        world.marks["bump"] += 1
        return f"bump{version}"


KINDS = (Kind("flush", lambda _: Flush()), Kind("bump", lambda _: BumpWeights()))
