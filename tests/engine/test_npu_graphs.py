"""Decode steps as captured graphs, on an NPU or its emulation: tokens of eager steps, and no wait for the device.

The emulated graph keeps the lengths of its capture and refuses a replay without an update, as hardware would hang or
compute with stale lengths; so whatever the engine forgets to bring up to date shows here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import add, assert_idle, finish_all, make_llm, opened, outputs, prompts_with_shared_heads, run
from tiny_models import save_tiny_model

from devices.npu.arguments.contract import ContractViolation
from devices.npu.attention import NpuAttention
from devices.page_pool import PADDING_PAGE
from engine import LLM, SamplingParams
from engine.attention import FamilyColumns, StepColumns
from engine.graphs import graph_sizes

pytestmark = [pytest.mark.devices("npu-sim"), pytest.mark.usefixtures("on_device")]

PROMPTS = prompts_with_shared_heads(seed=11, n=5, max_len=150)


def needs_graphs(device_name: str) -> None:
    if not opened(device_name).capabilities.graph_capture:
        pytest.skip(f"{device_name} captures no graphs")


@pytest.fixture(scope="module")
def eager(on_device: str, model_path: Path) -> list[list[int]]:
    needs_graphs(on_device)
    return outputs(run(make_llm(model_path, graphs="off"), PROMPTS))


def counts(llm: LLM) -> dict[str, int]:
    return {name.removeprefix("graph_steps_"): n for name, n in llm.stats().items() if name.startswith("graph_steps_")}


def test_replayed_steps_choose_the_tokens_of_eager_ones(model_path: Path, eager: list[list[int]]) -> None:
    llm = make_llm(model_path)
    assert outputs(run(llm, PROMPTS)) == eager
    done = counts(llm)
    assert done["replayed"] >= 20
    assert done["eager_prefill"] >= 1
    assert set(done) == {"replayed", "eager_prefill"}
    assert_idle(llm)


def test_a_batch_that_no_graph_is_large_enough_for_runs_eagerly_and_is_counted(
    model_path: Path, eager: list[list[int]]
) -> None:
    llm = make_llm(model_path, cuda_graph_max_bs=2)
    assert outputs(run(llm, PROMPTS)) == eager
    assert counts(llm)["eager_batch_too_large"] > 0
    assert outputs(run(llm, PROMPTS[:2])) == eager[:2]
    assert counts(llm)["replayed"] > 0


def test_windows_are_replayed_as_well(variant_model_path: Path, on_device: str) -> None:
    needs_graphs(on_device)
    eager, graphs = (make_llm(variant_model_path, graphs=choice) for choice in ("off", "auto"))
    assert outputs(run(graphs, PROMPTS[:3])) == outputs(run(eager, PROMPTS[:3]))
    is_static = graphs.core.runner.model.is_static
    assert (counts(graphs).get("replayed", 0) > 20) is is_static, "experts cannot be captured"


def test_rows_that_outgrow_a_page_stay_right(model_path: Path, on_device: str) -> None:
    """The page table of a replay is as wide as its longest row; lengths are those of now, not of the capture."""
    needs_graphs(on_device)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    prompts = [list(range(3, 113)), [5, 6], list(range(3, 243))]
    eager, graphs = (make_llm(model_path, graphs=choice) for choice in ("off", "auto"))
    assert outputs(run(graphs, prompts, params)) == outputs(run(eager, prompts, params))
    assert counts(graphs)["replayed"] >= 39


def test_a_replay_whose_lengths_were_not_brought_up_to_date_is_noticed(
    model_path: Path, eager: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(model_path)
    monkeypatch.setattr(
        NpuAttention, "new_lengths", lambda self: {"actual_seq_lengths_kv": [7] * len(self._groups[0].call.kv_lens)}
    )
    assert outputs(run(llm, PROMPTS)) != eager


def test_a_wrong_key_of_an_update_is_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: str) -> None:
    needs_graphs(on_device)
    llm = make_llm(model_path)
    monkeypatch.setattr(NpuAttention, "new_lengths", lambda self: {"context_lens": [1]})
    with pytest.raises(ContractViolation, match="ignored in silence"):
        run(llm, PROMPTS[:1])


def test_padding_changes_no_row_and_touches_no_page(model_path: Path, eager: list[list[int]]) -> None:
    """Three rows are padded to four: the fourth writes into the padding page only."""
    llm = make_llm(model_path, disable_radix_cache=True)
    for prompt in PROMPTS[:3]:
        add(llm, prompt)
    while any(request.num_output < 1 for request in llm.core.scheduler.running) or llm.core.scheduler.waiting:
        llm.core.step()
    held = {page for request in llm.core.scheduler.running for page in pages_of(llm, request)}
    kv = llm.core.runner.kv.layers[0].k
    others = [page for page in range(1, 20) if page not in held]
    before = kv[others].cpu().clone()
    llm.core.step()
    assert counts(llm)["replayed"] >= 1
    assert (kv[others].cpu() == before).all()
    finish_all(llm)


def pages_of(llm: LLM, request: Any) -> list[int]:
    table = llm.core.runner._tables["full"][request.kv.row]
    return [int(page) for page in table if page]


def test_a_poisoned_padding_page_reaches_no_row_of_a_padded_step(model_path: Path, on_device: str) -> None:
    """B024: three rows in a bucket of four; the fourth reads the page that the capture left NaN in."""
    needs_graphs(on_device)
    prompts = [prompt[:60] for prompt in PROMPTS[:3]]
    llm, plain = make_llm(model_path), make_llm(model_path, graphs="off")
    for layer in llm.core.runner.kv.layers:
        layer.k[PADDING_PAGE], layer.v[PADDING_PAGE] = torch.nan, torch.nan
    assert outputs(run(llm, prompts)) == outputs(run(plain, prompts))
    assert counts(llm)["replayed"] > 10
    assert llm.core.runner.kv.layers[0].k[PADDING_PAGE].cpu().isnan().any(), "the NaN is real"


DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("choice", ["auto", "off"])
def test_a_decode_step_waits_for_the_device_once_at_its_end(
    model_path: Path, on_device: str, choice: str, sampling: dict[str, Any]
) -> None:
    if on_device != "npu-sim":
        pytest.skip("only the emulator counts waits")
    from devices.npu.emulator import counting

    llm = make_llm(model_path, graphs=choice)
    for prompt in PROMPTS[:3]:
        add(llm, prompt, SamplingParams(**sampling, max_new_tokens=8, ignore_eos=True))
    while llm.core.scheduler.waiting or not all(request.num_output for request in llm.core.scheduler.running):
        llm.core.step()
    for _ in range(3):
        with counting() as steps:
            llm.core.step()
        assert steps.counts.syncs == Counter({"synchronize": 1}), "only the sampled tokens are waited for"
    finish_all(llm)


def test_drawn_tokens_and_their_logprobs_are_a_requests_own(model_path: Path) -> None:
    """Alone or with others that are drawn otherwise."""
    cuts: list[dict[str, Any]] = [DRAWN, {"temperature": 1.2}, {"top_p": 0.7}, {"temperature": 0.0}]
    params = [
        SamplingParams(
            **({"seed": 3} | cut), max_new_tokens=8, ignore_eos=True, return_logprob=True, top_logprobs_num=2
        )
        for cut in cuts
    ]
    llm = make_llm(model_path)
    together = run(llm, PROMPTS[:4], params)
    for prompt, own, request in zip(PROMPTS, params, together, strict=False):
        (alone,) = run(llm, [prompt], own)
        assert alone.output_ids == request.output_ids
        assert alone.scores is not None
        assert request.scores is not None
        for got, want in zip(request.scores.output, alone.scores.output, strict=True):
            assert got is not None
            assert want is not None
            assert got.logprob == pytest.approx(want.logprob, abs=1e-2)
            assert got.top[0][1] >= got.logprob - 1e-2
    assert_idle(llm)


def test_rows_that_are_drawn_on_the_host_are_counted(model_path: Path) -> None:
    drawn = SamplingParams(**DRAWN, max_new_tokens=3, ignore_eos=True)
    for kernels, want in (("auto", None), ("torch", 6)):
        llm = make_llm(model_path, kernels=kernels)
        run(llm, PROMPTS[:2], drawn)
        assert llm.stats().get("sampled_on_host_no_sampler") == want


def test_fewer_sizes_are_captured_when_streams_are_short(caplog: pytest.LogCaptureFixture) -> None:
    capabilities = opened("npu-sim").capabilities
    from dataclasses import replace

    wide = replace(capabilities, graph_buckets=tuple(range(8, 257, 8)), graph_streams=1800)
    assert graph_sizes(wide, 256, 30) == wide.graph_buckets
    assert graph_sizes(wide, 20, 30) == (8, 16, 24)
    with caplog.at_level("WARNING", "rung"):
        kept = graph_sizes(wide, 256, 179)
    assert len(kept) == 10
    assert (kept[0], kept[-1]) == (8, 256)
    assert "10 of 32 batch sizes are captured (8, 32," in caplog.text
    assert graph_sizes(replace(wide, graph_streams=0), 256, 179) == wide.graph_buckets
    assert graph_sizes(replace(wide, graph_capture=False), 256, 2) == ()


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("stream wait event failed, error code 207008\nmore"), torch.OutOfMemoryError("207008: NPU is full")],
    ids=["streams", "memory"],
)
@pytest.mark.parametrize("succeed", [0, 2])
def test_what_was_captured_before_the_device_had_no_room_is_kept(
    model_path: Path, eager: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    on_device: str, succeed: int, failure: RuntimeError,
) -> None:  # fmt: skip
    """B067: of 8, 4, 2 and 1 rows the first `succeed` are captured, the others' steps are padded or eager."""
    fail_captures(monkeypatch, on_device, succeed, failure)
    with caplog.at_level("WARNING", "rung"):
        llm = make_llm(model_path)
    assert [r.message for r in caplog.records if "no room" in r.message] == [
        f"graphs: {succeed} of 4 batch sizes are captured; at {(8, 4, 2)[succeed]} the device had no room: "
        + str(failure).splitlines()[0]
    ]
    assert outputs(run(llm, PROMPTS)) == eager
    assert (counts(llm).get("replayed", 0) > 0) is (succeed > 0)
    assert_idle(llm)


def test_a_capture_that_fails_for_another_reason_is_an_error(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: str
) -> None:
    fail_captures(monkeypatch, on_device, 1, RuntimeError("107030: a copy that waits"))
    with pytest.raises(RuntimeError, match="capture_end failed") as raised:
        make_llm(model_path)
    assert "107030" in str(raised.value.__context__)


def fail_captures(monkeypatch: pytest.MonkeyPatch, on_device: str, succeed: int, failure: RuntimeError) -> None:
    """Captures after the first `succeed` raise, and so does their end, as on hardware."""
    if on_device != "npu-sim":
        pytest.skip("only the emulator's captures can be made to fail")
    from devices.npu.emulator.graph import NPUGraph

    plain_record, plain_end, begun = NPUGraph.record, NPUGraph.capture_end, []

    def record(graph: NPUGraph, launch: Any) -> None:
        if graph not in begun:
            begun.append(graph)
        if begun.index(graph) >= succeed:
            raise failure
        plain_record(graph, launch)

    def capture_end(graph: NPUGraph) -> None:
        plain_end(graph)
        if graph in begun[succeed:]:
            raise RuntimeError("capture_end failed: the stream is not capturing")

    monkeypatch.setattr(NPUGraph, "record", record)
    monkeypatch.setattr(NPUGraph, "capture_end", capture_end)


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_a_long_window_of_a_single_row_is_obeyed(tmp_path: Path, on_device: str, choice: str) -> None:
    """A mask of one row hides nothing past key 512 (vllm-ascend #15503), so such a row goes as two."""
    save_tiny_model(tmp_path, "mistral", sliding_window=600, max_position_embeddings=2048, head_dim=16)
    prompt = np.random.default_rng(0).integers(3, 290, 900).tolist()
    exact = make_llm(tmp_path, device="cpu", page_size=128)
    assert outputs(run(make_llm(tmp_path, graphs=choice), [prompt])) == outputs(run(exact, [prompt]))


def test_padded_columns_point_at_the_padding_page() -> None:
    one, table = np.ones(1, dtype=np.int32), np.array([[4, 9]], dtype=np.int32)
    full = FamilyColumns(table, np.array([4 * 128 + 5]))
    padded = StepColumns(one * 7, one * 200, one, one * 201, {"full": full}).padded(3)
    assert padded.families["full"].tables.tolist() == [[4, 9], [0, 0], [0, 0]]
    assert padded.seq_lens.tolist() == [201, 1, 1]
    assert padded.query_lens.tolist() == [1, 1, 1]
    assert padded.families["full"].slots.tolist() == [517, 0, 1]
