"""Page families of DeepSeek-V4's caches on Ascend: geometry as data, for the core's one allocator.

    full     one key a token                       page of P tokens
    window   one key a token, the last ones only   page of P tokens
    c4       one entry for 4 tokens                page of the full family with the same id, P / 4 entries
    c128     one entry for 128 tokens              its own page of `c128_page_size` entries, shared by count

A page is filled from its start by one row, so a token's slot and its position agree modulo P; that is why `c4` needs no
pages of its own. `mem_cache` allocates, shares and frees all of them alike and knows none of these names. No model of
this engine has such caches yet: the families are exercised by `tests/property/test_families.py`.
"""

from __future__ import annotations

from devices.page_pool import PageFamily
from devices.pages import is_whole_pages, page_count

GROUP_RATIO, BLOCK_RATIO = 4, 128
"""Tokens that an entry of the two compressed caches stands for."""

DEFAULT_C128_PAGE_SIZE = 16
C128_PAGE_STEP = 16
"""Entries of a 128:1 page: the attention kernels take multiples of 16."""


def compressed_families(
    page_size: int, window: int, c128_page_size: int = DEFAULT_C128_PAGE_SIZE
) -> tuple[PageFamily, ...]:
    """What a row of such a model has.

    Args:
        page_size: P, a multiple of 128, so that no page ends inside an entry.
        window: tokens that the windowed layers read.
        c128_page_size: entries of a 128:1 page.
    Raises:
        ValueError: one of them is not what the kernels take; says which.
    """
    if page_size < 1 or not is_whole_pages(page_size, BLOCK_RATIO):
        raise ValueError(f"page_size={page_size} must be a multiple of {BLOCK_RATIO}: an entry may not cross a page")
    if c128_page_size < 1 or not is_whole_pages(c128_page_size, C128_PAGE_STEP):
        raise ValueError(f"c128_page_size={c128_page_size} must be a positive multiple of {C128_PAGE_STEP}")
    group = BLOCK_RATIO * c128_page_size
    if not is_whole_pages(group, page_size):
        raise ValueError(f"c128_page_size={c128_page_size}: its {group} tokens are not whole pages of {page_size}")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    return (
        PageFamily("full", page_size),
        PageFamily("window", page_size, window=window),
        PageFamily("c4", page_size, derived_from="full", ratio=GROUP_RATIO),
        PageFamily("c128", group, ratio=BLOCK_RATIO),
    )


def c128_pool_pages(num_full_pages: int, page_size: int, num_rows: int, c128_page_size: int) -> int:
    """Pages of the 128:1 pool: enough for every full page, and one begun page for each row beside the tree's."""
    return page_count(num_full_pages * page_size, BLOCK_RATIO * c128_page_size) + num_rows
