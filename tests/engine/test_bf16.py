"""A model saved in bf16 runs in bf16, and computes what its weights say within bf16's rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import make_llm, outputs, prompts_with_shared_heads, run
from reference_logits import logits_of_steps
from tiny_models import save_tiny_model

PROMPTS = prompts_with_shared_heads(seed=2, n=6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A model saved in bf16; the reference computes its weights in fp32."""
    path = tmp_path_factory.mktemp("bf16")
    model = save_tiny_model(path, "qwen3", head_dim=16).bfloat16()
    model.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    return path, model.float()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_logits_are_near_those_of_the_same_weights_in_fp32(saved: tuple[Path, torch.nn.Module], kernels: str) -> None:
    path, reference = saved
    llm = make_llm(path, dtype="auto", kernels=kernels)
    assert llm.core.runner.model.dtype == llm.core.runner.kv.layers[0].k.dtype == torch.bfloat16
    prompt = PROMPTS[0]
    got, tokens = logits_of_steps(llm, prompt, 8)
    with torch.inference_mode():
        want = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.05 * want.abs().max()


def test_batches_pages_and_short_chunks_change_no_token_in_bf16(saved: tuple[Path, torch.nn.Module]) -> None:
    path, _ = saved
    alone = make_llm(path, dtype="auto", page_size=1, disable_radix_cache=True, chunked_prefill_size=32)
    if "kernels: own" not in alone.device.description:
        pytest.skip("torch's bf16 products depend on the number of rows")
    expected = [outputs(run(alone, [prompt]))[0] for prompt in PROMPTS]
    for page_size in (16, 128):
        together = make_llm(path, dtype="auto", page_size=page_size, chunked_prefill_size=48)
        for _ in range(2):
            assert outputs(run(together, PROMPTS)) == expected
