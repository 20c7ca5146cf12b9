"""Model configurations from config.json and GGUF metadata: what is read, and what is refused by its key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from engine.models.config import ModelConfig, MoeConfig
from engine.models.rope_config import ROPE_KINDS, RopeConfig

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
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(None, None),
        moe=None,
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
    assert (config.tie_word_embeddings, config.qkv_bias, config.mlp_bias) == (False, False, False)


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
@pytest.mark.parametrize("kind", ["su", "mrope", "proportional", "freq_factors"])
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
    assert (config.tie_word_embeddings, config.mlp_bias) == (False, True)
    assert (config.qkv_bias, config.out_bias) == (True, False)


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
        ({}, (1.0,) * 7 + (8.0,), RopeConfig("freq_factors", 1e4, short_factors=(1.0,) * 7 + (8.0,))),
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
        ({"llama__rope__scaling__type": "yarn"}, {}, "factor is missing"),
        ({"llama__rope__scaling__type": "longrope"}, {}, "rope_type='longrope': needs a rope kind that is built here"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__attn_factor": 1.5}, {}, "attn_factor=1.5"),
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


def qwen(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(architectures=[f"{name}ForCausalLM"], num_hidden_layers=4, **changes))


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "changes", "qkv", "out", "norm"),
    [
        ("Llama", {"attention_bias": True}, True, True, False),
        ("Mistral", {"attention_bias": True}, False, False, False),
        ("Qwen2", {}, True, False, False),
        ("Qwen2", {"attention_bias": False}, True, False, False),
        ("Qwen3", {}, False, False, True),
        ("Qwen3", {"attention_bias": True}, True, True, True),
        ("Qwen3Moe", {"attention_bias": True} | MOE, True, True, True),
    ],
)
def test_biases_and_head_norms_are_the_architectures(name, changes, qkv, out, norm):
    config = qwen(name, **changes)
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == (qkv, out, norm)


@pytest.mark.parametrize(("name", "head_dim"), [("Llama", 16), ("Qwen2", 16), ("Qwen3", 128), ("Qwen3Moe", 16)])
def test_a_head_dim_that_is_left_out_is_the_architectures(name, head_dim):
    assert qwen(name, **MOE).head_dim == head_dim


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Llama", {"sliding_window": 8, "use_sliding_window": True}, [None] * 4),
        ("Mistral", {}, [4096] * 4),
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Mistral", {"sliding_window": 8, "use_sliding_window": False}, [8] * 4),
        ("Mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 4}, [8] * 4),
        ("Qwen2", {"sliding_window": 8}, [None] * 4),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True}, [None] * 4),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8] * 4),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [8]),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [4096]),
        ("Qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        (
            "Qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
            [8, None, None, 8],
        ),
        ("Qwen3", {"layer_types": [FULL] * 4}, [None] * 4),
        ("Qwen3Moe", {"sliding_window": 8} | MOE, [None] * 4),
        ("Qwen3Moe", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3} | MOE, [8] * 4),
    ],
)
def test_windows_follow_the_architectures_rule(name, changes, windows):
    assert qwen(name, **changes).windows == tuple(windows)


@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("window", [..., None, 8])
@pytest.mark.parametrize("first", [..., 0, 2])
def test_windows_equal_those_of_transformers(name, switch, window, first):
    import transformers

    keys = {"use_sliding_window": switch, "sliding_window": window, "max_window_layers": first}
    keys = {key: value for key, value in keys.items() if value is not ...}
    theirs = getattr(transformers, f"{name}Config")(num_hidden_layers=4, **keys)
    layers = getattr(theirs, "layer_types", None) or [SLIDING] * 4
    expected = tuple(theirs.sliding_window if layer == SLIDING else None for layer in layers)
    assert qwen(name, **keys).windows == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen2", {"layer_types": [FULL] * 3}, "needs 4 entries"),
        ("Qwen2", {"layer_types": [FULL] * 3 + ["chunked_attention"]}, "each one of full_attention, sliding_attention"),
        ("Qwen2", {"layer_types": [SLIDING] * 4}, "needs use_sliding_window and sliding_window"),
        ("Qwen2", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window=0"),
        ("Qwen2", {"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers=-1"),
        ("Qwen2", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
        ("Mistral", {"sliding_window": 8, "layer_types": [FULL] * 4}, "needs sliding_attention everywhere"),
        ("Llama", {"layer_types": [SLIDING] * 4}, "needs full_attention everywhere"),
        ("Qwen3Moe", MOE | {"num_experts": ...}, "num_experts is missing"),
        ("Qwen3Moe", MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9: needs at most num_experts=8"),
        ("Qwen3Moe", MOE | {"mlp_only_layers": "all"}, "mlp_only_layers='all'"),
        ("Qwen3Moe", MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ],
)
def test_windows_and_experts_that_make_no_sense_are_refused_by_key(name, changes, message):
    with pytest.raises(ModelLoadError) as error:
        qwen(name, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3}),
        ({"mlp_only_layers": [0, 2]}, {1, 3}),
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {1}),
        ({"num_experts": ..., "num_local_experts": 8}, {0, 1, 2, 3}),
    ],
)
def test_experts_are_read_with_the_layers_that_have_them(changes, layers):
    expected = MoeConfig(8, 2, 24, normalise_top_k=True, layers=frozenset(layers))
    assert qwen("Qwen3Moe", **(MOE | {"norm_topk_prob": True} | changes)).moe == expected
    assert qwen("Qwen3Moe", **(MOE | changes)).moe.normalise_top_k is False


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"architectures=.'MambaForCausalLM'") as error:
        ModelConfig.from_hf(hf_config(architectures=["MambaForCausalLM"]))
    assert all(name in str(error.value) for name in ARCHITECTURES)
    with pytest.raises(ModelLoadError, match=r"general.architecture='mamba'") as error:
        from_gguf(gguf_metadata(general__architecture="mamba"))
    assert all(name in str(error.value) for name in GGUF_ARCHITECTURES)


def gguf_qwen3moe(**changes: Any) -> ModelConfig:
    metadata = {key.replace("llama", "qwen3moe"): value for key, value in gguf_metadata().items()}
    metadata |= {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2}
    metadata |= {"qwen3moe.expert_feed_forward_length": 24} | {f"qwen3moe.{key}": v for key, v in changes.items()}
    shapes = {"token_embd.weight": (320, 64), "blk.1.ffn_gate_inp.weight": (8, 64)}
    return from_gguf({key: value for key, value in metadata.items() if value is not ...}, tensor_shapes=shapes)


def test_gguf_experts_are_in_the_layers_that_have_a_router():
    config = gguf_qwen3moe()
    assert config.moe == MoeConfig(8, 2, 24, normalise_top_k=True, layers=frozenset({1}))
    assert (config.architecture, config.qk_norm, config.qkv_bias) == ("Qwen3MoeForCausalLM", True, False)
    assert gguf_qwen3moe(expert_weights_norm=False, expert_gating_func=1).moe.normalise_top_k is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": ...}, "qwen3moe.expert_count is missing"),
        ({"expert_used_count": 9}, "qwen3moe.expert_used_count=9: needs at most"),
        ({"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2: needs 1 or no such key"),
        ({"expert_shared_count": 1}, "qwen3moe.expert_shared_count=1"),
        ({"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale=2.5"),
    ],
)
def test_gguf_experts_of_another_kind_are_refused_by_key(changes, message):
    with pytest.raises(ModelLoadError) as error:
        gguf_qwen3moe(**changes)
    assert message in str(error.value)
