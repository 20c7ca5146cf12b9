"""Tiny random models as Hugging Face directories, written by `transformers` itself so that it can be the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import save_tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 304
"""A few more outputs than the tokenizer has ids, as many real models have."""


def tiny_llama_config(**overrides: Any) -> LlamaConfig:
    """Two layers, grouped heads, an odd number of query heads a group; logits far enough apart to have one best."""
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
    return LlamaConfig(**(values | overrides))


def save_tiny_llama(path: Path, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Write a random model and its tokenizer to `path`; returns the model, fp32, in evaluation mode."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_llama_config(**overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    save_tiny_tokenizer(path, "byte_level")
    return model
