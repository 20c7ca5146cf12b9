"""Checked reads of a model file's keys: what is absent, nonsense or out of range is refused by its key."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.errors import ModelLoadError

_MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked reads from `values`; null means absent. `origin` says in errors which file the key is from."""

    values: Mapping[str, Any]
    origin: str

    def refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        shown = " is missing" if value is None else f"={reprlib.repr(value)}"
        raise ModelLoadError(f"{self.origin}: {key}{shown}: needs {needed}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _MAX_INT:
            self.refuse(key, value, f"a whole number from {minimum} to {_MAX_INT}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number above 0 and not below `minimum`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if value is None or not _is_positive(value):
            self.refuse(key, value, "a finite number above 0")
        if value < minimum:
            self.refuse(key, value, f"at least {minimum}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Exactly `count` finite numbers above 0."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_positive, value)):
            self.refuse(key, value, f"{count} finite numbers above 0")
        return tuple(map(float, value))

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.refuse(key, value, "a text")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value


def decimal(value: float) -> float:
    """The decimal that a float32 was written from (1e-05, not 9.99999974e-06): it holds 7 significant digits."""
    return float(f"{value:.7g}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
