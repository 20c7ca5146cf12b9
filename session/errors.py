"""Why a session refuses something. Nothing has changed when one of these is raised."""

from __future__ import annotations

from typing import Any


class SessionError(Exception):
    """A caller asked for what a session's rules forbid.

    Attributes:
        field: the argument that is wrong.
        value: what it was.
        rule: which rule, with the numbers and what to do instead.
        kind: short name of the class, for clients.
    """

    kind = "illegal"

    def __init__(self, field: str, value: Any, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field}={value!r}: {rule}")


class UnknownSession(SessionError):
    """No such session: it was never opened, was closed, or ran out of time."""

    kind = "unknown"


class SessionBusy(SessionError):
    """A turn of the session is under way."""

    kind = "busy"


class SessionFull(SessionError):
    """A limit on sessions or on their tokens is reached."""

    kind = "full"
