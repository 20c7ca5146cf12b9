"""Who owns which page: the record, rows, allocations, the one release, the prefix tree, the audit.

Start at `kv_info.py` (the record and its ladder), then `allocation.py` (four ways in, one way out). Knows nothing of
scheduling, HTTP or what a session is; `pools.py` alone imports torch.
"""
