"""Captured graphs: launches run again on the same memory, host values are those of the capture, updates are checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import npu_calls as calls
import pytest
import torch

from devices.npu.emulator import ContractViolation, counting, relaxed


class Decode:
    """Two layers of FIA over one query buffer, captured for lengths that may be updated."""

    def __init__(self, npu: SimpleNamespace, lens: list[int], *, updatable: bool = True) -> None:
        self.npu, self.lens = npu, lens
        self.call = calls.decode()
        self.call.pop("actual_seq_lengths_kv")
        self.graph = npu.npu.NPUGraph()
        with npu.npu.graph(self.graph, auto_dispatch_capture=updatable):
            first = self.attend(self.call["query"])
            self.out = self.attend(first * 2)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.npu.npu_fused_infer_attention_score(
            **self.call | {"query": query}, actual_seq_lengths_kv=self.lens
        )[0]
        return out

    def eager(self, lens: list[int]) -> torch.Tensor:
        self.lens = lens
        return self.attend(self.attend(self.call["query"]) * 2).cpu()

    def update(self, lens: list[int], count: int = 1) -> None:
        self.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lens}] * count)


def test_a_replay_reads_and_writes_the_captured_memory() -> None:
    x, table = torch.zeros(3, device="npu"), torch.zeros(4, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x + 1) * 2
        table.index_copy_(0, torch.zeros(1, dtype=torch.int64, device="npu"), y[:1])
        view = y.view(3, 1)[1:]
        z = view.sum() + table.add_(1).sum()
    pointer = y.data_ptr()
    for value in (1.0, 5.0):
        x.fill_(value)
        table.zero_()
        graph.replay()
        assert y.data_ptr() == pointer
        assert y.cpu().tolist() == [2 * (value + 1)] * 3
        assert table.cpu().tolist() == [2 * (value + 1) + 1, 1, 1, 1]
        assert z.item() == 4 * (value + 1) + 2 * (value + 1) + 4


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_gives_the_lengths_of_the_next_replay(npu: SimpleNamespace, count: int) -> None:
    decode = Decode(npu, [130, 5, 256])
    for lens in ([129, 9, 200], [1, 1, 1], [0, 5, 256]):
        given = list(lens)
        decode.update(given, count)
        given[:] = [7, 7, 7]  # the update has read it
        decode.graph.replay()
        assert torch.equal(decode.out.cpu(), decode.eager(lens))


def test_a_replay_without_its_update_is_refused(npu: SimpleNamespace) -> None:
    decode = Decode(npu, [130, 5, 256])
    with pytest.raises(ContractViolation) as violation:
        decode.graph.replay()
    assert violation.value.rule == "graph-update"
    decode.update([1, 1, 1])
    decode.graph.replay()
    with pytest.raises(ContractViolation, match="before each"):
        decode.graph.replay()


def test_a_forgotten_update_gives_stale_lengths(npu: SimpleNamespace) -> None:
    """As on hardware: the capture keeps its own copy of the list, and the caller's later changes do not reach it."""
    for updatable in (True, False):
        lens = [130, 5, 256]
        decode = Decode(npu, lens, updatable=updatable)
        stale = decode.eager([130, 5, 256])
        lens[:] = [2, 2, 2]
        with relaxed(graphs=False):
            decode.graph.replay()
        assert torch.equal(decode.out.cpu(), stale)
        assert not torch.equal(decode.out.cpu(), decode.eager([2, 2, 2]))


def test_an_update_needs_the_option_of_the_capture(npu: SimpleNamespace) -> None:
    decode = Decode(npu, [130, 5, 256], updatable=False)
    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        decode.update([1, 1, 1])


@pytest.mark.parametrize("count", [0, 3])
def test_an_update_has_one_dict_or_one_for_each_operator(npu: SimpleNamespace, count: int) -> None:
    decode = Decode(npu, [130, 5, 256])
    with pytest.raises(RuntimeError, match=f"2 captured operators need an update and cpu_update_input has {count}"):
        decode.update([1, 1, 1], count)


def test_a_wrong_key_is_refused_and_without_the_switch_ignored(npu: SimpleNamespace) -> None:
    decode = Decode(npu, [130, 5, 256])
    stale = decode.eager([130, 5, 256])
    wrong: list[dict[str, Any]] = [{"actual_seq_kvlen": [1, 1, 1]}]
    with pytest.raises(ContractViolation, match="actual_seq_lengths_kv") as violation:
        decode.graph.update(cpu_update_input=wrong)
    assert violation.value.rule == "graph-update-key"
    with relaxed(graphs=False):
        decode.graph.update(cpu_update_input=wrong)
    decode.graph.replay()
    assert torch.equal(decode.out.cpu(), stale)


def test_rules_hold_for_updated_lengths(npu: SimpleNamespace) -> None:
    decode = Decode(npu, [130, 5, 256])
    decode.update([130, 5])
    with pytest.raises(ContractViolation, match="2 lengths for 3 rows"):
        decode.graph.replay()


def test_the_other_updatable_operators(npu: SimpleNamespace) -> None:
    packed, paged = calls.packed(), calls.paged()
    graph = npu.npu.NPUGraph()
    with npu.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = npu.npu_fused_infer_attention_score_v2(**packed)
        npu._npu_paged_attention(**paged)
    lens = torch.tensor([3, 4, 5], dtype=torch.int32)
    graph.update(
        cpu_update_input=[{"actual_seq_kvlen": [7, 8, 9], "actual_seq_qlen": [2, 7, 8]}, {"context_lens": lens}]
    )
    lens.zero_()
    graph.replay()
    expected, _ = npu.npu_fused_infer_attention_score_v2(
        **packed | {"actual_seq_kvlen": [7, 8, 9], "actual_seq_qlen": [2, 7, 8]}
    )
    assert torch.equal(out.cpu(), expected.cpu())
    found = paged["out"].cpu()
    npu._npu_paged_attention(**paged | {"context_lens": torch.tensor([3, 4, 5], dtype=torch.int32)})
    assert torch.equal(found, paged["out"].cpu())


@pytest.mark.parametrize(
    ("rule", "work"),
    [
        ("sync-in-capture", lambda x: x.sum().item()),
        ("sync-in-capture", lambda x: x.cpu()),
        ("sync-in-capture", lambda x: x.nonzero()),
        ("sync-in-capture", lambda x: x[x > 0]),
        ("sync-in-capture", lambda x: torch.npu.synchronize()),
        ("upload-in-capture", lambda x: x.copy_(torch.ones(3))),
        ("upload-in-capture", lambda x: torch.tensor([1.0], device="npu")),
    ],
)
def test_the_host_may_not_take_part_in_a_capture(rule: str, work: Any) -> None:
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(ContractViolation) as violation, torch.npu.graph(graph):
        work(x)
    assert violation.value.rule == rule
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="holds no capture"):
        graph.replay()


def test_a_pinned_buffer_is_read_again_at_each_replay() -> None:
    source, x = torch.ones(3).pin_memory(), torch.zeros(3, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.copy_(source, non_blocking=True)
        y = x + 1
    source.fill_(7.0)
    graph.replay()
    assert y.cpu().tolist() == [8.0] * 3


def test_one_capture_at_a_time() -> None:
    first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(first):
        torch.zeros(1, device="npu")
        with pytest.raises(RuntimeError, match="another graph capture"):
            second.capture_begin()
    with pytest.raises(RuntimeError, match="reset"):
        first.capture_begin()
    first.reset()
    with torch.npu.graph(first, pool=torch.npu.graph_pool_handle()):
        assert torch.npu.is_current_stream_capturing()
    first.replay()


def test_a_replay_makes_no_host_sync(npu: SimpleNamespace) -> None:
    decode = Decode(npu, [130, 5, 256])
    with counting() as counted:
        decode.update([1, 2, 3])
        decode.graph.replay()
    assert counted.counts.num_syncs == 0
