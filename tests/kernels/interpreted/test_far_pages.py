"""Reads of pages whose bytes lie far behind 2 GiB: an index is int32, and a place in memory must not be.

The interpreter's int32 overflows as a GPU's does. No such page is there, so the read is refused, and the text of the
refusal says which address the kernel asked for. The writes are in `test_kv_cache.py` and `test_page_tables.py`.
"""

from collections.abc import Callable

import pytest
import torch

from devices.cuda.kernels import decode, extend, kv_cache, latent

from . import test_decode, test_extend, test_latent
from .paged import Paged, int32

FAR = (1 << 27) - 1
"""The last page of 16 tokens whose slots int32 can count."""

Read = tuple[torch.Tensor, Callable[[], object]]


def far(batch: Paged) -> Paged:
    batch.page_table[0, 0] = FAR
    return batch


def by_decode() -> Read:
    batch = far(Paged([5], [1]))
    return batch.k, lambda: test_decode.run(decode, batch, num_splits=1)


def by_extend() -> Read:
    batch = far(Paged([40], [40]))
    return batch.k, lambda: test_extend.run(extend, batch)


def by_latent_decode() -> Read:
    batch = far(test_latent.latent_batch([5], [1], 8))
    return batch.k, lambda: test_latent.run(latent, batch, 64)


def by_a_fork() -> Read:
    pages = torch.zeros(2, 2, 16, 32)
    return pages, lambda: kv_cache.copy_pages(pages, pages.clone(), int32([FAR]), int32([1]))


@pytest.mark.parametrize("read", [by_decode, by_extend, by_latent_decode, by_a_fork], ids=lambda read: read.__name__)
def test_a_page_far_behind_two_gib_is_not_folded_back_by_int32(read: Callable[[], Read]) -> None:
    pages, run = read()
    address = pages.data_ptr() + FAR * pages[0].nbytes
    with pytest.raises(Exception, match=f"load of 4 bytes at address {address},"):
        run()
