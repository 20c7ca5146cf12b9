"""Counters see every host sync and launch, the recorder every form of call, and the clock shows overlap."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import npu_calls as calls
import pytest
import torch

from devices.npu.emulator import LatencyModel, counters, counting, recorded_calls, simulated_time

SYNCS: list[tuple[str, Callable[[torch.Tensor], object]]] = [
    ("item", lambda x: x[0].item()),
    ("item", lambda x: bool(x[0] > 0)),
    ("cpu", lambda x: x.cpu()),
    ("cpu", lambda x: x.tolist()),
    ("cpu", lambda x: torch.empty(3).copy_(x)),
    ("cpu", repr),
    ("nonzero", lambda x: x.nonzero()),
    ("nonzero", lambda x: torch.where(x > 0)),
    ("unique", lambda x: x.unique()),
    ("unique", lambda x: x.unique_consecutive()),
    ("boolean index", lambda x: x[x > 0]),
    ("boolean index", lambda x: x.masked_select(x > 0)),
    ("boolean index", lambda x: x.index_put_((x > 0,), torch.zeros(3, device="npu"))),
    ("equal", lambda x: torch.equal(x, x)),
    ("repeat_interleave", lambda x: x.repeat_interleave((x > 0).long())),
    ("synchronize", lambda x: torch.npu.synchronize()),
    ("synchronize", lambda x: torch.npu.current_stream().synchronize()),
    ("synchronize", lambda x: torch.npu.current_stream().record_event().synchronize()),
]


@pytest.mark.parametrize(("kind", "work"), SYNCS)
def test_a_host_sync_is_counted_by_its_kind(kind: str, work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="npu")
    with counting() as counted:
        work(x)
    assert counted.counts.syncs == {kind: 1}


def test_work_on_the_device_makes_no_sync() -> None:
    x, pinned = torch.ones(4, 4, device="npu"), torch.zeros(4, 4).pin_memory()
    with counting() as counted:
        y = (x @ x + 1).softmax(-1)[:, 1].argmax()
        x[1:].copy_(torch.ones(3, 4).pin_memory(), non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        x.index_select(0, y.view(1)).masked_fill(x[:1] > 0, 2.0)
        torch.where(x > 0, x, -x)
    assert counted.counts.num_syncs == 0
    assert counted.counts.uploads == 1
    assert counted.counts.operators["aten::mm"] == 1
    assert torch.equal(pinned, x.cpu())


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(3).to("npu"),
        lambda: torch.tensor([1, 2], device="npu"),
        lambda: torch.zeros(3, device="npu").copy_(torch.ones(3)),
        lambda: torch.zeros(3, device="npu").__setitem__(slice(0, 2), torch.ones(2)),
    ],
)
def test_an_upload_is_counted(work: Callable[[], object]) -> None:
    with counting() as counted:
        work()
    assert (counted.counts.uploads, counted.counts.num_syncs) == (1, 0)


def test_counts_of_a_block_stand_still_after_it() -> None:
    with counting() as counted:
        torch.zeros(1, device="npu").item()
    torch.zeros(1, device="npu").item()
    assert counted.counts.syncs == {"item": 1}
    assert counters().syncs["item"] >= 2


def test_vendor_calls_are_recorded_as_they_were_made(npu: SimpleNamespace) -> None:
    x, gamma = torch.ones(2, 16, device="npu"), torch.ones(16, device="npu")
    before = recorded_calls()
    with counting() as counted:
        npu.npu_rms_norm(x, gamma, epsilon=1e-6)
        npu.npu_rms_norm(x, gamma, 1e-5)
    new = recorded_calls() - before
    assert counted.counts.operators == {"npu::npu_rms_norm": 2}
    assert {(call.name, call.overload, call.positional, call.keywords) for call in new} == {
        ("npu::npu_rms_norm", "default", ("torch.float32", "torch.float32"), (("epsilon", "float"),)),
        ("npu::npu_rms_norm", "default", ("torch.float32", "torch.float32", "float"), ()),
    }
    call = calls.decode()
    out = [torch.zeros_like(call["query"]), torch.zeros(1, device="npu")]
    npu.npu_fused_infer_attention_score(**call, out=out)
    (form,) = recorded_calls() - before - new
    assert form.overload == "out"
    assert ("actual_seq_lengths_kv", "list[int]") in form.keywords
    assert ("out", "list[torch.bfloat16]") in form.keywords


def test_pinned_memory_is_known_by_its_views_and_forgotten_when_it_goes() -> None:
    pinned = torch.arange(6.0).pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].view(2, 2).is_pinned()
    assert pinned.pin_memory() is pinned
    assert not torch.arange(6.0).is_pinned()


MODEL = LatencyModel(launch_s=1.0, replay_launch_s=0.1, start_s=2.0, bytes_per_s=1e18, multiplications_per_s=1e18)


def test_the_clock_shows_what_overlaps() -> None:
    """Three launches at 1 s of host time and 2 s of device time each: the device ends at 7, and a host that works 4 s
    of its own before it waits has waited nothing."""
    x = torch.ones(2, device="npu")
    with simulated_time(MODEL) as clock:
        for _ in range(3):
            x.add_(1)
        assert clock.host_s == pytest.approx(3)
        assert clock.device_s == pytest.approx(6)
        clock.host_works(4.0)
        torch.npu.synchronize()
        assert (clock.host_s, clock.waited_s) == (pytest.approx(7), pytest.approx(0))
        x.add_(1)
        x.cpu()
        assert (clock.host_s, clock.waited_s) == (pytest.approx(10), pytest.approx(2))
    assert x[0].item() == 5.0


def test_the_clock_orders_streams_by_events_and_knows_replays_are_cheap() -> None:
    x, other = torch.ones(2, device="npu"), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for _ in range(10):
            x.add_(1)
    with simulated_time(MODEL) as clock:
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        x.add_(1)
        with torch.npu.stream(other):
            other.wait_stream(torch.npu.default_stream())
            x.add_(1)
            end.record()
        assert clock.busy_until(other) == pytest.approx(5)
        assert start.elapsed_time(end) == pytest.approx(5000)
        assert not end.query()
        host_s = clock.host_s
        graph.replay()
        assert clock.host_s - host_s == pytest.approx(1.0)


def test_bytes_and_products_cost_time(npu: SimpleNamespace) -> None:
    model = LatencyModel(launch_s=0, start_s=0, bytes_per_s=1.0, multiplications_per_s=1.0)
    x = torch.ones(4, 8, device="npu")
    with simulated_time(model) as clock:
        x @ x.t()
    assert clock.device_s == pytest.approx(2 * 4 * 8 * 4 + 4 * 4 * 4 + 4 * 4 * 8)
    call = calls.decode(actual_seq_lengths_kv=[10, 1, 2])
    small = sum(call[name].numel() * call[name].element_size() for name in ("query", "block_table"))
    with simulated_time(model) as clock:
        out, _ = npu.npu_fused_infer_attention_score(**call)
    kv = 2 * 13 * calls.KV_HEADS * calls.DIM * 2
    assert clock.device_s == pytest.approx(small + kv + out.numel() * 2 + 4)
