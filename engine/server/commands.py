"""What may be asked of the engine process beside generating: sessions, cache, pause, information."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.errors import BadRequest
from engine.server.kv_picture import kv_picture
from mem_cache.tree.keys import Namespace
from session.session import Session

if TYPE_CHECKING:
    from engine.server.engine_process import EngineLoop


class Commands:
    """What `Call` may name: its public methods."""

    def __init__(self, loop: EngineLoop) -> None:
        self.is_paused = False
        self._loop = loop
        self._core = loop.core

    def named(self, name: str) -> Callable[..., Any]:
        """Raises BadRequest when there is no such command."""
        command = None if name.startswith("_") else getattr(self, name, None)
        if not callable(command) or name == "named":
            raise BadRequest("call", name, "is no command of the engine")
        found: Callable[..., Any] = command
        return found

    def info(self) -> dict[str, Any]:
        """What does not change while the engine lives."""
        parts, core = self._loop.parts, self._core
        capabilities = core.scheduler.capabilities
        return {
            "model": parts.config.model.model,
            "architecture": parts.model_config.architecture,
            "device": parts.device.name,
            "description": parts.device.description,
            "context_length": core.context_len,
            "vocab_size": core.vocab_size,
            "allocation_page": core.allocator.geometry.page_size,
            "reuse_unit": capabilities.resume_unit,
            "pool_tokens": {
                name: pool.num_pages * core.allocator.geometry.page_size
                for name, pool in core.allocator.families.pools.items()
            },
            "num_rows": core.allocator.rows.num_rows,
        }

    def stats(self) -> Mapping[str, int]:
        return self._loop.stats()

    def kv_picture(self) -> dict[str, Any]:
        return kv_picture(self._core)

    def audit(self) -> list[str]:
        return [str(violation) for violation in self._core.audit()]

    def flush_cache(self) -> None:
        self._core.flush_cache()

    def pause(self, mode: str) -> None:
        """Stop stepping. "in_place" keeps rows, "retract" sends running requests back first, "abort" ends them."""
        if mode not in ("in_place", "retract", "abort"):
            raise BadRequest("mode", mode, "must be in_place, retract or abort")
        if mode == "abort":
            self._loop.abort(None)
        elif mode == "retract":
            for request in list(self._core.scheduler.running):
                self._core.scheduler.retract(request)
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def open_session(
        self,
        session_id: str | None,
        streaming: bool,
        capacity: int | None,
        timeout: float | None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        namespace = Namespace(extra_key, cache_salt)
        opened = self._core.sessions.open if streaming else self._core.sessions.open_branching
        return opened(session_id, capacity=capacity, timeout_s=timeout, namespace=namespace).id

    def close_session(self, session_id: str, abort: bool = False) -> bool:
        closed = self._core.close_session(session_id, abort=abort)
        self._loop.send_ends()
        return closed

    def session(self, session_id: str) -> dict[str, Any]:
        """State, held tokens and reuse of one session."""
        return _session_view(self._core.sessions.get(session_id))

    def history_length(self, session_id: str) -> int:
        """Tokens of a streaming session's history; 0 for a branching one, which starts a branch without a rid."""
        if self._core.sessions.get_branching(session_id) is not None:
            return 0
        return len(self._core.sessions.get(session_id).log)

    def fork_session(self, session_id: str, tokens: int | None, turns: int | None, new_id: str | None) -> str:
        length = self._length(session_id, tokens, turns)
        return self._core.sessions.fork(session_id, length=length, new_id=new_id).id

    def rewind_session(self, session_id: str, tokens: int | None, turns: int | None) -> None:
        length = self._length(session_id, tokens, turns)
        if length is None:
            raise BadRequest("rewind", None, "needs tokens or turns: how much of the history to keep")
        self._core.sessions.rewind(session_id, length)

    def hold_session(self, session_id: str, seconds: float, priority: float) -> None:
        self._core.sessions.hold(session_id, seconds, priority)

    def _length(self, session_id: str, tokens: int | None, turns: int | None) -> int | None:
        if turns is not None:
            return self._core.sessions.get(session_id).log.end_of_turn(turns)
        return tokens


def _session_view(session: Session) -> dict[str, Any]:
    record = session.slot.record
    return {
        "id": session.id,
        "state": session.state.phase.value,
        "turns": len(session.log.turns),
        "history_tokens": len(session.log),
        "capacity": session.capacity,
        "held_tokens": session.held_tokens,
        "row": {
            "index": record.req_pool_idx,
            "protected": record.cache_protected_len,
            "committed": record.kv_committed_len,
            "scheduled": record.kv_scheduled_len,
            "allocated": record.kv_allocated_len,
        },
        "stats": asdict(session.stats),
    }
