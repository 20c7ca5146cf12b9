"""What an engine sets up by the model's shape: attention by window, context by rope, and what a device must do."""

from __future__ import annotations

import dataclasses

import pytest
from harness import make_llm, run
from tiny_models import YARN, save_tiny_model

import engine.assembly
from engine.errors import ConfigError

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
MIXED = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def test_layers_of_one_window_share_a_backend_that_is_planned_once_a_step(tmp_path):
    save_tiny_model(tmp_path, "qwen3", **MIXED)
    groups = make_llm(tmp_path).core.runner._groups
    assert [backend.window for backend in groups.by_layer] == [20, None, 20, None]
    assert len(groups.backends) == 2
    assert {id(backend) for backend in groups.by_layer} == {id(backend) for backend in groups.backends}
    assert groups.layers == {"window": [0, 2], "full": [1, 3]}


def test_a_device_that_cannot_mask_a_window_is_refused_and_only_for_models_with_one(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "windowed", "mistral", sliding_window=24)
    save_tiny_model(tmp_path / "plain", "mistral", sliding_window=None)
    open_device = engine.assembly.open_device

    def open_without_windows(*asked: str):
        choice = open_device(*asked)
        device = choice.device
        device.capabilities = dataclasses.replace(device.capabilities, masks=frozenset({"causal"}))
        return choice

    monkeypatch.setattr(engine.assembly, "open_device", open_without_windows)
    with pytest.raises(ConfigError, match=r"MistralForCausalLM has .* sliding window of 24 tokens .* causal"):
        make_llm(tmp_path / "windowed")
    assert run(make_llm(tmp_path / "plain"), [[5, 6, 7]])[0].output_ids


@pytest.mark.parametrize(
    ("rope", "default", "longest"),
    [({"rope_type": "default", "rope_theta": 1e4}, 64, 64), (DYNAMIC, 64, 256), (YARN, 256, 256)],
)
def test_a_context_may_be_asked_for_up_to_what_the_rope_covers(tmp_path, rope, default, longest):
    save_tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    assert make_llm(tmp_path).core.context_len == default
    assert make_llm(tmp_path, context_length=longest).core.context_len == longest
    with pytest.raises(ConfigError, match=f"context_length={longest + 1} is more than the model's {longest} tokens"):
        make_llm(tmp_path, context_length=longest + 1)
