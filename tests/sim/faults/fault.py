"""A deliberate fault: one line of the engine changed, with the checker that must catch it.

A fault is an edit of a function's own source: the line must be there, once, so a fault whose line has gone says so
instead of passing. The edited function replaces the real one for one test.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from engine.sim.profiles import draw
from engine.sim.run import run_seed
from engine.sim.soak import Totals

ALLOCATOR = "mem_cache.allocation:KvAllocator"
TREE = "mem_cache.tree.prefix_tree:PrefixTree"
POOL = "devices.page_pool:PagePool"
SCHEDULER = "engine.scheduler.scheduler:Scheduler"
QUEUE = "engine.scheduler.queue:WaitingQueue"
CORE = "engine.core:EngineCore"

NUM_STEPS = 150
"""Of the scripts in which a fault is looked for."""


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        name: what is wrong, as a bug report would say it.
        target: "module:function" or "module:Class.method".
        old, new: the line's text and what stands there instead.
        checker: who must catch it.
        profile: of the worlds in which it shows soonest.
        max_seeds: seeds within which it must be caught.
    """

    name: str
    target: str
    old: str
    new: str
    checker: str
    profile: str = "tiny"
    max_seeds: int = 80

    def inject(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module_name, _, path = self.target.partition(":")
        owner: Any = import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        plain = inspect.getattr_static(owner, name)
        function = plain.fget if isinstance(plain, property) else plain
        edited = self._edited(function)
        monkeypatch.setattr(owner, name, property(edited) if isinstance(plain, property) else edited)

    def _edited(self, function: Any) -> Any:
        source = textwrap.dedent(inspect.getsource(function)).replace("@property\n", "")
        assert source.count(self.old) == 1, f"{self.target} has {source.count(self.old)} times: {self.old}"
        flags = annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<{self.name}>", "exec", flags, dont_inherit=True)
        scope: dict[str, Any] = {}
        exec(code, function.__globals__, scope)
        return scope[function.__name__]


def seeds_to_catch(fault: Fault, first_seed: int = 0, others: set[str] | None = None) -> int | None:
    """Seeds, from `first_seed` on, until the injected fault is caught by its own checker; None when it is not.

    Args:
        others: takes the names of checkers that caught it before.
    """
    for seed in range(first_seed, first_seed + fault.max_seeds):
        failure = run_seed(draw(seed, NUM_STEPS, fault.profile), Totals())
        if failure is not None and failure.checker == fault.checker:
            return seed - first_seed + 1
        if failure is not None and others is not None:
            others.add(failure.checker)
    return None
