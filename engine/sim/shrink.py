"""Makes a failing script small, and writes it as a test.

Removal is delta debugging: halves, quarters, ... single events are left out as long as the same checker still fails.
Then each event is made plainer, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import Any

from engine.sim.events.kinds import Timed
from engine.sim.failures import SimFailure
from engine.sim.play import play
from engine.sim.profiles import Drawn

MAX_REPLAYS = 600
"""Replays that shrinking may take; what it has by then is small enough to read."""


@dataclass(slots=True)
class Shrinker:
    """Holds the smallest script so far that fails like the first.

    Attributes:
        failure: what it fails with.
    """

    best: Drawn
    failure: SimFailure
    replays_left: int = MAX_REPLAYS

    def run(self) -> None:
        """Make it smaller until nothing helps."""
        self._cut_behind_failure()
        size = 0
        while size != len(self.best.script) and self.replays_left:
            size = len(self.best.script)
            self._remove_events()
        self._make_events_plainer()
        self._remove_events()
        self._close_gaps()

    def _try(self, script: Sequence[Timed]) -> bool:
        """Keep a script when the same checker fails."""
        if not self.replays_left:
            return False
        self.replays_left -= 1
        candidate = replace(self.best, script=tuple(script))
        try:
            play(candidate.config, candidate.script, candidate.num_steps)
        except SimFailure as failure:
            if failure.checker == self.failure.checker:
                self.best, self.failure = candidate, failure
                self._cut_behind_failure()
                return True
        return False

    def _cut_behind_failure(self) -> None:
        """What comes after the step that failed cannot matter; a failure of the end needs no steps of its own."""
        last = min(self.failure.step + 1, self.best.num_steps)
        kept = tuple(timed for timed in self.best.script if timed.step < last)
        self.best = replace(self.best, script=kept, num_steps=last)

    def _remove_events(self) -> None:
        size = len(self.best.script)
        while size:
            start = 0
            while start < len(self.best.script):
                script = self.best.script
                if not self._try(script[:start] + script[start + size :]):
                    start += size
            size = size // 2

    def _make_events_plainer(self) -> None:
        for place in range(len(self.best.script)):
            for field in fields(self.best.script[place].event) if place < len(self.best.script) else ():  # type: ignore[arg-type]
                for value in _plainer(field, getattr(self.best.script[place].event, field.name)):
                    timed = self.best.script[place]
                    event: Any = replace(timed.event, **{field.name: value})  # type: ignore[type-var]
                    script = self.best.script
                    if self._try([*script[:place], replace(timed, event=event), *script[place + 1 :]]):
                        break
                if place >= len(self.best.script):
                    return

    def _close_gaps(self) -> None:
        """Pull events to earlier steps."""
        for place in range(len(self.best.script)):
            script = self.best.script
            if place >= len(script):
                return
            gap = script[place].step - (script[place - 1].step + 1 if place else 0)
            if gap > 0:
                self._try([*script[:place], *(replace(timed, step=timed.step - gap) for timed in script[place:])])


def _plainer(field: Field[Any], value: Any) -> Iterator[Any]:
    """Values that are easier to read, the plainest first."""
    if field.default is not MISSING and value != field.default:
        yield field.default
    elif is_dataclass(value) and not isinstance(value, type):
        for inner in fields(value):
            for plain in _plainer(inner, getattr(value, inner.name)):
                yield replace(value, **{inner.name: plain})
    if isinstance(value, int) and not isinstance(value, bool) and field.name != "key" and value > 1:
        yield from (1, value // 2, value - 1)


def shrink(drawn: Drawn, failure: SimFailure) -> Shrinker:
    """The shortest script found that fails the same checker; `drawn` must fail with `failure`."""
    shrinker = Shrinker(drawn, failure)
    shrinker.run()
    return shrinker


def as_test(drawn: Drawn, failure: SimFailure, name: str) -> str:
    """The script as a file for pytest."""
    names: dict[str, set[str]] = {
        "engine.sim.events.kinds": {"Timed"},
        "engine.sim.play": {"play"},
        "engine.sim.world": {"WorldConfig"},
    }
    for timed in drawn.script:
        for value in (timed.event, *(getattr(timed.event, field.name) for field in fields(timed.event))):  # type: ignore[arg-type]
            if is_dataclass(value):
                names.setdefault(type(value).__module__, set()).add(type(value).__qualname__)
    imports = "\n".join(f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names))
    events = "".join(f"        {timed!r},\n" for timed in drawn.script)
    return (
        f'"""Failed with {type(failure).__name__} in step {failure.step}: {failure}"""\n\n{imports}\n\n\n'
        f"def test_{name}() -> None:\n"
        f"    config = {drawn.config!r}\n"
        f"    script = [\n{events}    ]\n"
        f"    play(config, script, {drawn.num_steps})\n"
    )
