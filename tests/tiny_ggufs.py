"""Tiny GGUF files of a `transformers` model, laid out as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quantize
from tiny_tokenizers import byte_alphabet
from transformers import PreTrainedModel

_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def permute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face rows (a head's first half, then its second) to llama.cpp's interleaved pairs."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: PreTrainedModel, permuted: bool) -> dict[str, np.ndarray]:
    """GGUF name -> float32 values; `permuted`: as the converter does for the llama architecture."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        head, _, rest = name.removeprefix("model.layers.").partition(".")
        prefix, path = (f"blk.{head}.", rest) if name.startswith("model.layers.") else ("", name)
        if path == "mlp.experts.gate_up_proj":
            tensors[f"{prefix}ffn_gate_exps.weight"], tensors[f"{prefix}ffn_up_exps.weight"] = np.split(values, 2, 1)
            continue
        if path == "mlp.experts.down_proj":
            tensors[f"{prefix}ffn_down_exps.weight"] = values
            continue
        stem, _, kind = path.rpartition(".")
        num_heads = heads.get(stem.rpartition(".")[2]) if permuted else None
        tensors[f"{prefix}{_STEMS[stem]}.{kind}"] = values if num_heads is None else permute_rope(values, num_heads)
    return tensors


def write_tiny_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    quant: str = "F32",
    store: Callable[[np.ndarray, str], np.ndarray] | None = None,
) -> Path:
    """Write `model` as a GGUF of architecture `arch` with a byte-level vocabulary; matrices are stored as `quant`, by
    `store` (values, quant) if the package cannot."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    tokens = ["<bos>", "<s>", "<eos>", *byte_alphabet(), "12"]
    tokens += [f"[unused{i}]" for i in range(300 - len(tokens))]
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in gguf_tensors(model, permuted=arch == "llama").items():
        kind = GGMLQuantizationType[quant if values.ndim > 1 else "F32"]
        own = store is not None and values.ndim > 1
        stored = store(values, quant) if own and store is not None else quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
