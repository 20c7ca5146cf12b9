"""What ran clean: of one run, and in a file of all runs of a soak, which may be stopped and continued at any time."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import BadRequest
from engine.sim.failures import SimFailure


@dataclass(slots=True)
class Totals:
    """What ran clean so far. `marks`: how often each rare thing happened."""

    num_seeds: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    marks: Counter[str] = field(default_factory=Counter)

    def line(self, seconds: float) -> str:
        rate = self.num_steps / max(seconds, 1e-9)
        return (
            f"{self.num_seeds} seeds, {self.num_steps} steps, {self.num_requests} requests, {self.num_tokens} tokens "
            f"clean in {seconds:.1f} s ({rate:.0f} steps/s)"
        )

    def since(self, before: Totals) -> Totals:
        """What was added to an earlier copy."""
        return Totals(
            self.num_seeds - before.num_seeds,
            self.num_steps - before.num_steps,
            self.num_requests - before.num_requests,
            self.num_tokens - before.num_tokens,
            self.marks - before.marks,
        )


@dataclass(slots=True)
class ProfileSoak:
    """Of one profile: seeds `[first_seed, next_seed)` were played, those of `failed` did not run clean."""

    first_seed: int
    next_seed: int
    num_seeds: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Soak:
    """All runs that share a file. `num_steps`: of a seed's script; another number is another soak."""

    num_steps: int
    profiles: dict[str, ProfileSoak] = field(default_factory=dict)
    marks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, file: Path | None, num_steps: int) -> Soak:
        """What a file says; a new soak without one. Raises BadRequest when it is of scripts of another length."""
        if file is None or not file.exists():
            return cls(num_steps)
        said: dict[str, Any] = json.loads(file.read_text())
        if said["num_steps"] != num_steps:
            rule = f"{file} adds up scripts of {said['num_steps']} steps; give the same, or another file"
            raise BadRequest("steps", num_steps, rule)
        profiles = {name: ProfileSoak(**one) for name, one in said["profiles"].items()}
        return cls(num_steps, profiles, Counter(said["marks"]))

    def next_seed(self, profile: str, first: int) -> int:
        """Where a profile goes on; `first` where nothing of it was played."""
        return self.profiles.setdefault(profile, ProfileSoak(first, first)).next_seed

    def count(self, profile: str, seed: int, added: Totals, seconds: float, failure: SimFailure | None) -> None:
        """A seed was played."""
        one = self.profiles[profile]
        one.next_seed = seed + 1
        one.num_seeds += added.num_seeds
        one.num_steps += added.num_steps
        one.num_requests += added.num_requests
        one.num_tokens += added.num_tokens
        one.seconds += seconds
        self.marks += added.marks
        if failure is not None:
            one.failed[str(seed)] = str(failure)

    def write(self, file: Path | None) -> None:
        """Put everything into the file, whole or not at all."""
        if file is None:
            return
        every = self.profiles.values()
        total = {
            "seeds": sum(one.num_seeds for one in every),
            "steps": sum(one.num_steps for one in every),
            "requests": sum(one.num_requests for one in every),
            "tokens": sum(one.num_tokens for one in every),
            "seconds": round(sum(one.seconds for one in every), 1),
            "failed": sum(len(one.failed) for one in every),
        }
        text = json.dumps({"total": total, **asdict(self), "marks": dict(sorted(self.marks.items()))}, indent=1)
        beside = file.with_suffix(".new")
        beside.write_text(text + "\n")
        beside.replace(file)
