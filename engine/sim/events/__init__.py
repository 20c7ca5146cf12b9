"""Everything that can happen to the engine. A file here is a tuple of kinds; this registry joins the files.

A kind draws events; an event is a frozen value that says everything, so that its `repr` in a script replays it. It
names requests by the key of their arrival, never by their place: a script stays playable when parts are taken out.
"""

from __future__ import annotations

from engine.sim.events import cache, pool, requests, sessions
from engine.sim.events.kinds import Event, Kind, Swarm, Timed

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*requests.KINDS, *pool.KINDS, *cache.KINDS, *sessions.KINDS)}

__all__ = ["KINDS", "Event", "Kind", "Swarm", "Timed"]
