"""A step is one message: packed, sent and unpacked it is the same step, and every executor of it does the same."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import GREEDY, assert_idle, make_llm, outputs, prompts_with_shared_heads, run
from tiny_models import save_tiny_llama

from engine import LLM, SamplingParams
from engine.step import StepInput, StepOutput, decode, encode

PROMPTS = prompts_with_shared_heads(seed=11, n=6, max_len=150)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2**63 - 1, max_new_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=0, max_new_tokens=24, ignore_eos=True),
] * 2
OPTIONS: dict[str, Any] = {
    "page_size": 16,
    "max_total_tokens": 256,
    "chunked_prefill_size": 48,
    "schedule_conservativeness": 0.01,
}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def played(tiny_path: Path) -> tuple[list[StepInput], list[StepOutput], list[list[int]], LLM]:
    """Steps of a run that chunks, decodes, evicts and retracts, with their results, tokens and engine."""
    llm = make_llm(tiny_path, **OPTIONS)
    steps: list[StepInput] = []
    results: list[StepOutput] = []
    launch, collect = llm.core.runner.launch, llm.core.runner.collect

    def launched(step: StepInput) -> None:
        steps.append(step)
        launch(step)

    def collected() -> StepOutput:
        results.append(collect())
        return results[-1]

    llm.core.runner.launch, llm.core.runner.collect = launched, collected  # type: ignore[method-assign]
    tokens = outputs(run(llm, PROMPTS, MIXED))
    assert llm.stats()["num_retracted_total"] > 0
    assert {0, 1} <= {int(flag) for step in steps for flag in step.is_sampled}
    assert any(len(step.table_changes) > 1 for step in steps)
    return steps, results, tokens, llm


def assert_same(one: Any, other: Any) -> None:
    """Equal, type by type, array by array, dtype included."""
    assert type(one) is type(other)
    if is_dataclass(one):
        for f in fields(one):
            assert_same(getattr(one, f.name), getattr(other, f.name))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def test_steps_and_results_survive_packing(played) -> None:
    steps, results, _, _ = played
    for step in steps:
        assert_same(decode(encode(step), StepInput), step)
    for result in results:
        assert_same(decode(encode(result), StepOutput), result)


def test_packing_is_stable(played) -> None:
    for step in played[0]:
        data = encode(step)
        assert encode(step) == data
        assert encode(decode(data, StepInput)) == data


def test_arrays_that_are_views_are_packed_by_their_content() -> None:
    strided = np.arange(12, dtype=np.int32)[::3]
    result = StepOutput(7, strided, np.empty(0, dtype=np.int32), np.array([True, False, True, True]))
    assert_same(decode(encode(result), StepOutput), result)


def test_bytes_of_another_message_are_refused(played) -> None:
    steps, results, _, _ = played
    with pytest.raises(msgspec.ValidationError):
        decode(encode(steps[0]), StepOutput)
    with pytest.raises(msgspec.ValidationError):
        decode(encode(results[0]), StepInput)
    with pytest.raises(msgspec.DecodeError):
        decode(encode(steps[0])[:-3], StepInput)


def test_what_does_not_belong_in_a_step_cannot_be_packed(played) -> None:
    result = played[1][0]
    with pytest.raises(NotImplementedError, match="does not belong in a step"):
        encode(StepOutput(object(), result.num_tokens, result.token_ids, result.is_finite))  # type: ignore[arg-type]


def test_a_run_through_bytes_alone_gives_the_same_tokens(tiny_path: Path, played) -> None:
    llm = make_llm(tiny_path, **OPTIONS)
    launch, collect = llm.core.runner.launch, llm.core.runner.collect
    llm.core.runner.launch = lambda step: launch(decode(encode(step), StepInput))  # type: ignore[method-assign]
    llm.core.runner.collect = lambda: decode(encode(collect()), StepOutput)  # type: ignore[method-assign]
    assert outputs(run(llm, PROMPTS, MIXED)) == played[2]
    assert_idle(llm)


def test_two_runners_fed_the_same_bytes_agree(tiny_path: Path, played) -> None:
    steps, results, _, llm = played
    other = make_llm(tiny_path, **OPTIONS).core.runner
    for step, result in zip(steps, results, strict=True):
        other.launch(decode(encode(step), StepInput))
        assert_same(other.collect(), result)
    for mine, theirs in zip(llm.core.runner.kv.layers, other.kv.layers, strict=True):
        assert np.array_equal(mine.k.numpy(), theirs.k.numpy())
        assert np.array_equal(mine.v.numpy(), theirs.v.numpy())


def test_a_runner_that_misses_a_table_change_disagrees(tiny_path: Path, played) -> None:
    """The changes in the step are all a runner has: without one of them its tokens are wrong."""
    steps, results, _, _ = played
    other = make_llm(tiny_path, **OPTIONS).core.runner
    lossy = [replace(steps[0], table_changes=()), *steps[1:]]
    tokens = []
    for step in lossy:
        other.launch(step)
        tokens.append(other.collect().token_ids.tolist())
    assert tokens != [result.token_ids.tolist() for result in results]
