"""Plays a script on a world: events, both halves of each step, and every checker after each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.sim.checkers import Checker, Moment, checkers
from engine.sim.events.kinds import Event, Timed
from engine.sim.failures import Crash, NoProgress, SimFailure
from engine.sim.world import STEP_S, Ticket, World, WorldConfig, build

DRAIN_STEPS = 20_000
"""Steps after the script in which everything must have ended."""

Sink = Callable[[str], None]
"""Takes one line of the trace."""

HEADING = "  step run wait free pend tree lock rows  out end  events"


@dataclass(frozen=True, slots=True)
class Report:
    """A script that ran clean. `num_steps`: launched ones; `marks`: how often each rare thing happened."""

    num_steps: int
    num_tokens: int
    num_requests: int
    marks: Counter[str]


@dataclass(slots=True)
class Player:
    """One run of one script."""

    world: World
    sink: Sink | None
    looks: dict[Moment, list[Checker]]

    def step(self, before: Sequence[Event], in_flight: Sequence[Event]) -> None:
        world = self.world
        world.families.has_failed = False
        words = [event.apply(world) for event in before]
        self._look("start")
        num_in_flight = world.core.num_in_flight
        world.changed = world.core.launch()
        world.has_launched = world.core.num_in_flight > num_in_flight
        world.is_ahead = num_in_flight > 0
        world.num_launched += world.has_launched
        self._look("launched")
        self._settle()
        words += ["~" + event.apply(world) for event in in_flight]
        world.changed = world.core.collect() if world.core.is_due else []
        self._look("collected")
        self._settle()
        self._lift()
        if self.sink is not None:
            self.sink(self._line(words))
        world.clock.now_s += STEP_S
        world.step += 1

    def _look(self, moment: Moment) -> None:
        for checker in self.looks[moment]:
            checker.look(self.world, moment)

    def _settle(self) -> None:
        """Forget what ended; its text stays for prompts that continue it."""
        world = self.world
        ended = [ticket for ticket in world.tickets if ticket.request.finish is not None]
        if not ended:
            return
        world.tickets = [ticket for ticket in world.tickets if ticket.request.finish is None]
        for ticket in ended:
            world.num_ended += 1 + ticket.request.num_output
            world.num_tokens += ticket.request.num_output
            world.marks["retracted"] += ticket.request.num_retractions > 0
            if ticket.session is not None:
                self._end_turn(ticket.session, ticket)
            if ticket.index == 0:
                world.texts[ticket.key] = ticket.tokens

    def _end_turn(self, session: int, ticket: Ticket) -> None:
        """A turn that ended by itself is history; one that did not never was."""
        world, finish = self.world, ticket.request.finish
        if session in world.closing or session not in world.histories:
            world.closing.discard(session)
            world.histories.pop(session, None)
        elif finish is not None and finish.reason in ("stop", "length"):
            world.histories[session] = ticket.tokens
        world.last_used_s[session] = world.clock.now_s

    def _lift(self, *, everything: bool = False) -> None:
        world = self.world
        due = [late for late in world.fences if everything or late.lift_at <= world.step]
        for late in due:
            world.fences.remove(late)
            world.families.lift(late.fences)

    def drain(self) -> None:
        """Nothing is asked any more, and nothing is in the way: everything ends, and nothing is left."""
        world, limit = self.world, self.world.step + DRAIN_STEPS
        self._lift(everything=True)
        world.families.fails_in = None
        while world.core.has_work:
            if world.step >= limit:
                raise NoProgress("progress", f"{len(world.tickets)} requests do not end in {DRAIN_STEPS} steps")
            self.step((), ())
        for session in world.core.sessions.sessions():
            session.close()
        self._look("idle")

    def _line(self, words: list[str]) -> str:
        world, stats = self.world, self.world.core.stats()
        return (
            f"{world.step:6d} {stats['num_running']:3d} {stats['num_waiting']:4d} {stats['free_pages']:4d} "
            f"{stats['pending_pages']:4d} {stats['tree_evictable_pages']:4d} {stats['tree_protected_pages']:4d} "
            f"{stats['num_rows'] - stats['free_rows']:4d} {world.num_tokens:4d} {world.num_ended:3d}  {' '.join(words)}"
        ).rstrip()


def play(config: WorldConfig, script: Sequence[Timed], num_steps: int, sink: Sink | None = None) -> Report:
    """Run a script to its end.

    Args:
        num_steps: steps in which events may happen; then everything must end.
        sink: takes the trace, one line a step.
    Raises:
        SimFailure: the first thing that a checker found, with its step.
    """
    due: dict[tuple[int, bool], list[Event]] = defaultdict(list)
    for timed in script:
        due[timed.step, timed.in_flight].append(timed.event)
    looks: dict[Moment, list[Checker]] = {"start": [], "launched": [], "collected": [], "idle": []}
    for checker in checkers(config):
        for moment in checker.moments:
            looks[moment].append(checker)
    player = Player(build(config), sink, looks)
    world = player.world
    try:
        for step in range(num_steps):
            player.step(due[step, False], due[step, True])
        player.drain()
    except SimFailure as failure:
        failure.step = world.step
        raise
    except Exception as error:
        crash = Crash("crash", f"{type(error).__name__}: {error}")
        crash.step = world.step
        raise crash from error
    return Report(world.num_launched, world.num_tokens, world.marks["arrive"], world.marks)
