"""What must hold of layers with a window: see `checkers.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devices.pages import ceil_page, floor_page
from engine.sim.failures import BrokenPromise, Leak
from engine.sim.world import World
from mem_cache.kv_info import ReqKvInfo

if TYPE_CHECKING:
    from engine.sim.checkers import Moment


class Windows:
    """A row gives back what lies before its window, by whole pages, and nobody waits for a page of the window's pool.

    The window that it keeps is that of the page border at or before its last token but one: it may be cut to there.
    """

    moments: tuple[Moment, ...] = ("launched", "collected")

    def look(self, world: World, moment: Moment) -> None:
        if world.config.window is None:
            return
        if world.allocator.num_scarcer:
            raise BrokenPromise("windows", "a plan lacked pages of the window, which are as many as rows can need")
        if moment == "collected":
            for request in world.core.scheduler.running:
                self._check(world, request.kv)
            for session in world.core.sessions.sessions():
                if session.slot.is_idle:
                    self._check(world, session.slot.record)
        world.marks["window evicted"] += world.families.num_evicted
        world.families.num_evicted = 0
        if world.config.resume_unit == "token":  # else a held row may have been cut at a page border
            world.marks["window shortens a hit"] = world.core.scheduler.misses["clamped"]

    def _check(self, world: World, record: ReqKvInfo) -> None:
        page_size, protected = world.config.page_size, record.cache_protected_len
        border = floor_page(max(0, record.kv_committed_len - 1), page_size)
        kept = max(protected, border - ceil_page(world.config.window or 0, page_size))
        if world.allocator.rows.pages("window", record.row, protected, kept).any():
            raise Leak("windows", f"pages before {kept} are read by nobody: {record}")
        world.marks["window slid"] += record.swa_evicted_seqlen > protected
