"""The prefix tree: which pages hold the KV of which token prefix.

`keys.py` says what a prefix is, `node.py` what an edge holds, `components.py` what a kind of KV adds to the walk,
`prefix_tree.py` is the walk itself, `policies.py` the order of eviction, `events.py` what others may hear of it.
"""
