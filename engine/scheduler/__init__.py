"""Who runs next and with how many tokens. Plain Python and numpy: no torch, no device, testable in microseconds.

`scheduler.py` is the loop's brain, `queue.py` the waiting order, `estimate.py` the guess of what running requests will
still need.
"""
