"""Markup in a text that arrives in pieces: how much of its end may be the beginning of a marker."""

from __future__ import annotations

from collections.abc import Iterable


def num_held(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is the beginning, and not the whole, of a marker."""
    most = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), most, -1):
            if text.endswith(marker[:length]):
                most = length
                break
    return most
