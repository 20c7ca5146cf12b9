"""Deliberate faults, by subject, each with the checker that must catch it (`fault.py`)."""

from sim.faults import pages, sessions, steps, tree, windows
from sim.faults.fault import NUM_STEPS, Fault, seeds_to_catch

__all__ = ["FAULTS", "NUM_STEPS", "Fault", "seeds_to_catch"]

FAULTS = (*pages.FAULTS, *tree.FAULTS, *steps.FAULTS, *sessions.FAULTS, *windows.FAULTS)
