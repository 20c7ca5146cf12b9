"""What can go wrong in a simulation. Each class has its own exit code, so that a script can tell them apart."""

from __future__ import annotations

from typing import ClassVar


class SimFailure(Exception):
    """A checker found something.

    Attributes:
        checker: which one; a shrunk script must fail the same one.
        step: in which step, from 0.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, checker: str, text: str) -> None:
        self.checker = checker
        self.step = -1
        super().__init__(f"{checker}: {text}")


class Crash(SimFailure):
    """The engine raised something."""

    exit_code = 127


class NoProgress(SimFailure):
    """A request that could run does not."""

    exit_code = 128


class WrongToken(SimFailure):
    """A request said something else than it would have alone, or ended otherwise."""

    exit_code = 129


class Leak(SimFailure):
    """The books are wrong: a page, row or lock is lost, or has owners that do not say so."""

    exit_code = 130


class Unfair(SimFailure):
    """A request went before another that had the better claim."""

    exit_code = 131


class BrokenPromise(SimFailure):
    """An event did not have the result that it must have."""

    exit_code = 132
