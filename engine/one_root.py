"""Rung's packages have everyday names; this makes sure that the four which were imported are Rung's own four."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

PACKAGES = ("devices", "mem_cache", "session", "engine")


def check_one_root() -> None:
    """Raises ImportError when another distribution's `devices`, `mem_cache` or `session` shadows ours."""
    root = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        file = import_module(name).__file__
        found = Path(file).resolve().parents[1] if file else None
        if found != root:
            raise ImportError(
                f"package {name!r} was imported from {found}, but Rung's own is in {root}: another package named "
                f"{name!r} shadows it; uninstall that one or run in an environment of Rung's own"
            )
