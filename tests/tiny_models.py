"""Tiny random models as Hugging Face directories, written by `transformers` itself so that it can be the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import save_tiny_tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 304
"""A few more outputs than the tokenizer has ids, as many real models have."""


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
"""A yarn scaling for tiny models."""

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"head_dim": ...}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}
"""Short name -> config class, model class and what its tiny model has beside or instead of the common sizes."""


def tiny_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """Two layers, grouped heads, an odd number of query heads a group; logits far enough apart to have one best.

    A value of `...` takes its key away.
    """
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    config_class, _, own = ARCHITECTURES[architecture]
    values |= own | overrides
    return config_class(**{key: value for key, value in values.items() if value is not ...})


def save_tiny_llama(path: Path, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """`save_tiny_model` of a llama."""
    return save_tiny_model(path, "llama", seed, **overrides)


def save_tiny_model(path: Path, architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a random model and its tokenizer to `path`; returns the model, fp32, in evaluation mode."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture][1](tiny_config(architecture, **overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    save_tiny_tokenizer(path, "byte_level")
    return model
