"""Model configurations from config.json and GGUF metadata: what is read, and what is refused by its key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.config import ROPE_KINDS, ModelConfig, RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A small llama's config.json; a change to `...` takes the key away."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    """The same model as GGUF key/values; `__` in a change's name stands for a dot, `...` takes the key away."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(320)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not ...}


def from_gguf(metadata: dict[str, Any], **arguments: Any) -> ModelConfig:
    return ModelConfig.from_gguf(metadata, **({"tensor_shapes": {"token_embd.weight": (320, 64)}} | arguments))


def test_a_hugging_face_config_is_read_whole():
    config = ModelConfig.from_hf(hf_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True))
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 10000.0),
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        hidden_act="silu",
        bos_token_id=1,
        eos_token_ids=(2,),
        saved_dtype="bfloat16",
    )


def test_the_same_model_reads_equal_from_both_formats():
    saved = from_gguf(gguf_metadata(), saved_dtype="bfloat16")
    assert saved == ModelConfig.from_hf(hf_config(tie_word_embeddings=True))


@pytest.mark.parametrize("absent", [..., None])
def test_what_a_config_may_leave_out_gets_its_usual_value(absent):
    keys = ("num_key_value_heads", "head_dim", "hidden_act", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")
    config = ModelConfig.from_hf(hf_config(**dict.fromkeys((*keys, "tie_word_embeddings", "rope_scaling"), absent)))
    assert (config.num_kv_heads, config.head_dim, config.hidden_act) == (4, 16, "silu")
    assert (config.bos_token_id, config.eos_token_ids, config.saved_dtype) == (None, (), "float32")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)


def test_a_given_head_dim_need_not_divide_the_hidden_size():
    assert ModelConfig.from_hf(hf_config(hidden_size=66, head_dim=32)).head_dim == 32


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, 5, (2, 5)),
        ([2, 3], [3, 7], (2, 3, 7)),
        (None, [4], (4,)),
        (2, ..., (2,)),
        ([2, 2], 2, (2,)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(in_config, in_generation, expected):
    generation = {} if in_generation is ... else {"eos_token_id": in_generation}
    assert ModelConfig.from_hf(hf_config(eos_token_id=in_config), generation).eos_token_ids == expected


@pytest.mark.parametrize("changes", [{"dtype": "torch.float16"}, {"dtype": ..., "torch_dtype": "float16"}])
def test_the_saved_dtype_may_stand_under_its_old_key(changes):
    assert ModelConfig.from_hf(hf_config(**changes)).saved_dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "expected", "max_model_len"),
    [
        ({}, RopeConfig("default", 10000.0), 512),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig("default", 5e5), 512),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeConfig("default", 7.0), 512),
        ({"rope_theta": 3, "rope_parameters": {"rope_theta": 7.0}}, RopeConfig("default", 7.0), 512),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig("linear", 10000.0, 4.0), 2048),
        ({"rope_scaling": {"type": None, "rope_type": "linear", "factor": 4}}, RopeConfig("linear", 1e4, 4.0), 2048),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2}},
            RopeConfig("linear", 1e4, 2.0),
            1024,
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}},
            RopeConfig("linear", 10000.0, 4.0, original_max_position_embeddings=128),
            512,
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192), 512),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192), 512),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, RopeConfig("llama3", 1e4, 8.0, 1.0, 4.0, 8192), 512),
    ],
)
def test_a_given_rope_scaling_is_used(changes, expected, max_model_len):
    config = ModelConfig.from_hf(hf_config(**changes))
    assert config.rope == expected
    assert config.max_model_len == max_model_len


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "freq_factors"])
def test_an_unknown_rope_kind_is_refused_by_name_with_the_known_ones(key, kind):
    with pytest.raises(ModelLoadError, match=f"{key}='{kind}'") as error:
        ModelConfig.from_hf(hf_config(rope_scaling={key: kind, "factor": 4.0}))
    assert all(known in str(error.value) for known in ROPE_KINDS)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "type is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}}, "rope_type='llama3'"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters="),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 2.0}}, "rope_scaling="),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        *(({"rope_scaling": LLAMA3 | {key: None}}, f"{key} is missing") for key in LLAMA3 if key != "rope_type"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ],
)
def test_nonsense_in_a_rope_section_is_refused_by_key_and_value(changes, key):
    with pytest.raises(ModelLoadError) as error:
        ModelConfig.from_hf(hf_config(**changes))
    assert key in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "architectures",
    ],
)
@pytest.mark.parametrize("value", [..., 0, -1, "64", True, [], float("inf"), 2**70])
def test_a_needed_number_that_is_missing_or_nonsense_is_refused_by_key(key, value):
    if key == "rms_norm_eps" and value == 2**70:
        value = float("nan")
    with pytest.raises(ModelLoadError, match=rf"config.json: {key}( is missing|=).*needs"):
        ModelConfig.from_hf(hf_config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: needs a divisor of num_attention_heads=4"),
        ({"hidden_size": 66}, "num_attention_heads=4: needs a divisor of hidden_size=66"),
        ({"head_dim": 15}, "head_dim=15: needs an even number"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128}, "num_attention_heads=128"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': needs one of silu"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn': needs one of float32, bfloat16, float16"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"bos_token_id": 320}, "bos_token_id=320: needs token ids from 0 to 319"),
        ({"eos_token_id": [2, -1]}, "eos_token_id=[2, -1]"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"architectures": [7]}, "architectures=[7]"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused_by_key_and_value(changes, message):
    with pytest.raises(ModelLoadError) as error:
        ModelConfig.from_hf(hf_config(**changes))
    assert message in str(error.value)


def test_an_end_token_of_the_generation_config_must_be_in_the_vocabulary():
    with pytest.raises(ModelLoadError, match=r"generation_config.json: eos_token_id=999"):
        ModelConfig.from_hf(hf_config(), {"eos_token_id": 999})


def test_gguf_head_and_biases_are_there_when_their_tensors_are():
    names = ("token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    config = from_gguf(gguf_metadata(), tensor_shapes=dict.fromkeys(names, (320, 64)))
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, True, True)


def test_gguf_end_of_turn_and_end_of_message_end_a_generation_too():
    metadata = gguf_metadata(tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=2)
    assert from_gguf(metadata).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("changes", "factors", "expected"),
    [
        ({"llama__rope__freq_base": 5e5}, None, RopeConfig("default", 5e5)),
        ({"llama__rope__freq_base": ...}, None, RopeConfig("default", 1e4)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 2.0}, None, RopeConfig("default", 1e4)),
        ({"llama__rope__scaling__factor": 2.0}, None, RopeConfig("linear", 1e4, 2.0)),
        ({"llama__rope__scale_linear": 2.0}, None, RopeConfig("linear", 1e4, 2.0)),
        (
            {
                "llama__rope__scaling__type": "linear",
                "llama__rope__scaling__factor": 2.0,
                "llama__rope__scaling__original_context_length": 256,
            },
            None,
            RopeConfig("linear", 1e4, 2.0, original_max_position_embeddings=256),
        ),
        ({}, (1.0,) * 7 + (8.0,), RopeConfig("freq_factors", 1e4, freq_factors=(1.0,) * 7 + (8.0,))),
    ],
)
def test_gguf_rope_scaling_is_used(changes, factors, expected):
    assert from_gguf(gguf_metadata(**changes), freq_factors=factors).rope == expected


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (
            {"general__architecture": "mamba"},
            {},
            "general.architecture='mamba': needs an architecture built here: llama",
        ),
        ({"general__architecture": ...}, {}, "general.architecture is missing"),
        ({"llama__block_count": ...}, {}, "llama.block_count is missing"),
        ({"llama__attention__head_count": [4, 4]}, {}, "llama.attention.head_count=[4, 4]"),
        ({"llama__attention__head_count_kv": 3}, {}, "llama.attention.head_count_kv=3"),
        ({"llama__attention__value_length": 32}, {}, "llama.attention.value_length=32: needs 16"),
        ({"llama__rope__dimension_count": 8}, {}, "llama.rope.dimension_count=8: needs 16"),
        ({"llama__expert_count": 8}, {}, "llama.expert_count=8"),
        ({"llama__attention__sliding_window": 128}, {}, "llama.attention.sliding_window=128"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, {}, "rope_type='yarn'"),
        ({"llama__rope__scaling__type": "linear"}, {}, "factor is missing"),
        ({"llama__rope__scaling__factor": 2.0}, {"freq_factors": (1.0,) * 8}, "rope_freqs.weight already scales"),
        ({}, {"freq_factors": (1.0,) * 7}, "needs 8 finite numbers above 0"),
        ({}, {"freq_factors": (1.0,) * 7 + (0.0,)}, "needs 8 finite numbers above 0"),
        ({"tokenizer__ggml__bos_token_id": 320}, {}, "bos_token_id=320: needs token ids from 0 to 319"),
        ({"tokenizer__ggml__eos_token_id": 32000}, {}, "eos_token_id=32000"),
        ({"tokenizer__ggml__tokens": ...}, {}, "llama.vocab_size is missing"),
        ({"tokenizer__ggml__tokens": [1, 2]}, {}, "tokenizer.ggml.tokens=[1, 2]: needs an array of texts"),
        ({"tokenizer__ggml__tokens": "abc"}, {}, "tokenizer.ggml.tokens='abc'"),
        ({"llama__vocab_size": 319}, {}, "tokenizer.ggml.tokens=320: needs at most llama.vocab_size=319"),
        ({"llama__vocab_size": 321}, {}, "llama.vocab_size=321: needs as many rows in token_embd.weight: (320, 64)"),
        ({}, {"tensor_shapes": {}}, "token_embd.weight: missing"),
    ],
)
def test_gguf_metadata_that_cannot_be_built_is_refused_by_key(changes, arguments, message):
    with pytest.raises(ModelLoadError) as error:
        from_gguf(gguf_metadata(**changes), **arguments)
    assert message in str(error.value)


def test_a_gguf_embedding_may_have_more_rows_than_the_tokenizer_has_tokens():
    shapes = {"token_embd.weight": (384, 64)}
    assert from_gguf(gguf_metadata(llama__vocab_size=384), tensor_shapes=shapes).vocab_size == 384


def test_config_and_catalog_import_no_heavy_module():
    code = (
        "import sys, engine.models.config, engine.weights.catalog;"
        "print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=root).stdout == b"[]\n"
