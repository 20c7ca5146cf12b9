"""Hardware: capabilities, physical pages, KV layouts, attention. Knows nothing of requests, trees or sessions.

Start at `base.py` (what may be asked of a device), then `pages.py` and `page_pool.py`; `registry.open_device` opens
one. `python -m devices` prints what opens here and what does not, and why.
"""
