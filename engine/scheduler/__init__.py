"""Who runs next and with how many tokens. Plain Python and numpy: no torch, no device, testable in microseconds.

`scheduler.py` is the loop's brain, `queue.py` the waiting order, `estimate.py` the guess of what running requests will
still need, `columns.py` writes a step's message, `launched.py` remembers it until its result is here.
"""
