"""Geometry of the compressed caches on Ascend."""

from __future__ import annotations

import pytest

from devices.npu.families import c128_pool_pages, compressed_families
from mem_cache.kv_info import RowGeometry


@pytest.mark.parametrize(("page_size", "c128_page_size"), [(128, 16), (256, 16), (128, 32)])
def test_the_families_fit_a_row(page_size: int, c128_page_size: int) -> None:
    families = compressed_families(page_size, 512, c128_page_size)
    geometry = RowGeometry(page_size, 8 * page_size, families)
    full, window, c4, c128 = families
    assert [geometry.is_coarse(family) for family in families] == [False, False, False, True]
    assert (full.tokens_per_page, window.tokens_per_page, c4.tokens_per_page) == (page_size,) * 3
    assert (c4.entries_per_page, c4.derived_from) == (page_size / 4, "full")
    assert (c128.entries_per_page, c128.tokens_per_page) == (c128_page_size, 128 * c128_page_size)
    assert c128_pool_pages(100, page_size, 3, c128_page_size) == -(-100 * page_size // (128 * c128_page_size)) + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 512), "page_size=64 must be a multiple of 128"),
        ((0, 512), "page_size=0"),
        ((128, 512, 8), "c128_page_size=8 must be a positive multiple of 16"),
        ((128, 512, 0), "c128_page_size=0"),
        ((384, 512, 16), "2048 tokens are not whole pages of 384"),
        ((128, 0), "window=0"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compressed_families(*arguments)
