"""A model from GGUF computes what the same weights from safetensors do, for every architecture that GGUF has."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from harness import make_llm
from reference_logits import TOLERANCE, assert_logits_equal, logits_of_steps
from tiny_ggufs import write_tiny_gguf
from tiny_models import YARN, save_tiny_model

from engine.errors import ModelLoadError
from engine.models.architectures import GGUF_ARCHITECTURES
from engine.weights.gguf import GgufSource
from engine.weights.source import open_source

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama untied": ("llama", "llama", {"tie_word_embeddings": False, "num_key_value_heads": 3}),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2 untied yarn": (
        "qwen2",
        "qwen2",
        {"tie_word_embeddings": False, "rope_parameters": YARN, "max_position_embeddings": 64},
    ),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3moe", "qwen3moe", {}),
}
PROMPT = np.random.default_rng(5).integers(3, 300, 40).tolist()


def test_every_architecture_of_gguf_is_here():
    assert {arch for _, arch, _ in MODELS.values()} == GGUF_ARCHITECTURES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_is_the_model_of_the_directory(tmp_path, name):
    architecture, arch, overrides = MODELS[name]
    directory = tmp_path / "hf"
    reference = save_tiny_model(directory, architecture, seed=3, **overrides)
    path = write_tiny_gguf(tmp_path / "m.gguf", reference, arch)
    ours, theirs = open_source(path), open_source(directory)
    same = {"architecture": theirs.config.architecture, "bos_token_id": theirs.config.bos_token_id}
    assert dataclasses.replace(ours.config, **same) == theirs.config
    tensors, expected = dict(ours.tensors()), dict(theirs.tensors())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    got, tokens = logits_of_steps(make_llm(path), PROMPT, 16)
    wanted, wanted_tokens = logits_of_steps(make_llm(directory), PROMPT, 16)
    assert tokens == wanted_tokens
    assert (got - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert_logits_equal(make_llm(path), reference, PROMPT, num_steps=16)


def test_quantised_experts_are_dequantised_one_by_one(tmp_path):
    reference = save_tiny_model(tmp_path / "hf", "qwen3moe", hidden_size=64, moe_intermediate_size=32, head_dim=16)
    with torch.no_grad():  # the reference gets what the file can hold
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                kind = GGMLQuantizationType.Q8_0
                stored = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(stored.reshape(parameter.shape)))
    path = write_tiny_gguf(tmp_path / "m.gguf", reference, "qwen3moe", quant="Q8_0")
    names = GgufSource(path).names()
    assert {f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(6)} <= names
    assert_logits_equal(make_llm(path), reference, PROMPT, num_steps=16)


@pytest.mark.parametrize("num_experts", [5, 7])
def test_experts_that_are_not_as_many_as_the_metadata_says_are_refused(tmp_path, num_experts):
    reference = save_tiny_model(tmp_path / "hf", "qwen3moe")
    reference.config.num_experts = num_experts
    path = write_tiny_gguf(tmp_path / "m.gguf", reference, "qwen3moe")
    with pytest.raises(ModelLoadError, match=rf"ffn_.*_exps.weight has shape \(6, .*needs \({num_experts}, out, in\)"):
        GgufSource(path)
