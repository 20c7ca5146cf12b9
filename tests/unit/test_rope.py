"""Rope frequencies and attention factors against `transformers`, and how long a context each kind gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig
from engine.models.rope import build_rope, inverse_frequencies
from engine.models.rope_config import ROPE_KINDS, RopeConfig, rope_from_hf

HEAD_DIM, CONTEXT = 64, 4096
SHORT = [1.0 + i / 40 for i in range(HEAD_DIM // 2)]
LONG = [1.0 + i * i / 40 for i in range(HEAD_DIM // 2)]
SECTIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn without an original": {"rope_type": "yarn", "factor": 2.5},
    "yarn factor 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "yarn with equal mscales": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with one mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 0},
    "yarn with fractions": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20.5, "beta_slow": 2, "truncate": False},
    "yarn with a given factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.75},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 1024,
    },
    "longrope with a factor": {
        "rope_type": "longrope",
        "factor": 16.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 1024,
    },
    "longrope with an attention factor": {
        "rope_type": "longrope",
        "attention_factor": 1.5,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 1024,
    },
}


def oracle(section: dict[str, Any], theta: float, seq_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and attention factor that transformers computes for a sequence of `seq_len`."""
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={**section, "rope_theta": theta},
    )
    return ROPE_INIT_FUNCTIONS[section["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


def test_every_kind_is_compared():
    assert {section["rope_type"] for section in SECTIONS.values()} | {"default"} == set(ROPE_KINDS)


@pytest.mark.parametrize("place", ["in rope_parameters", "in rope_scaling", "old keys"])
@pytest.mark.parametrize("context_len", [512, CONTEXT, 10000])
@pytest.mark.parametrize("name", SECTIONS)
def test_frequencies_and_factor_equal_transformers(name, context_len, place):
    section, theta = SECTIONS[name], 5e5 if "llama3" in name else 1e4
    expected, factor = oracle(section, theta, context_len)
    config: dict[str, Any] = {"max_position_embeddings": CONTEXT}
    if place == "in rope_parameters":
        config["rope_parameters"] = section | {"rope_theta": theta}
    elif place == "in rope_scaling":
        config |= {"rope_scaling": section, "rope_theta": theta}
    else:
        old = {"type" if key == "rope_type" else key: value for key, value in section.items()}
        config |= {"rope_scaling": old, "rope_theta": theta}
    rope = build_rope(rope_from_hf(config, HEAD_DIM), HEAD_DIM, context_len, torch.device("cpu"))
    torch.testing.assert_close(rope.frequencies, expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_original_context_at_the_top_level_wins_as_in_transformers():
    config = {"max_position_embeddings": CONTEXT, "rope_scaling": SECTIONS["longrope"]}
    rope = rope_from_hf(config | {"original_max_position_embeddings": 512}, HEAD_DIM)
    assert (rope.original_max_position_embeddings, rope_from_hf(config, HEAD_DIM).factor) == (512, 4.0)
    assert rope.factor == 8.0


def test_the_attention_factor_multiplies_cosine_and_sine():
    rope = RopeConfig(
        "yarn", 1e4, 4.0, original_max_position_embeddings=64, attention_factor=2.0, beta_fast=32, beta_slow=1
    )
    rotation = build_rope(rope, 8, 256, torch.device("cpu")).at(torch.tensor([0, 3]))
    assert rotation.cos[0].tolist() == [2.0] * 4
    torch.testing.assert_close(rotation.cos**2 + rotation.sin**2, torch.full((2, 4), 4.0))


def test_a_dynamic_rope_changes_nothing_up_to_the_original_context():
    rope = rope_from_hf({"max_position_embeddings": CONTEXT, "rope_scaling": SECTIONS["dynamic"]}, HEAD_DIM)
    plain = inverse_frequencies(RopeConfig("default", 1e4), HEAD_DIM, CONTEXT)
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM, CONTEXT), plain)
    assert not torch.equal(inverse_frequencies(rope, HEAD_DIM, CONTEXT + 1), plain)


@pytest.mark.parametrize(
    ("section", "longest", "unasked"),
    [
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192, 8192),
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 1024}, 2048, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 16384, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 1024}, 4096, 4096),
        (SECTIONS["llama3"], 4096, 4096),
        (SECTIONS["longrope"], 4096, 4096),
        (SECTIONS["longrope with a factor"], 4096, 4096),
    ],
)
def test_the_longest_context_follows_from_the_kind(section, longest, unasked):
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": HEAD_DIM,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_parameters": section,
        }
    )
    assert (config.max_model_len, config.default_context_len) == (longest, unasked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}, "beta_fast=0.5: needs at least beta_slow=1.0"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta=1.0: needs above 1"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor=-1.0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate='no'"),
        ({"rope_type": "dynamic"}, "factor is missing"),
        (
            SECTIONS["longrope"] | {"original_max_position_embeddings": None},
            "original_max_position_embeddings is missing",
        ),
        (SECTIONS["longrope"] | {"long_factor": LONG[:-1]}, "needs 32 finite numbers above 0"),
        (SECTIONS["longrope"] | {"short_factor": [0.0, *SHORT[1:]]}, "needs 32 finite numbers above 0"),
        (SECTIONS["longrope"] | {"short_factor": None}, "short_factor is missing"),
    ],
)
def test_a_scaling_that_lacks_or_garbles_a_parameter_is_refused_by_its_key(changes, message):
    with pytest.raises(ModelLoadError) as error:
        rope_from_hf({"max_position_embeddings": CONTEXT, "rope_parameters": changes}, HEAD_DIM)
    assert message in str(error.value)
