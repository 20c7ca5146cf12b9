"""Benchmarks: their arithmetic against closed forms, and a small run of each front."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import make_llm
from tiny_models import save_tiny_llama
from typer.testing import CliRunner

from devices.pages import floor_page
from engine.bench import BenchPlan, decode, make_prompts, parse_sizes, prefill, run_bench
from engine.bench_report import (
    Bandwidth,
    Round,
    Span,
    Traffic,
    hit_rate,
    is_disturbed,
    mean_kv_tokens,
    median_bandwidth,
    row_of,
)
from engine.cli import app
from engine.errors import BadRequest
from engine.weights.source import open_source

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "peers"


def load(name: str) -> ModuleType:
    """A module of `scripts/peers`, by its path."""
    spec = importlib.util.spec_from_file_location(f"peers_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ratios, worker, environments = load("ratios"), load("worker"), load("environments")


# Arithmetic of `rung bench`.

HIT_TABLE = {  # of a prompt fully in cache, by page size, for the lengths below; three digits
    1: (".992", ".998", ".999", "1.000", "1.000"),
    16: (".875", ".969", ".984", ".992", ".998"),
    64: (".500", ".875", ".938", ".969", ".992"),
    128: (".000", ".750", ".875", ".938", ".984"),
}
LENGTHS = (128, 512, 1024, 2048, 8192)


@pytest.mark.parametrize("page_size", HIT_TABLE)
def test_the_hit_rate_of_a_known_prompt_is_that_of_the_published_table(page_size: int) -> None:
    rates = [hit_rate(length, length, page_size) for length in LENGTHS]
    assert [f"{rate:.3f}".replace("0.", ".", 1) for rate in rates] == list(HIT_TABLE[page_size])
    assert rates == [floor_page(length - 1, page_size) / length for length in LENGTHS]


@pytest.mark.parametrize(
    ("input_len", "prefix_len", "page_size", "cached"),
    [(100, 0, 1, 0), (100, 60, 1, 60), (100, 60, 16, 48), (100, 100, 1, 99), (100, 99, 16, 96), (1, 1, 1, 0)],
)
def test_a_partial_prefix_hits_by_whole_pages_and_leaves_a_token_to_compute(
    input_len: int, prefix_len: int, page_size: int, cached: int
) -> None:
    assert hit_rate(input_len, prefix_len, page_size) == cached / input_len


@pytest.mark.parametrize(("first", "batch_size", "num_steps"), [(10, 1, 1), (10, 1, 4), (1030, 2, 32)])
def test_mean_kv_tokens_is_the_mean_over_steps_that_add_a_token_a_request(
    first: int, batch_size: int, num_steps: int
) -> None:
    steps = [first + batch_size * step for step in range(num_steps)]
    assert mean_kv_tokens(first, batch_size, num_steps) == sum(steps) / num_steps


def a_round(prefill_s: float, step_s: float, *, busy: float = 2.0) -> Round:
    """Two requests of 100 tokens of which 16 are cached, and 10 steps."""
    return Round(
        prefill=Span(168, prefill_s, busy * prefill_s),
        decode=Span(20, 10 * step_s, busy * 10 * step_s),
        num_steps=10,
        kv_tokens=210.0,
        host_s=(0.001, 0.002, 0.009),
        prompt_tokens=200,
        cached_tokens=32,
    )


def a_row(rounds: list[Round]) -> Any:
    return row_of(
        rounds,
        batch_size=2,
        traffic=Traffic(weight_bytes=1_000, kv_token_bytes=10),
        bandwidth=Bandwidth(read_bytes_per_s=62_000.0, copy_bytes_per_s=70_000.0),
        num_threads=2,
        prefix_len=20,
    )


def test_a_row_holds_medians_and_bytes_a_second_of_weights_and_kv() -> None:
    row = a_row([a_round(2.0, 0.2), a_round(1.0, 0.1), a_round(4.0, 0.05)])
    assert row.prefill_tokens_per_s == 84.0
    assert row.decode_tokens_per_s == pytest.approx(20.0)
    assert row.step_ms == pytest.approx(100.0)
    assert row.host_ms == 2.0
    assert row.step_bytes == 1_000 + 10 * 210
    assert row.bytes_per_s == pytest.approx(31_000.0)
    assert row.bandwidth_share == pytest.approx(0.5)
    assert (row.hit_rate, row.page_1_hit_rate) == (0.16, 0.20)
    assert not row.is_disturbed


def test_a_row_whose_threads_were_taken_is_disturbed() -> None:
    assert a_row([a_round(1.0, 0.1, busy=1.7)] * 2 + [a_round(1.0, 0.1)]).is_disturbed
    assert not a_row([a_round(1.0, 0.1, busy=1.7)] + [a_round(1.0, 0.1)] * 2).is_disturbed
    assert [is_disturbed(busy, 2) for busy in (1.79, 1.8, 2.0)] == [True, False, False]
    assert [is_disturbed(busy, 1) for busy in (0.89, 0.9)] == [True, False]


def test_the_bandwidth_is_the_median_of_the_rounds() -> None:
    samples = [Bandwidth(1.0, 30.0), Bandwidth(5.0, 10.0), Bandwidth(2.0, 20.0)]
    assert median_bandwidth(samples) == Bandwidth(2.0, 20.0)


# Running it.


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefix_len", [0, 20, 40])
def test_the_measured_hit_rate_is_the_formulas(tiny_path: Path, page_size: int, prefix_len: int) -> None:
    llm = make_llm(tiny_path, page_size=page_size, max_total_tokens=1024)
    plan = BenchPlan((1, 3), 40, 3, prefix_len, rounds=2, bandwidth_bytes=1 << 16)
    report = run_bench(llm, plan)
    for row in report.rows:
        assert row.hit_rate == pytest.approx(hit_rate(40, prefix_len, page_size))
        assert row.page_1_hit_rate == pytest.approx(hit_rate(40, prefix_len, 1))
    assert llm.audit() == []
    assert not llm.core.has_work


def test_a_decode_span_covers_exactly_the_steps_of_the_whole_batch(tiny_path: Path) -> None:
    llm = make_llm(tiny_path, chunked_prefill_size=16, max_total_tokens=1024)
    prompts = list(make_prompts(np.random.default_rng(0), llm.core.vocab_size, batch_size=3, input_len=40))
    assert prefill(llm.core, prompts).num_tokens == 120
    span, kv_tokens = decode(llm.core, prompts, 5, spare=len(llm.core.timings))
    assert span.num_tokens == 15
    assert [timing.num_requests for timing in llm.core.timings] == [3] * 5
    assert kv_tokens >= 3 * 41 + 3 * 2


def test_a_pool_too_small_for_the_batch_is_refused_with_what_to_change(tiny_path: Path) -> None:
    llm = make_llm(tiny_path, max_total_tokens=256)
    with pytest.raises(BadRequest, match=r"batch_sizes=8: needs \d+ .* --max-total-tokens"):
        run_bench(llm, BenchPlan((8,), 40, 4))
    with pytest.raises(BadRequest, match="context of 512"):
        run_bench(llm, BenchPlan((1,), 510, 4))


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (0,)}, "batch_sizes"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": 1}, "output_len"),
        ({"prefix_len": 513}, "prefix_len"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused_by_its_field(plan: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        BenchPlan(**plan)
    assert refused.value.field == field


def test_batch_sizes_are_numbers_with_commas() -> None:
    assert parse_sizes("1,8, 32,8") == (1, 8, 32)
    with pytest.raises(BadRequest, match="1,8,32"):
        parse_sizes("1;8")


def test_rung_bench_prints_a_table_and_writes_json(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    lengths = ["--input-len", "20", "--output-len", "3", "--prefix-len", "17", "--max-total-tokens", "1024"]
    sizes = ["--rounds", "1", "--batch-sizes", "1,2", "--bandwidth-mb", "1"]
    command = ["bench", "--model", str(tiny_path), *lengths, *sizes, "--json", str(file)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert re.search(r"batch +prefill tok/s +decode tok/s", done.output)
    assert "input 20, prefix 17" in done.output
    report = json.loads(file.read_text())
    assert [row["batch_size"] for row in report["rows"]] == [1, 2]
    assert report["rows"][1]["cached_tokens"] == 2 * 16
    assert report["plan"]["output_len"] == 3


# Arithmetic of `bench_peers`.


def samples_of(engine: str, rates: list[float], busy: list[float] | None = None) -> list[Any]:
    return [ratios.Sample(engine, "decode 1", i, rate, busy[i] if busy else 2.0) for i, rate in enumerate(rates)]


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    samples = [*samples_of("rung", [10.0, 40.0, 90.0]), *samples_of("peer", [10.0, 10.0, 30.0])]
    one = ratios.compare(samples, "peer", "decode 1", min_busy=1.8)
    assert (one.ratio, one.low, one.high, one.num_rounds, one.num_dropped) == (3.0, 1.0, 4.0, 3, 0)
    assert (one.rung_tokens_per_s, one.peer_tokens_per_s) == (40.0, 10.0)  # their ratio, 4, is not the answer


def test_a_disturbed_sample_drops_its_round_on_either_side() -> None:
    samples = [
        *samples_of("rung", [10.0, 40.0, 90.0], [1.7, 2.0, 2.0]),
        *samples_of("peer", [10.0, 10.0, 30.0], [2.0, 1.8, 0.4]),
    ]
    one = ratios.compare(samples, "peer", "decode 1", min_busy=1.8)
    assert (one.ratio, one.low, one.high, one.num_rounds, one.num_dropped) == (4.0, 4.0, 4.0, 1, 2)
    assert ratios.compare(samples, "peer", "decode 1", min_busy=1.9) is None
    assert ratios.compare(samples, "peer", "decode 8", min_busy=0.0) is None


def test_rounds_that_only_one_engine_has_are_no_pair() -> None:
    samples = [*samples_of("rung", [10.0, 40.0]), *samples_of("peer", [10.0])]
    assert ratios.compare(samples, "peer", "decode 1", min_busy=0.0).num_rounds == 1


def test_every_engine_goes_first_in_turn() -> None:
    orders = [ratios.turns(["rung", "a", "b"], i) for i in range(4)]
    assert orders == [["rung", "a", "b"], ["a", "b", "rung"], ["b", "rung", "a"], ["rung", "a", "b"]]


def test_a_worker_gives_every_engine_the_same_prompts() -> None:
    asked: list[list[int]] = []

    class Recorder:
        version, vocab_size = "0", 1000

        def prefill(self, prompt: list[int]) -> None:
            asked.append(prompt)

        def decode(self, prompts: list[list[int]], steps: int) -> dict[str, float]:
            asked.extend(prompts)
            return worker.reply(len(prompts) * steps, worker.start_watch())

    answer = worker.answer(Recorder(), {"do": "prefill", "seed": 7, "tokens": 12})
    assert answer["tokens"] == 12
    assert answer["wall_s"] > 0
    assert worker.answer(Recorder(), {"do": "decode", "batch": 2, "context": 5, "steps": 3})["tokens"] == 6
    assert asked == [worker.prompt_of(7, 12, 1000), worker.prompt_of(0, 5, 1000), worker.prompt_of(1, 5, 1000)]
    assert all(100 <= token < 800 for prompt in asked for token in prompt)


def test_no_two_prompts_of_conversations_are_alike_and_every_engine_gets_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = {"do": "turns", "seed": 7, "sessions": 3, "turns": 4, "new": 5, "out": 2}
    held: list[Any] = []

    class Recorder:
        version, vocab_size = "0", 1000

        def turns(self, turns: list[Any], num_out: int) -> None:
            held.append((turns, num_out))

    assert worker.answer(Recorder(), command)["tokens"] == 3 * 4 * 2
    worker.answer(Recorder(), command)
    worker.answer(Recorder(), command | {"seed": 8})
    assert held[0] == held[1]
    (said, num_out), (other, _) = held[0], held[2]
    assert num_out == 2
    assert [[len(prompt) for prompt in turn] for turn in said] == [[5] * 3] * 4
    prompts = [tuple(prompt) for turns in (said, other) for turn in turns for prompt in turn]
    assert len(set(prompts)) == 2 * 3 * 4


def test_rung_computes_each_token_of_a_conversation_once(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    sizes = {"threads": torch.get_num_threads(), "max_batch": 1, "max_len": 64, "sessions": 2, "session_len": 60}
    options = argparse.Namespace(model=str(tiny_path), dtype="float32", quantization=None, **sizes)
    engine = load("rung_worker").RungEngine(options)
    engine.turns([[[5, 6, 7], [8, 9, 10]], [[11, 12, 13], [14, 15, 16]]], 4)
    computed = sum(timing.num_tokens for timing in engine.llm.core.timings)
    assert computed == 2 * (2 * (3 + 4) - 1)  # the last token of an answer is known, not computed
    assert engine.llm.audit() == []
    assert engine.kv_bytes > 0
    assert engine.weight_bytes > 0


def test_quantised_forms_are_made_from_the_model_and_keep_its_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    monkeypatch.syspath_prepend(str(SCRIPTS))
    convert = load("convert")
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    source = tmp_path / "model.gguf"
    writer = GGUFWriter(source, "llama")
    for name, tensor in (("token_embd.weight", values), ("blk.0.ffn_up.weight", values), ("norm.weight", values[0])):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = {}
    for form in ("q8_0", "q4_0", "bfloat16"):
        path = convert.model_for("gguf", source, form, tmp_path / "models")
        found[form] = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    types = {form: [tensor.tensor_type.name for tensor in tensors.values()] for form, tensors in found.items()}
    assert types == {
        "q8_0": ["Q8_0", "Q8_0", "F32"],
        "q4_0": ["Q8_0", "Q4_0", "F32"],
        "bfloat16": ["BF16", "BF16", "F32"],
    }
    largest = np.abs(values.reshape(4, 2, 32)).max(-1, keepdims=True)
    for form, steps in (("q8_0", 127), ("q4_0", 8)):
        up = found[form]["blk.0.ffn_up.weight"]
        error = np.abs(dequantize(up.data, up.tensor_type) - values).reshape(4, 2, 32)
        assert (error <= largest / steps * 1.02).all()
    assert np.array_equal(found["q4_0"]["norm.weight"].data, values[0])
    assert convert.model_for("own", source, "file", tmp_path) == source
    assert convert.model_for("own", source, "bfloat16", tmp_path) == source
    assert convert.model_for("own-bf16", source, "q4_0", tmp_path / "models").name == "model-bfloat16.gguf"
    assert convert.model_for("own", source, "q4_0", tmp_path / "models").name == "model-q4_0.gguf"
    assert convert.model_for("gguf-f16", source, "bfloat16", tmp_path / "models").name == "model-float16.gguf"


def test_starts_take_turns_and_one_that_fails_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    starts = load("starts")
    started: list[str] = []

    def start_once(launch: Any, num_tokens: int) -> Any:
        assert num_tokens == 64
        started.append(launch.name)
        if launch.name == "bad":
            raise starts.SetupError("no room")
        return starts.Start(launch.name, float(len(started)), 900 << 20, 200 << 20, 300 << 20)

    monkeypatch.setattr(starts, "start_once", start_once)
    skipped: dict[str, str] = {}
    launches = [SimpleNamespace(name=name) for name in ("rung", "bad", "peer")]
    found = starts.measure_starts(launches, skipped, 2, 64, lambda text: None)
    assert started == ["rung", "bad", "peer", "rung", "peer", "peer", "rung"]
    assert skipped == {"bad": "no room"}
    assert [one.engine for one in found] == ["rung", "peer", "peer", "rung"]
    assert starts.start_lines(found)[2].split() == ["rung", "5.5", "(4.0", "-", "7.0)", "900", "200", "300", "400"]


def test_converted_weights_are_the_sources_and_the_config_reads_back(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    convert = load("convert")
    source, copied = open_source(tiny_path), open_source(convert.hf_directory(tiny_path, "float32", tmp_path / "copy"))
    assert copied.config == source.config
    wanted = dict(source.tensors())
    assert copied.names() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in copied.tensors())
    with pytest.raises(Exception, match="needs a GGUF file"):
        convert.model_for("gguf", tiny_path, "float32", tmp_path)


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.sys, "executable", str(tmp_path / "no-python"))
    (tmp_path / "no-python").write_text("#!/bin/sh\necho no room left >&2\nexit 3\n")
    (tmp_path / "no-python").chmod(0o755)
    peer = environments.Peer("p", "p_worker.py", "gguf", requirements=("nothing==1",))
    with pytest.raises(environments.SetupError, match=r"see .*p\.log: no room left"):
        environments.python_of(peer, tmp_path / "envs")


def test_an_environment_is_made_once_in_order_and_shared_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, python = tmp_path / "calls", tmp_path / "python"
    make = 'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi'
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{make}\n')
    python.chmod(0o755)
    monkeypatch.setattr(environments.sys, "executable", str(python))
    pins = {"requirements": ("big==1",), "alone": ("beside==2",), "removed": ("harmful",), "preloads": ("lib/x.so",)}
    first = environments.Peer("first", "w.py", "gguf", **pins)
    second = environments.Peer("second", "w.py", "gguf", home="first", **pins)
    for peer in (first, second, first):
        assert environments.python_of(peer, tmp_path / "envs") == tmp_path / "envs" / "first" / "bin" / "python"
    made = [line.replace("-m pip --disable-pip-version-check ", "") for line in calls.read_text().splitlines()]
    assert made[1:] == ["install --verbose big==1", "install --verbose --no-deps beside==2", "uninstall --yes harmful"]
    assert "LD_PRELOAD" not in environments.variables_of(second, tmp_path / "envs", 2)
    (tmp_path / "envs" / "first" / "lib").mkdir()
    (tmp_path / "envs" / "first" / "lib" / "x.so").touch()
    found = environments.variables_of(second, tmp_path / "envs", 2)["LD_PRELOAD"]
    assert found == str(tmp_path / "envs" / "first" / "lib" / "x.so")
