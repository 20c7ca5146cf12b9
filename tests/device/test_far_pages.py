"""Pages behind the 2**31st element of a layer's keys on the CPU: no index of a kernel is 32 bits wide.

The layer's memory is reserved and not written, so that it costs the few pages that are used. An NPU and a GPU refuse
such a layer or are tested with an address of their own (`tests/unit/test_npu_probe.py`, `tests/kernels`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device.test_attention import dense

from devices.base import AttentionMetadata, Device, KernelChoice
from devices.pages import ragged_slots
from devices.registry import try_open

PAGE, HEAD_DIM = 16, 128
NUM_PAGES = 2**31 // (PAGE * HEAD_DIM) + 3


@pytest.fixture(params=["auto", "torch"])
def device(request: pytest.FixtureRequest) -> Device:
    choice: KernelChoice = request.param
    opened = try_open("cpu", choice)
    assert not isinstance(opened, str)
    return opened


def test_keys_and_values_behind_two_to_the_31_are_written_read_and_copied(device: Device) -> None:
    layer = device.kv_layer(0, NUM_PAGES, PAGE, 1, HEAD_DIM, torch.bfloat16)
    assert layer.k.numel() > 2**31
    tables = np.array([[NUM_PAGES - 1, NUM_PAGES - 2]], dtype=np.int32)
    backend = device.attention(2, 1, HEAD_DIM)
    q, k, v = (torch.randn(20, heads, HEAD_DIM, generator=torch.Generator().manual_seed(heads)) for heads in (2, 1, 1))
    k, v = (column.bfloat16().float() for column in (k, v + 1))
    out = []
    for start, num in ((0, 19), (19, 1)):
        starts, lengths = np.array([start], dtype=np.int32), np.array([num], dtype=np.int32)
        slots = ragged_slots(tables, starts, lengths, PAGE)
        backend.plan(AttentionMetadata(lengths, starts + lengths, torch.from_numpy(tables), slots, PAGE))
        out.append(backend.forward(*(column[start : start + num] for column in (q, k, v)), layer))
    torch.testing.assert_close(torch.cat(out).double(), dense(q, k, v, None), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.k[NUM_PAGES - 1, 0].float(), k[:PAGE, 0])
    folded_back = (NUM_PAGES - 1) % (2**31 // (PAGE * HEAD_DIM))
    assert not layer.k[: folded_back + 1].any()
    device.copy_page([layer], NUM_PAGES - 1, NUM_PAGES - 3)
    assert torch.equal(layer.v[NUM_PAGES - 3], layer.v[NUM_PAGES - 1])
