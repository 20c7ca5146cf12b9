"""Typed errors of the engine: each says what was wrong, with its number, and what to change.

`BadRequest` belongs to one request: the edge (Python call, CLI, HTTP 4xx) reports it and nothing else is touched.
`ConfigError` and `ModelLoadError` stop the start-up. Ladder, page and device errors live beside what they guard
(`mem_cache.kv_info`, `devices.page_pool`, `devices.registry`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from session.errors import SessionError


class RungError(Exception):
    """Base of the errors that a user can act on."""


class BadRequest(RungError, ValueError):
    """One request is wrong; the engine and every other request live on.

    Attributes:
        field: name of the offending request field, as the user wrote it.
        value: what was given.
        rule: what is allowed, and what to change.
    """

    def __init__(self, field: str, value: Any, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field}={_shorten(value)}: {rule}")


class SessionRefused(BadRequest):
    """A session's rules forbid the request; see `session.errors`.

    Attributes:
        kind: "unknown", "busy", "full" or "illegal".
    """

    def __init__(self, error: SessionError) -> None:
        super().__init__(error.field, error.value, error.rule)
        self.kind = error.kind


@contextmanager
def session_rules() -> Iterator[None]:
    """What a session refuses leaves the engine as `SessionRefused`."""
    try:
        yield
    except SessionError as error:
        raise SessionRefused(error) from error


class ConfigError(RungError, ValueError):
    """An engine argument is unknown, out of range or in conflict with another."""


class ModelLoadError(RungError):
    """A model's files are missing, damaged, incomplete or of an unknown kind."""


def _shorten(value: Any, limit: int = 80) -> str:
    """`repr`, cut in the middle, safe for any object (an error path must not raise)."""
    try:
        text = ascii(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-15:]}"
