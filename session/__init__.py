"""Conversations that outlive a request: their tokens, their turns, and the row they keep.

Start at `log.py`, `state.py` and `slot.py`; `session.py` moves the three together, `controller.py` holds all sessions.
Knows nothing of scheduling or text.
"""
