"""Logits and greedy tokens against `transformers`, on random tiny models and on the default model's real weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import make_llm, outputs, run
from tiny_models import save_tiny_llama

from engine import LLM, SamplingParams

TOLERANCE = 2e-4
"""Largest difference of a logit, as a share of the largest logit."""

NEAR_TIE = 1e-3
"""Two best logits closer than this may come out in either order; a comparison of tokens ends there."""

CONFIGS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide head": {"head_dim": 32},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500000.0,
        }
    },
}


def logits_of_steps(llm: LLM, prompt: list[int], num_steps: int) -> tuple[torch.Tensor, list[int]]:
    """Next-token logits after the prompt and after each generated token, [num_steps, vocab], and the tokens."""
    seen: list[torch.Tensor] = []
    forward = llm.core.runner.forward

    def watched(step):
        logits = forward(step)
        seen.append(logits.clone())
        return logits

    llm.core.runner.forward = watched
    [request] = run(llm, [prompt], SamplingParams(temperature=0.0, max_new_tokens=num_steps, ignore_eos=True))
    return torch.cat(seen), request.output_ids


def assert_logits_equal(llm: LLM, reference: torch.nn.Module, prompt: list[int], num_steps: int = 64) -> None:
    got, tokens = logits_of_steps(llm, prompt, num_steps)
    with torch.inference_mode():
        whole = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    assert got.shape == whole.shape
    assert (got - whole).abs().max() < TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [-1, 7])
def test_tiny_logits_equal_transformers(tmp_path, name, chunk):
    reference = save_tiny_llama(tmp_path, seed=len(name), **CONFIGS[name])
    prompt = np.random.default_rng(1).integers(3, 300, 75).tolist()
    llm = make_llm(tmp_path, chunked_prefill_size=chunk)
    assert_logits_equal(llm, reference, prompt)
    assert_logits_equal(llm, reference, prompt)  # once more, from the cache


def test_rope_scaling_that_is_ignored_would_be_seen(tmp_path):
    reference = save_tiny_llama(tmp_path, **CONFIGS["rope linear"])
    llm = make_llm(tmp_path)
    llm.core.runner.model._frequencies *= 4.0
    with pytest.raises(AssertionError):
        assert_logits_equal(llm, reference, list(range(3, 60)), num_steps=4)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[LLM, torch.nn.Module]:
    """The engine on the GGUF file, and transformers' model on the same dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.weights.gguf import GgufSource

    source = GgufSource(smollm2_path)
    c = source.config
    with torch.device("meta"):
        reference = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_layers,
                num_attention_heads=c.num_heads,
                num_key_value_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                max_position_embeddings=c.max_position_embeddings,
                rms_norm_eps=c.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
                tie_word_embeddings=True,
            )
        )
    reference.load_state_dict(dict(source.tensors()), assign=True, strict=False)
    reference.tie_weights()
    rotary = reference.model.rotary_emb
    reference.model.rotary_emb = type(rotary)(reference.config)
    assert not any(parameter.is_meta for parameter in reference.parameters())
    return make_llm(smollm2_path), reference.eval()


@pytest.mark.smollm2
@pytest.mark.parametrize("chunk", [None, 7])
def test_smollm2_logits_equal_transformers(smollm2, chunk):
    llm, reference = smollm2
    llm.flush_cache()
    llm.core.scheduler._chunk_tokens = chunk
    text = "Rivers carry water, sand and news from the mountains to the sea; a bridge over one of them is old when"
    assert_logits_equal(llm, reference, llm.tokenizer.encode(text))


@pytest.mark.smollm2
def test_smollm2_greedy_tokens_equal_transformers(smollm2):
    llm, reference = smollm2
    subjects = ("tea", "the moon", "glass", "a lighthouse", "bread", "rain", "maps", "the violin", "ice", "salt")
    prompts = [f"{start} {subject}" for start in ("Let me tell you about", "Three facts on") for subject in subjects]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    compared = 0
    for prompt, tokens in zip(ids, outputs(run(llm, ids, params)), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2, dim=-1)
        for token, pair, values in zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True):
            if token != pair[0]:
                assert values[0] - values[1] < NEAR_TIE
                break
            compared += 1
    assert compared > 0.9 * 20 * 64
