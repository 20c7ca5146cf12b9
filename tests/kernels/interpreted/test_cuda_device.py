"""The CUDA device as a whole, with interpreted kernels: attention over any step, graphs, the engine and its matrix."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from device.test_attention import Requests
from interpreted_gpu import InterpretedRuntime

from devices.base import AttentionMetadata, NoRoomForGraph
from devices.cuda.arguments import BadKernelArgument
from devices.cuda.attention import TritonAttention, Work
from devices.cuda.device import CudaDevice, TooManySlots
from devices.doctor import TOLERANCES, _self_test_error
from devices.page_pool import PADDING_PAGE

HEAD_DIM = 16


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(InterpretedRuntime())


# Attention through the device.


@pytest.mark.parametrize(("page_size", "window"), [(16, None), (64, None), (128, 20)])
def test_a_mixed_step_of_prefill_chunk_verify_and_decode(
    device: CudaDevice, page_size: int, window: int | None
) -> None:
    """What nobody wrote, the padding page included, is NaN: B024."""
    requests = Requests(device, page_size, [12, 40, 1, page_size + 3], heads=(6, 2), window=window)
    requests.step({3: page_size + 2, 1: 20})
    requests.step({0: 12, 1: 15, 3: 1, 2: 1})
    requests.step({1: 5})
    assert requests.largest_error() < 1e-5
    assert torch.isnan(requests.layer.k[PADDING_PAGE]).all()


def test_one_copy_brings_a_plan_to_the_device(device: CudaDevice) -> None:
    """Tiles of queries are in it once the dtype of the queries was seen."""
    requests = Requests(device, 16, [30, 30])
    requests.step({0: 10, 1: 12})
    copies = device._uploader.num_copies
    for news in ({0: 10, 1: 9}, {0: 1, 1: 9}, {0: 1}):
        requests.step(news)
        copies += 1
        assert device._uploader.num_copies == copies
    assert requests.largest_error() < 1e-5


def test_a_page_is_copied_in_every_layer_and_no_other_is_touched(device: CudaDevice) -> None:
    layers = [device.kv_layer(index, 4, 16, 2, HEAD_DIM, torch.bfloat16) for index in range(2)]
    for layer in layers:
        layer.k.normal_()
        layer.v.normal_()
    before = [(layer.k.clone(), layer.v.clone()) for layer in layers]
    device.copy_page(layers, 3, 1)
    device.send()
    for layer, (k, v) in zip(layers, before, strict=True):
        assert torch.equal(layer.k, k[[0, 3, 2, 3]])
        assert torch.equal(layer.v, v[[0, 3, 2, 3]])


def decode_step(tables: np.ndarray[Any, Any], seq_lens: list[int], page_size: int) -> AttentionMetadata:
    lengths = np.array(seq_lens, dtype=np.int32)
    last = lengths - 1
    slots = tables[np.arange(len(last)), last // page_size].astype(np.int64) * page_size + last % page_size
    return AttentionMetadata(np.ones_like(lengths), lengths, torch.from_numpy(tables), slots, page_size)


def test_a_padded_graph_step_equals_the_eager_one_with_a_poisoned_padding_page(device: CudaDevice) -> None:
    """B024: three rows in a bucket of four; the graph reads the tensors that it was captured with."""
    page_size, draw = 16, torch.Generator().manual_seed(0)
    layer = device.kv_layer(0, 12, page_size, 2, HEAD_DIM, torch.float32)
    layer.k.normal_(generator=draw)
    layer.v.normal_(generator=draw)
    layer.k[PADDING_PAGE], layer.v[PADDING_PAGE] = torch.nan, torch.nan
    frozen, eager = (device.attention(4, 2, HEAD_DIM) for _ in range(2))
    assert isinstance(frozen, TritonAttention)
    frozen.plan(decode_step(np.zeros((4, 40), dtype=np.int32), [1, 1, 1, 1], page_size))
    frozen.freeze()
    plan = frozen._plan
    assert plan is not None
    assert plan.num_splits > 1, "sized for rows as long as the tables are wide"
    addresses = [column.data_ptr() for column in (*plan.columns, plan.tables)]
    q, k, v = (torch.randn(4, heads, HEAD_DIM, generator=draw) for heads in (4, 2, 2))
    rows = np.array([[5, 2, 0], [7, 1, 4], [3, 0, 0]], dtype=np.int32)
    for lengths in ([20, 40, 7], [21, 41, 8]):
        eager.plan(decode_step(rows, lengths, page_size))
        want = eager.forward(q[:3], k[:3], v[:3], layer)
        padded = np.concatenate([rows, np.zeros((1, 3), dtype=np.int32)])
        frozen.plan(decode_step(padded, [*lengths, 1], page_size))
        assert frozen._plan is not None
        assert [c.data_ptr() for c in (*frozen._plan.columns, frozen._plan.tables)] == addresses
        kept = layer.k[1:].clone()
        got = frozen.forward(q, k, v, layer)
        torch.testing.assert_close(got[:3], want, atol=1e-6, rtol=1e-5)
        assert torch.equal(layer.k[1:], kept), "a row of padding wrote into a page of somebody's"
    with pytest.raises(ValueError, match="captured"):
        frozen.plan(decode_step(rows, [20, 40, 7], page_size))


def test_a_capture_that_finds_no_memory_is_told_from_one_that_is_wrong(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B067: the engine goes on without that graph only where there was no room for it."""
    for raised, seen in ((torch.OutOfMemoryError("full"), NoRoomForGraph), (RuntimeError("wrong"), RuntimeError)):
        monkeypatch.setattr(device._runtime, "record", Mock(side_effect=raised))
        with pytest.raises(RuntimeError, match=str(raised)) as caught:
            device.capture(lambda: None, [], 4)
        assert caught.type is seen


def test_work_is_split_by_the_number_of_new_tokens() -> None:
    work = Work.of(np.array([1, 8, 9, 0, 300], dtype=np.int32))
    assert (work.short.tolist(), work.long.tolist(), work.max_queries) == ([0, 1], [2, 4], 8)


# What it refuses.


def test_limits_are_named_with_the_way_out(device: CudaDevice) -> None:
    with pytest.raises(BadKernelArgument, match=r"multiples of 16 up to 256, not 24; use --kernels torch"):
        device.attention(4, 2, 24)
    with pytest.raises(TooManySlots, match=r"2\*\*31 - 1 slots .*--max-total-tokens"):
        device.kv_layer(0, 2**31 // 64 + 1, 64, 2, HEAD_DIM, torch.bfloat16)
    CudaDevice(InterpretedRuntime(), "torch").attention(4, 2, 24)


def test_the_doctors_self_test_passes(device: CudaDevice) -> None:
    assert _self_test_error(device, 128, torch.float32) < TOLERANCES[torch.float32]
