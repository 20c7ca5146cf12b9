"""The engine on the CUDA device with interpreted kernels: greedy tokens are those of the plain engine on the CPU.

A small part of the matrix of tests/engine/test_equivalence.py: the interpreter takes a millisecond for what a
GPU does in a microsecond. Bounds and races are not watched here; the tests of the kernels watch them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import GREEDY, assert_idle, force_retractions, make_llm, outputs, run
from interpreted_gpu import install
from tiny_models import save_tiny_llama, save_tiny_model

from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.runner import ModelRunner
from engine.step import StepInput

ROOT = Path(__file__).resolve().parents[3]
HEAD_DIM = 16
PROMPTS = [list(range(3, 24)), [*list(range(3, 20)), 9, 8, 7], [40, 4, 9]]
SHORT = replace(GREEDY, max_new_tokens=3)
EAGER = {"disable_cuda_graph": True}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path, head_dim=HEAD_DIM, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-windowed")
    layers = ["sliding_attention", "full_attention"]
    own = {"use_sliding_window": True, "sliding_window": 12, "layer_types": layers, "head_dim": HEAD_DIM}
    save_tiny_model(path, "qwen3", seed=4, **own)
    return path


@pytest.fixture(autouse=True)
def meter() -> None:
    """Takes the place of the meter."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this module compute on the stand-in."""
    install(monkeypatch)


def plain_outputs(path: Path) -> list[list[int]]:
    llm = make_llm(path, device="cpu", page_size=1, disable_radix_cache=True, chunked_prefill_size=-1, kernels="torch")
    return [outputs(run(llm, [prompt], SHORT))[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[list[int]]:
    return plain_outputs(model_path)


@pytest.mark.parametrize(
    ("arguments", "retracted"),
    [
        ({"page_size": 16, "chunked_prefill_size": 12, **EAGER}, True),
        ({"page_size": 128, "disable_radix_cache": True, "cuda_graph_max_bs": 4}, False),
        ({"page_size": 64, "kernels": "torch"}, False),
    ],
    ids=["chunks-and-retraction", "graphs-without-tree", "torch"],
)
def test_tokens_equal_the_plain_engine_on_the_cpu(
    model_path: Path, expected: list[list[int]], arguments: dict[str, Any], retracted: bool
) -> None:
    llm = make_llm(model_path, device="cuda", **arguments)
    between = force_retractions(llm, every=2, limit=2) if retracted else None
    assert outputs(run(llm, PROMPTS, SHORT, between=between)) == expected
    assert (llm.stats()["num_retracted_total"] > 0) is retracted
    if "cuda_graph_max_bs" in arguments:
        assert llm.stats()["graph_steps_replayed"] == 2
    assert_idle(llm)


def test_windows_change_no_token(windowed_path: Path) -> None:
    llm = make_llm(windowed_path, device="cuda", page_size=16, chunked_prefill_size=64, **EAGER)
    assert outputs(run(llm, PROMPTS, SHORT)) == plain_outputs(windowed_path)
    assert_idle(llm)


def test_every_step_takes_one_copy_from_the_host(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, a captured decode with references to unseen tokens, penalties, biases, logprobs, one with nothing."""
    llm = make_llm(model_path, device="cuda", page_size=16, cuda_graph_max_bs=2, dtype="bfloat16")
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    uploader, launch, from_numpy = runner._device._uploader, runner.launch, torch.from_numpy  # type: ignore[attr-defined]
    copies: list[int] = []

    def of_the_tests(array: Any) -> torch.Tensor:
        """Nothing of the engine's or the device's goes to the GPU on a way of its own."""
        caller = Path(sys._getframe(1).f_code.co_filename).relative_to(ROOT)
        assert caller.parts[0] == "tests", caller
        return from_numpy(array)

    def counted(step: StepInput) -> None:
        before = uploader.num_copies
        with monkeypatch.context() as patch:
            patch.setattr(torch, "from_numpy", of_the_tests)
            launch(step)
        copies.append(uploader.num_copies - before)

    monkeypatch.setattr(runner, "launch", counted)
    plain = SamplingParams(seed=4, max_new_tokens=3, ignore_eos=True, top_k=9)
    asking = SamplingParams(
        seed=3, max_new_tokens=2, ignore_eos=True, frequency_penalty=0.5, logit_bias={7: 2.0}, return_logprob=True,
        logprob_start_len=1, top_logprobs_num=1, token_ids_logprob=(5, 6),
    )  # fmt: skip
    run(llm, PROMPTS[1:], [plain, asking])
    assert len(copies) >= 3
    assert copies == [1] * len(copies)
    assert llm.stats()["graph_steps_replayed"] > 0


@pytest.mark.parametrize(
    ("head_dim", "arguments", "words"),
    [
        (16, {"page_size": 24}, ("page_size=24", "'cuda'", "16, 32, 64, 128", "--page-size 16")),
        (24, {}, ("'cuda' cannot run LlamaForCausalLM", "multiples of 16 up to 256, not 24", "--kernels torch")),
        (16, {"max_total_tokens": 63}, ("less than one page of 64", "--max-total-tokens", "--page-size")),
    ],
    ids=["page", "head", "memory"],
)
def test_a_start_that_cannot_be_names_the_limit_and_the_way_out(
    tmp_path: Path, head_dim: int, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    save_tiny_llama(tmp_path, head_dim=head_dim, num_hidden_layers=1)
    with pytest.raises(ConfigError) as refused:
        LLM(str(tmp_path), device="cuda", **{"page_size": 64, **arguments})
    assert all(word in str(refused.value) for word in words), refused.value


def logits_of(llm: LLM, prompt: list[int]) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    logits = llm.core.runner.model.logits  # type: ignore[attr-defined]

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    llm.core.runner.model.logits = watched  # type: ignore[attr-defined]
    run(llm, [prompt], SHORT)
    return torch.cat(seen)


def test_logits_equal_those_of_the_cpu(model_path: Path) -> None:
    on_cpu, on_gpu = (
        logits_of(make_llm(model_path, device=name, page_size=16, **EAGER), PROMPTS[0]) for name in ("cpu", "cuda")
    )
    torch.testing.assert_close(on_gpu, on_cpu, atol=1e-4, rtol=1e-4)


def test_seeded_choices_penalties_and_logprobs_are_those_of_the_cpu(model_path: Path) -> None:
    asks = [
        SamplingParams(seed=3, max_new_tokens=2, ignore_eos=True, return_logprob=True, top_logprobs_num=2),
        SamplingParams(seed=4, max_new_tokens=2, ignore_eos=True, top_k=9, repetition_penalty=1.3),
        SamplingParams(seed=5, max_new_tokens=2, ignore_eos=True, top_p=0.8, temperature=0.7, logit_bias={7: 2.0}),
    ]
    on_cpu, on_gpu = (
        run(make_llm(model_path, device=name, page_size=16, **EAGER), PROMPTS[:3], asks) for name in ("cpu", "cuda")
    )
    assert outputs(on_gpu) == outputs(on_cpu)
