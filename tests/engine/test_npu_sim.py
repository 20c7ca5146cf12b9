"""A fast part of what `pytest --device npu-sim` runs in full: an engine on the emulated NPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import assert_idle, force_retractions, make_llm, opened, outputs, prompts_with_shared_heads, run, run_turn
from reference_logits import assert_logits_equal
from tiny_models import save_tiny_llama, save_tiny_model

from engine import SamplingParams
from engine.errors import ConfigError

pytestmark = [pytest.mark.devices("npu-sim"), pytest.mark.usefixtures("on_device")]

PROMPTS = prompts_with_shared_heads(seed=5, n=6)


@pytest.fixture(scope="module")
def alone(on_device: str, model_path: Path) -> list[list[int]]:
    llm = make_llm(model_path, disable_radix_cache=True, chunked_prefill_size=-1, graphs="off")
    return [outputs(run(llm, [prompt]))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [128, -1])
def test_batches_chunks_cache_and_graphs_change_no_token(model_path: Path, alone: list[list[int]], chunk: int) -> None:
    llm = make_llm(model_path, chunked_prefill_size=chunk)
    assert outputs(run(llm, PROMPTS)) == alone
    again = run(llm, PROMPTS)
    assert outputs(again) == alone
    assert any(request.cached_tokens for request in again)
    assert_idle(llm)


def test_retraction_changes_no_token(model_path: Path, alone: list[list[int]]) -> None:
    llm = make_llm(model_path)
    assert outputs(run(llm, PROMPTS, between=force_retractions(llm, 3, limit=8))) == alone
    assert llm.stats()["num_retracted_total"] > 3
    assert_idle(llm)


def test_turns_equal_one_long_prompt_and_resume_at_a_page(model_path: Path, on_device: str) -> None:
    llm, plain = make_llm(model_path), make_llm(model_path, disable_radix_cache=True)
    session = llm.core.sessions.open()
    context: list[int] = []
    for size in (100, 60, 20):
        turn = np.random.default_rng(size).integers(3, 300, size).tolist()
        context += turn
        answer = run_turn(llm, session.id, turn, SamplingParams(temperature=0.0, max_new_tokens=11, ignore_eos=True))
        want = run(plain, [context], SamplingParams(temperature=0.0, max_new_tokens=11, ignore_eos=True))
        assert answer.output_ids == want[0].output_ids
        context += answer.output_ids
    assert session.stats.lost_to_alignment_tokens > 0
    llm.core.close_session(session.id)
    assert_idle(llm)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_equal_transformers(tmp_path: Path, on_device: str, architecture: str) -> None:
    windows = {"sliding_window": 20, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    reference = save_tiny_model(tmp_path, architecture, head_dim=16, **(windows if architecture == "qwen3" else {}))
    assert_logits_equal(make_llm(tmp_path), reference, PROMPTS[1], num_steps=16)


def test_seeded_choices_are_those_of_a_request_alone(model_path: Path, on_device: str) -> None:
    """Rows to draw from are brought to the host; greedy rows beside them are not."""
    drawn = [
        SamplingParams(temperature=1.0, top_p=p, top_k=k, seed=9, max_new_tokens=8) for p, k in ((0.8, 20), (1, -1))
    ]
    params = [*drawn, SamplingParams(temperature=0.0, max_new_tokens=8)]
    llm = make_llm(model_path)
    together = outputs(run(llm, PROMPTS[:3], params))
    assert together == [outputs(run(llm, [prompt], p))[0] for prompt, p in zip(PROMPTS[:3], params, strict=True)]


def test_a_head_size_that_attention_does_not_take_is_refused_at_the_start(tmp_path: Path, on_device: str) -> None:
    save_tiny_llama(tmp_path, head_dim=24)
    with pytest.raises(ConfigError, match="head size is a multiple of 16"):
        make_llm(tmp_path)


@pytest.mark.parametrize("page_size", [1, 16, 64, 192])
def test_page_sizes_that_are_not_declared_are_refused(model_path: Path, on_device: str, page_size: int) -> None:
    """B060: one token alone may read pages of 16 and of 64, several may not, so neither size is served."""
    from engine import LLM

    with pytest.raises(ConfigError, match="use --page-size 128"):
        LLM(str(model_path), device=on_device, page_size=page_size)


@pytest.mark.smollm2
def test_smollm2_says_on_the_emulated_npu_what_it_says_on_the_cpu(smollm2_path: Path, on_device: str) -> None:
    """Both in bf16 with the same floats as weights, the second through a captured graph."""
    prompt = "The capital of France is"
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    texts = {}
    for name in ("cpu", on_device):
        options = {"dtype": "bfloat16", "quantization": "none", "max_total_tokens": 1024, "cuda_graph_max_bs": 1}
        llm = make_llm(smollm2_path, device=name, **options)
        assert llm.core.runner.model.dtype == torch.bfloat16
        texts[name] = llm.generate(prompt, params).text
        assert opened(name).name == name
    assert texts[on_device] == texts["cpu"]
    assert "Paris" in texts["cpu"]
