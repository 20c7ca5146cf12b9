"""Faults of the prefix tree."""

from sim.faults.fault import TREE, Fault

FAULTS = (
    Fault("a split forgets the lock", f"{TREE}._split_at", "front.lock_count, front.hits", "_, front.hits", "audit"),
    Fault(
        "a split inside a page",
        f"{TREE}._split_at",
        "cut = at * self.page_bytes",
        "cut = at * self.page_bytes - 4",
        "audit",
    ),
    Fault(
        "unlock starts at the wrong node",
        f"{TREE}.unlock",
        "node = receipt.node",
        "node = receipt.node.parent or receipt.node",
        "audit",
    ),
    Fault("unlock forgets to queue the leaf", f"{TREE}.unlock", "self._enqueue(node)", "pass", "audit"),
    Fault(
        "a locked leaf is evicted",
        "mem_cache.tree.node:Node.is_evictable_leaf",
        "self.lock_count == 0 and ",
        "",
        "audit",
    ),
    Fault(
        "an evicted node gives all its pages back",
        f"{TREE}._trim",
        "component.drop(gone)",
        "component.drop(np.concatenate([leaf.held[component.family], gone]))",
        "audit",
    ),
    Fault("insert calls known pages new", f"{TREE}.insert", "key.num_pages), depth)", "key.num_pages), 0)", "audit"),
    Fault(
        "half a page matches",
        "mem_cache.tree.keys:PrefixKey.shared_pages",
        "return tokens * TOKEN_BYTES // self.page_bytes",
        "return -(-tokens * TOKEN_BYTES // self.page_bytes)",
        "hits",
        "mixed",
    ),
    Fault(
        "KV of old weights is found",
        "mem_cache.tree.keys:Namespace.__post_init__",
        '("weights", str(self.weights_version))',
        '("weights", "0")',
        "hits",
        "trouble",
    ),
    Fault(
        "salts share prefixes",
        "mem_cache.tree.keys:Namespace.__post_init__",
        '("salt", self.cache_salt)',
        '("salt", None)',
        "hits",
    ),
    Fault("a flush flushes nothing", f"{TREE}.flush", "self.evict(self.num_evictable)", "pass", "flush", "siblings"),
)
