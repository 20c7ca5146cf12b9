"""A large result's memory is handed out again, and never while somebody still looks at it."""

from __future__ import annotations

import pytest
import torch

from devices.cpu.kernels.memory import KEPT_BYTES, ResultMemory

ROWS = 256


def size_of(num_bytes: int, dtype: torch.dtype) -> int:
    return num_bytes // (ROWS * dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_result_lies_where_the_last_one_lay(dtype: torch.dtype) -> None:
    memory, size = ResultMemory(), size_of(KEPT_BYTES, dtype)
    first = memory.empty(ROWS, size, dtype)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((ROWS, size), dtype, True)
    place = first.data_ptr()
    assert place % 64 == 0
    del first
    assert memory.empty(ROWS, size, dtype).data_ptr() == place


def test_a_result_that_any_view_still_shows_is_not_overwritten() -> None:
    memory, size = ResultMemory(), size_of(KEPT_BYTES, torch.float32)
    row = memory.empty(ROWS, size, torch.float32).fill_(1)[:, 3:].T[5]
    other = memory.empty(ROWS, size, torch.float32).fill_(2)
    third = memory.empty(ROWS, size, torch.float32).fill_(3)
    assert (row == 1).all()
    assert (other == 2).all()
    assert (third == 3).all()


def test_a_larger_result_gets_more_memory_and_a_small_one_none_of_it() -> None:
    memory, size = ResultMemory(), size_of(KEPT_BYTES, torch.float32)
    memory.empty(ROWS, size, torch.float32).fill_(0)
    larger = memory.empty(ROWS, 2 * size, torch.float32)
    larger.fill_(1)
    small = memory.empty(ROWS, 4, torch.float32)
    assert small.shape == (ROWS, 4)
    small.fill_(2)
    assert (larger == 1).all()
