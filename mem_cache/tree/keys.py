"""What a cached prefix is: a namespace (everything but tokens that changes K and V) and whole pages of token ids.

Keys are compared, never hashed away: an edge is found by the bytes of its first page and verified by the bytes of the
rest. Every part of a namespace carries its own tag, so a salt "x" and an extra key "x" can not be taken for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from devices.pages import IntArray, floor_page

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides the tokens decides the KV of a prefix; two namespaces never share a page.

    Attributes:
        extra_key: free text of the caller (an adapter, a tenant).
        cache_salt: a secret that keeps one client's prefixes from another.
        weights_version: bumped whenever the weights change.
    """

    extra_key: str | None = None
    cache_salt: str | None = None
    weights_version: int = 0
    encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = (("extra", self.extra_key), ("salt", self.cache_salt), ("weights", str(self.weights_version)))
        encoded = b"".join(_tagged(tag, value) for tag, value in parts if value is not None)
        object.__setattr__(self, "encoded", encoded)


def _tagged(tag: str, value: str) -> bytes:
    """Unambiguous whatever the value holds: both parts are preceded by their length."""
    parts = (tag.encode(), value.encode("utf-8", "surrogatepass"))
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class PrefixKey:
    """Whole pages of token ids in a namespace.

    Attributes:
        raw: the token ids as little-endian int32 bytes, `num_pages` pages of `page_bytes`.
    """

    __slots__ = ("namespace", "num_pages", "page_bytes", "page_size", "raw")

    def __init__(self, tokens: IntArray, page_size: int, namespace: Namespace) -> None:
        """Tokens behind the last whole page do not belong to the key. `tokens`: int32 [n]."""
        length = floor_page(len(tokens), page_size)
        self.namespace = namespace
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.raw = np.ascontiguousarray(tokens[:length], dtype="<i4").tobytes()
        self.num_pages = len(self.raw) // self.page_bytes

    def edge(self, page: int) -> bytes:
        """Name of the edge that starts at `page`; a first edge carries the namespace."""
        first = self.raw[page * self.page_bytes : (page + 1) * self.page_bytes]
        return self.namespace.encoded + first if page == 0 else first

    def shared_pages(self, page: int, edge: bytes) -> int:
        """How many whole pages of `edge` equal this key from `page` on."""
        start = page * self.page_bytes
        if self.raw.startswith(edge, start):
            return len(edge) // self.page_bytes
        n = min(len(edge), len(self.raw) - start)
        ours = np.frombuffer(self.raw, dtype="<i4", count=n // TOKEN_BYTES, offset=start)
        differs = ours != np.frombuffer(edge, dtype="<i4", count=n // TOKEN_BYTES)
        tokens = int(differs.argmax()) if differs.any() else n // TOKEN_BYTES
        return tokens * TOKEN_BYTES // self.page_bytes
