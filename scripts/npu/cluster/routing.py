"""Which replica a request goes to: the one that has its conversation, else the one that has its beginning.

A session lives in one replica, so its requests have no choice. Other requests are hashed by the beginning of their
prompt and each replica is ranked for that hash (rendezvous hashing): requests with one beginning meet in one replica's
prefix cache, and when a replica comes or goes only its own share moves. A replica that has much more to do than the
mean is passed over, because a full queue costs more than a prefix. Decisions only; `router` does the sending.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

MAX_SESSIONS = 65536


@dataclass
class Backend:
    """One replica as the router sees it."""

    url: str
    is_ready: bool = False
    num_in_flight: int = 0


@dataclass
class Sessions:
    """Where sessions live, the least recently used forgotten first; the router asks around for those."""

    max_sessions: int = MAX_SESSIONS
    _homes: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def home_of(self, session: str) -> str | None:
        if (url := self._homes.get(session)) is not None:
            self._homes.move_to_end(session)
        return url

    def remember(self, session: str, url: str) -> None:
        self._homes[session] = url
        self._homes.move_to_end(session)
        while len(self._homes) > self.max_sessions:
            self._homes.popitem(last=False)

    def forget(self, session: str) -> None:
        self._homes.pop(session, None)


def session_of(path: str, body: Any) -> str | None:
    """The session that a request is about, or None."""
    parts = path.strip("/").split("/")
    if parts[0] == "sessions" and len(parts) > 1:
        return unquote(parts[1])
    if not isinstance(body, dict):
        return None
    for found in (
        body.get("session_id"),
        _inside(body, "session_params", "id"),
        _inside(body, "session_params", "session_id"),
    ):
        if isinstance(found, str) and found:
            return found
    return None


def _inside(body: dict[str, Any], outer: str, inner: str) -> Any:
    value = body.get(outer)
    return value.get(inner) if isinstance(value, dict) else None


def prefix_of(body: Any, prefix_chars: int) -> str:
    """The beginning of a request's prompt as text, with its cache salt; "" when it has none."""
    if not isinstance(body, dict):
        return ""
    for name in ("messages", "prompt", "text", "input_ids"):
        if (prompt := body.get(name)) is not None:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            return f"{body.get('cache_salt', '')}\0{text[:prefix_chars]}"
    return ""


def ranking(key: str, urls: Sequence[str]) -> list[str]:
    """The replicas in the order in which this key prefers them."""
    return sorted(urls, key=lambda url: hashlib.blake2b(f"{key}\0{url}".encode(), digest_size=8).digest(), reverse=True)


def choose(key: str, backends: Sequence[Backend], max_load_factor: float) -> Backend | None:
    """The replica for a request without a session; None when none is ready.

    Args:
        key: the prompt's beginning; "" takes the least loaded one.
        max_load_factor: a replica may have this times the mean load, and one request more, before it is passed over.
    """
    ready = {backend.url: backend for backend in backends if backend.is_ready}
    if not ready:
        return None
    if not key:
        return min(ready.values(), key=lambda backend: backend.num_in_flight)
    limit = max_load_factor * sum(one.num_in_flight for one in ready.values()) / len(ready) + 1
    preferred = [ready[url] for url in ranking(key, list(ready))]
    return next((one for one in preferred if one.num_in_flight < limit), preferred[0])
