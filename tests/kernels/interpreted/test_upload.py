"""A step's arrays go up in one copy: what is staged is there after `send`, no copy that still runs is overwritten."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from interpreted_gpu import InterpretedRuntime

from devices.cuda.upload import NUM_BUFFERS, Uploader


class SlowRuntime(InterpretedRuntime):
    """Its copies are marked; a mark that is waited for is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_marks = 0
        self.waited: list[int] = []

    def mark(self) -> Callable[[], None]:
        self.num_marks += 1
        number = self.num_marks
        return lambda: self.waited.append(number)


ARRAYS = [
    np.arange(5, dtype=np.int32),
    np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)[:, ::2],
    np.array([2**40, -1], dtype=np.int64),
    np.array([], dtype=np.int32),
    np.array([0.25, 1e-40], dtype=np.float32),
    np.array([0.1], dtype=np.float64),
]


def test_arrays_of_every_kind_arrive_in_one_copy_each_at_a_multiple_of_16_bytes() -> None:
    uploader = Uploader(InterpretedRuntime())
    staged = [uploader.stage(array) for array in ARRAYS]
    uploader.send()
    assert uploader.num_copies == 1
    for tensor, array in zip(staged, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


def test_nothing_is_copied_before_it_is_sent_and_nothing_when_nothing_was_staged() -> None:
    uploader = Uploader(InterpretedRuntime())
    uploader.send()
    target = torch.zeros(3, dtype=torch.int32)
    assert uploader.stage(np.arange(3, dtype=np.int32), into=target) is target
    assert (uploader.num_copies, target.tolist()) == (0, [0, 0, 0])
    uploader.send()
    assert (uploader.num_copies, target.tolist()) == (1, [0, 1, 2])
    uploader.send()
    assert uploader.num_copies == 1


def test_an_array_may_change_and_a_tensor_may_be_kept_once_it_was_staged() -> None:
    uploader = Uploader(InterpretedRuntime())
    array = np.arange(4, dtype=np.int32)
    kept = []
    for step in range(5):
        kept.append(uploader.stage(array))
        array += 10
        uploader.send()
        assert kept[step].tolist() == [10 * step + i for i in range(4)]
    assert [int(tensor[0]) for tensor in kept] == [0, 10, 20, 30, 40]


def test_a_buffer_is_written_again_only_when_its_own_copy_is_done() -> None:
    """Two buffers: the step that is planned does not wait for the one before it, which may not have begun."""
    runtime = SlowRuntime()
    uploader = Uploader(runtime)
    for step in range(1, 6):
        uploader.stage(np.arange(4, dtype=np.int32))
        assert runtime.waited == list(range(1, step - NUM_BUFFERS + 1))
        uploader.send()
    assert NUM_BUFFERS == 2


@pytest.mark.parametrize("size", [40, 300])
def test_a_step_too_large_for_the_buffer_arrives_whole_and_the_next_one_takes_one_copy(size: int) -> None:
    uploader = Uploader(InterpretedRuntime(), capacity=64)
    for expected in (2, 1):
        before = uploader.num_copies
        arrays = [np.arange(n, dtype=np.int32) for n in (10, size)]
        order: list[str] = []
        staged = [uploader.stage(array) for array in arrays]
        uploader.afterwards(lambda: order.append("first"))  # noqa: B023
        uploader.afterwards(lambda: order.append("second"))  # noqa: B023
        uploader.send()
        assert uploader.num_copies - before == expected
        assert order == ["first", "second"]
        for tensor, array in zip(staged, arrays, strict=True):
            assert torch.equal(tensor, torch.from_numpy(array))
