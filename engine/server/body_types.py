"""Lists and objects in bodies that are refused at the first item that is wrong.

pydantic describes every wrong item, for each form that a field may have: a million of them would hold the event loop
for half a minute.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast


class _FirstOnly(FailFast):
    """pydantic's own cannot be in a union."""

    __hash__ = object.__hash__


FIRST_ONLY = _FirstOnly()
MAX_ENTRIES = 4096


def _bounded(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_ENTRIES} are taken")
    return value


Ids = Annotated[list[int], FIRST_ONLY]
Texts = Annotated[list[str], FIRST_ONLY]
Objects = Annotated[list[dict[str, Any]], FIRST_ONLY]
Numbers = Annotated[dict[str, float], BeforeValidator(_bounded)]
Words = Annotated[dict[str, str], BeforeValidator(_bounded)]
