"""The real scheduler, allocator, tree and core over the null device, in virtual time, from one seed.

`profiles.py` draws a world and its script of events from a seed, `play.py` plays a script and checks it, `world.py` is
what events act on, `checkers.py` what must hold, `oracle.py` what every answer must be, `shrink.py` makes a failure
small. How to use and extend it: docs/simulator.md.
"""
