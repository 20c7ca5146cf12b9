"""What the KV looks like now, for people to look at: rows with their ladders, the pool by owner, tree, sessions.

    rows     |  tree's  |  readable  |  in flight  |  reserved  |      each record's own lengths
    pools    free, pending, tree (evictable, protected), sessions, requests

Made in the engine's thread between two steps, of the objects themselves, and bounded: at most so many rows, nodes and
sessions, with what was left out. It holds lengths, counts and names, and never a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Any

from engine.core import EngineCore
from mem_cache.holding import Holding
from mem_cache.kv_info import ReqKvInfo
from session.session import Session

MAX_ROWS = 64
MAX_NODES = 192
MAX_SESSIONS = 64


def kv_picture(core: EngineCore) -> dict[str, Any]:
    """Plain values for JSON. Lengths are tokens; a name that ends in `pages` counts pages of the allocation size."""
    allocator, sessions = core.allocator, core.sessions
    geometry = allocator.geometry
    return {
        "page_size": geometry.page_size,
        "reuse_unit": core.scheduler.capabilities.resume_unit,
        "row_width": geometry.row_width,
        "num_running": len(core.scheduler.running),
        "num_waiting": len(core.scheduler.waiting),
        "rows": _rows(core),
        "pools": [_pool(core, name) for name in allocator.families.families],
        "tree": _tree(core),
        "sessions": _sessions(list(sessions.sessions()), len(sessions)),
    }


def _holders(core: EngineCore) -> Iterator[tuple[Holding, str | None]]:
    """Everything that holds a row, and the request that computes on it; running ones first."""
    seen: set[int] = set()
    for request in core.scheduler.running:
        seen.add(id(request.held))
        yield request.held, request.id
    for session in core.sessions.sessions():
        if session.slot.has_row and id(session.slot.held) not in seen:
            yield session.slot.held, None


def _rows(core: EngineCore) -> dict[str, Any]:
    shown = [_row(held.record, request_id) for held, request_id in islice(_holders(core), MAX_ROWS)]
    rows = core.allocator.rows
    return {
        "shown": shown,
        "num_left_out": rows.num_rows - rows.num_free - len(shown),
        "num_free": rows.num_free,
        "num_rows": rows.num_rows,
    }


def _row(record: ReqKvInfo, request_id: str | None) -> dict[str, Any]:
    """The ladder; `window`: what the window has let go, [from, to)."""
    dead_lo, cursor = record.swa_dead_lo(record.geometry.page_size), record.swa_evicted_seqlen
    return {
        "row": record.req_pool_idx,
        "owner": record.owner.kind.value,
        "owner_id": record.owner.id,
        "request": request_id,
        "protected": record.cache_protected_len,
        "committed": record.kv_committed_len,
        "scheduled": record.kv_scheduled_len,
        "allocated": record.kv_allocated_len,
        "window": [dead_lo, cursor] if cursor > dead_lo else None,
    }


def _pool(core: EngineCore, name: str) -> dict[str, Any]:
    """Pages of one family by owner; a derived family has no pool of its own."""
    allocator, tree = core.allocator, core.allocator.tree
    family = allocator.families.families[name]
    view: dict[str, Any] = {
        "family": name,
        "tokens_per_page": family.tokens_per_page,
        "window": family.window,
        "derived_from": family.derived_from,
    }
    pool = allocator.families.pools.get(name)
    if pool is None:
        return view
    is_in_tree = any(component.family == name for component in tree.components)
    owners = {
        "free": pool.num_free,
        "pending": pool.num_pending,
        "tree_evictable": tree.num_evictable if is_in_tree else 0,
        "tree_protected": tree.num_protected if is_in_tree else 0,
        "sessions": allocator.num_held_only_by(core.sessions, name),
    }
    owners["requests"] = pool.num_pages - sum(owners.values())
    return {**view, "num_pages": pool.num_pages, "pages": owners}


def _tree(core: EngineCore) -> dict[str, Any]:
    """Nodes, parents first; `parent` is a place in the list, None below the root."""
    tree = core.allocator.tree
    places: dict[int, int] = {}
    shown: list[dict[str, Any]] = []
    for node in islice(tree.nodes(), MAX_NODES):
        places[id(node)] = len(shown)
        shown.append(
            {
                "parent": places.get(id(node.parent)),
                "tokens": node.num_pages * tree.page_size,
                "locks": node.lock_count,
                "hits": node.hits,
            }
        )
    tokens = (tree.num_evictable + tree.num_protected) * tree.page_size
    left_out = tokens - sum(node["tokens"] for node in shown)
    return {"shown": shown, "tokens": tokens, "tokens_left_out": left_out}


def _sessions(sessions: list[Session], num_open: int) -> dict[str, Any]:
    """The latest used. Branching sessions hold nothing between requests; they are only counted."""
    latest = heapq.nlargest(MAX_SESSIONS, sessions, key=lambda session: session.last_used_s)
    return {
        "shown": [_session(session) for session in latest],
        "num_left_out": len(sessions) - len(latest),
        "num_branching": num_open - len(sessions),
    }


def _session(session: Session) -> dict[str, Any]:
    stats, turns, turn = session.stats, session.log.turns, session.state.turn
    last = turns[-1].request_id if turns else None
    return {
        "id": session.id,
        "owner_id": session.slot.record.owner.id,
        "state": session.state.phase.value,
        "request": turn.request_id if turn is not None else last,
        "turns": len(turns),
        "history": len(session.log),
        "held": session.held_tokens,
        "reused": stats.reused_tokens,
        "computed": stats.computed_tokens,
        "lost_to_alignment": stats.lost_to_alignment_tokens,
        "retractions": stats.num_retractions,
        "demotions": stats.num_demotions,
        "forks": stats.num_forks,
    }
