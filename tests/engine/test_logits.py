"""Logits and greedy tokens against `transformers`, on random tiny models and on the default model's real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import make_llm, outputs, run
from reference_logits import NEAR_TIE, assert_logits_equal
from tiny_models import YARN, save_tiny_llama, save_tiny_model

from engine import LLM, SamplingParams

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "rope_theta": 10000.0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 20}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no grouping": ("llama", {"num_key_value_heads": 6}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide head": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {}),
    "mistral untied without a window": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral with a window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied with an upper window": ("qwen2", WINDOW | {"max_window_layers": 1, "tie_word_embeddings": False}),
    "qwen2 mixed layers": ("qwen2", WINDOW | MIXED),
    "qwen3": ("qwen3", {}),
    "qwen3 untied with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3 mixed layers": ("qwen3", WINDOW | MIXED),
    "qwen3 mixed layers yarn": ("qwen3", WINDOW | MIXED | {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe untied without normalisation": ("qwen3moe", {"norm_topk_prob": False, "tie_word_embeddings": False}),
    "qwen3moe with a plain layer": ("qwen3moe", {"mlp_only_layers": [0]}),
    "qwen3moe sparse with a window": ("qwen3moe", WINDOW | {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
    "rope dynamic stretched": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": 64,
        },
    ),
    "rope yarn": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "rope yarn with all options": (
        "llama",
        {
            "rope_parameters": YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.5, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
            "max_position_embeddings": 256,
        },
    ),
    "rope longrope": ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}}),
    "rope longrope short": ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 256}}),
    "rope llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500000.0,
            }
        },
    ),
}

HALF_PRECISION = 64
"""So much further apart may two logits be where a device computes in 16 bits.

On the emulated NPU 8 of 1,280 tokens differ, by up to 0.022, at logits of 20 where two steps of fp16 are 0.031 apart.
"""


def for_device(device_name: str, architecture: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """A config for a device: on others than the CPU heads are a multiple of 16 wide."""
    if device_name == "cpu":
        return overrides
    wide = overrides | ({"hidden_size": 96} if architecture == "qwen2" else {"head_dim": 16})
    rope = wide.get("rope_parameters", {})
    factors = {
        name: [f for f in rope[name] for _ in range(2)] for name in ("short_factor", "long_factor") if name in rope
    }
    return wide | ({"rope_parameters": rope | factors} if rope else {})


CONTEXT_LENGTHS = {"rope dynamic stretched": 200, "rope longrope short": 256}
"""Where a rope depends on the context and the one asked for is not the model's own."""


@pytest.mark.devices
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("chunk", "kernels"), [(-1, "auto"), (7, "auto"), (20, "torch")])
def test_tiny_logits_equal_transformers(tmp_path, device_name, on_device, name, chunk, kernels):
    architecture, overrides = CONFIGS[name]
    overrides = for_device(device_name, architecture, overrides)
    reference = save_tiny_model(tmp_path, architecture, seed=len(name), **overrides)
    prompt = np.random.default_rng(1).integers(3, 300, 75).tolist()
    context = CONTEXT_LENGTHS.get(name)
    llm = make_llm(tmp_path, chunked_prefill_size=chunk, context_length=context, kernels=kernels)
    for _ in range(2):  # once more, from the cache
        assert_logits_equal(llm, reference, prompt, reference_len=context or 0)


def test_rope_scaling_that_is_ignored_would_be_seen(tmp_path):
    reference = save_tiny_llama(tmp_path, head_dim=16, **CONFIGS["rope linear"][1])
    llm = make_llm(tmp_path)
    llm.core.runner.model.rope.frequencies.mul_(4.0)
    with pytest.raises(AssertionError):
        assert_logits_equal(llm, reference, list(range(3, 60)), num_steps=4)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, on_device: str) -> tuple[LLM, torch.nn.Module]:
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


@pytest.mark.devices
@pytest.mark.smollm2
@pytest.mark.parametrize("chunk", [None, 7])
def test_smollm2_logits_equal_transformers(smollm2, chunk):
    llm, reference = smollm2
    llm.flush_cache()
    scheduler = llm.core.scheduler
    least = llm.core.allocator.geometry.page_size if scheduler.capabilities.resume_unit == "page" else 1
    scheduler._chunk_tokens = None if chunk is None else max(chunk, least)
    text = "Rivers carry water, sand and news from the mountains to the sea; a bridge over one of them is old when"
    assert_logits_equal(llm, reference, llm.tokenizer.encode(text))


@pytest.mark.devices
@pytest.mark.smollm2
def test_smollm2_greedy_tokens_equal_transformers(smollm2):
    llm, reference = smollm2
    subjects = ("tea", "the moon", "glass", "a lighthouse", "bread", "rain", "maps", "the violin", "ice", "salt")
    prompts = [f"{start} {subject}" for start in ("Let me tell you about", "Three facts on") for subject in subjects]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    is_exact = llm.core.runner.model.dtype == torch.float32
    near_tie = NEAR_TIE if is_exact else HALF_PRECISION * NEAR_TIE
    equal = 0
    for prompt, tokens in zip(ids, outputs(run(llm, ids, params)), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        # The reference reads the engine's own tokens, so that what follows a tie is compared as well.
        best = logits.argmax(dim=-1)
        chosen = torch.tensor(tokens)
        assert (logits.amax(dim=-1) - logits.gather(-1, chosen[:, None])[:, 0] < near_tie).all()
        equal += int((chosen == best).sum())
    assert equal > 0.9 * 20 * 64
