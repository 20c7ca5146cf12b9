"""The shape of a decoder-only language model, as plain checked numbers.

`ModelConfig` is what the layers, the KV sizing and the tokenizer agree on. It is read once, from a Hugging Face
`config.json` (`from_hf`) or from GGUF metadata (`from_gguf`), and every number that would make a later step fail or
silently compute something else is refused here, by the key the file uses. What an architecture fixes is in
`engine/models/architectures.py`. Nothing here imports torch, so the scheduler and the command line may import it.
Read next: `engine/weights/source.py`, which pairs a config with its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.architectures import (
    ARCHITECTURES,
    DEFAULT_FIRST_WINDOW_LAYER,
    DEFAULT_WINDOW,
    GGUF_ARCHITECTURES,
    Architecture,
)
from engine.models.fields import Fields, decimal
from engine.models.rope_config import RopeConfig, rope_from_gguf, rope_from_hf

SAVED_DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")

_HIDDEN_ACTS = ("silu",)
# GGUF keys that change what a model computes and that none of the architectures here has, with the values that do not.
_GGUF_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "logit_scale": (0,),
    "embedding_scale": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),  # 1: softmax
}


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of the MLP of some layers.

    Attributes:
        num_experts: experts of a layer.
        num_experts_per_token: how many of them a token goes through, at most `num_experts`.
        intermediate_size: inner size of one expert.
        normalise_top_k: whether the shares of a token's experts are made to sum to 1.
        layers: numbers of the layers that have experts; the others have a plain MLP.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalise_top_k: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one model. Sizes are counts of elements, `max_position_embeddings` is in tokens.

    `saved_dtype` is the torch dtype that most weights have in the file; None when those are quantised.
    `eos_token_ids` holds every id that ends a generation, without repeats, the file's main one first.
    `windows` says for each layer how many tokens a token attends to, itself included; None for all before it.
    `qk_norm`: each head of q and k is normalised, with weights shared by the heads, before it is rotated.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    moe: MoeConfig | None
    hidden_act: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    saved_dtype: str | None

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that may be asked for: what the rope scaling covers."""
        return self.rope.longest(self.max_position_embeddings)

    @property
    def default_context_len(self) -> int:
        """Longest sequence in tokens when nobody asks for another.

        A dynamic rope computes something else for a longer context, so it is stretched only when asked.
        """
        return self.max_position_embeddings if self.rope.kind == "dynamic" else self.max_model_len

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the contents of `config.json` and, for further end tokens, of `generation_config.json`.

        A key that is absent and a key that is null mean the same. What may be absent gets the value that
        `transformers.LlamaConfig` gives it.

        Raises:
            ModelLoadError: a needed key is absent, or a value is impossible or not implemented; names the key.
        """
        fields = Fields(config, "config.json")
        arch = _architecture(fields)
        num_layers = fields.integer("num_hidden_layers")
        num_heads, num_kv_heads, head_dim = _attention_sizes(
            fields, "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", arch.head_dim
        )
        vocab_size = fields.integer("vocab_size")
        eos = _token_ids(fields, "eos_token_id", vocab_size)
        if generation_config is not None:
            eos += _token_ids(Fields(generation_config, "generation_config.json"), "eos_token_id", vocab_size)
        bos = _token_ids(fields, "bos_token_id", vocab_size)
        return cls(
            architecture=arch.name,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope_from_hf(config, head_dim),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=_is_set(fields, arch.qkv_bias),
            out_bias=_is_set(fields, arch.out_bias),
            mlp_bias=_is_set(fields, arch.mlp_bias),
            qk_norm=arch.qk_norm,
            windows=_windows(fields, arch, num_layers),
            moe=_moe_from_hf(fields, num_layers) if arch.moe else None,
            hidden_act=_hidden_act(fields),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            saved_dtype=_saved_dtype(fields),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tensor_shapes: Mapping[str, tuple[int, ...]],
        freq_factors: tuple[float, ...] | None = None,
        saved_dtype: str | None = None,
    ) -> ModelConfig:
        """Read GGUF key/value metadata, and from the tensors what GGUF has no key for.

        Args:
            metadata: every key of the file with a plain Python value, arrays as lists.
            tensor_shapes: GGUF tensor name -> torch shape (rows first). The head is tied when there is no
                `output.weight`; biases are there when their tensors are.
            freq_factors: contents of `rope_freqs.weight` when the file has it.
            saved_dtype: dtype of most of the weights; None when they are quantised.
        Raises:
            ModelLoadError: as `from_hf`.
        """
        fields = Fields(metadata, "GGUF metadata")
        arch, prefix = _gguf_architecture(fields)
        num_layers = fields.integer(f"{prefix}.block_count")
        num_heads, num_kv_heads, head_dim = _attention_sizes(
            fields,
            f"{prefix}.embedding_length",
            f"{prefix}.attention.head_count",
            f"{prefix}.attention.head_count_kv",
            f"{prefix}.attention.key_length",
        )
        for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
            if fields.integer(key, head_dim) != head_dim:
                fields.refuse(key, metadata[key], f"{head_dim}, the head dimension")
        vocab_size = _gguf_vocab_size(fields, prefix, tensor_shapes)
        eos: tuple[int, ...] = ()
        for name in ("eos", "eot", "eom"):  # end of text, of turn, of message: each ends a generation
            eos += _token_ids(fields, f"tokenizer.ggml.{name}_token_id", vocab_size)
        bos = _token_ids(fields, "tokenizer.ggml.bos_token_id", vocab_size)

        def has_bias(declared: bool | str, tensor: str) -> bool:
            return declared if isinstance(declared, bool) else f"blk.0.{tensor}.bias" in tensor_shapes

        return cls(
            architecture=arch.name,
            vocab_size=vocab_size,
            hidden_size=fields.integer(f"{prefix}.embedding_length"),
            intermediate_size=fields.integer(f"{prefix}.feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{prefix}.context_length"),
            rms_norm_eps=decimal(fields.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
            rope=rope_from_gguf(fields, prefix, head_dim, freq_factors),
            tie_word_embeddings="output.weight" not in tensor_shapes,
            qkv_bias=has_bias(arch.qkv_bias, "attn_q"),
            out_bias=has_bias(arch.out_bias, "attn_output"),
            mlp_bias=has_bias(arch.mlp_bias, "ffn_gate"),
            qk_norm=arch.qk_norm,
            windows=(None,) * num_layers,
            moe=_moe_from_gguf(fields, prefix, tensor_shapes) if arch.moe else None,
            hidden_act="silu",
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            saved_dtype=saved_dtype,
        )


def _architecture(fields: Fields) -> Architecture:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        fields.refuse("architectures", names, "a list that starts with the model class's name")
    if names[0] not in ARCHITECTURES:
        fields.refuse("architectures", names, f"an architecture that is built here: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[names[0]]


def _gguf_architecture(fields: Fields) -> tuple[Architecture, str]:
    """The architecture and the prefix of its keys; refuses keys that ask for what it does not have."""
    name = fields.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        fields.refuse("general.architecture", name, f"an architecture built here: {known}")
    arch = GGUF_ARCHITECTURES[name]
    neutral = _GGUF_NEUTRAL if arch.moe else {**_GGUF_NEUTRAL, "expert_count": (0,)}
    for key, harmless in ((f"{name}.{key}", values) for key, values in neutral.items()):
        if fields.has(key) and fields.values[key] not in harmless:
            fields.refuse(key, fields.values[key], f"{harmless[-1]} or no such key: {arch.name} here does not have it")
    return arch, name


def _attention_sizes(
    fields: Fields,
    hidden_key: str,
    heads_key: str,
    kv_heads_key: str,
    head_dim_key: str,
    default_head_dim: int | None = None,
) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dimension; the last two may be left out of the file."""
    hidden_size, num_heads = fields.integer(hidden_key), fields.integer(heads_key)
    num_kv_heads = fields.integer(kv_heads_key, num_heads)
    if num_heads % num_kv_heads:
        fields.refuse(kv_heads_key, num_kv_heads, f"a divisor of {heads_key}={num_heads}")
    if not fields.has(head_dim_key) and default_head_dim is None and hidden_size % num_heads:
        fields.refuse(heads_key, num_heads, f"a divisor of {hidden_key}={hidden_size}, or a {head_dim_key}")
    head_dim = fields.integer(head_dim_key, default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse(head_dim_key, head_dim, "an even number: rotary embedding turns pairs")
    return num_heads, num_kv_heads, head_dim


def _token_ids(fields: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids, or none; each must be a row of the embedding."""
    value = fields.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            fields.refuse(key, value, f"token ids from 0 to {vocab_size - 1} (the vocabulary has {vocab_size})")
    return tuple(ids)


def _is_set(fields: Fields, declared: bool | str) -> bool:
    """A property that the architecture fixes, or the flag that it names."""
    return declared if isinstance(declared, bool) else fields.flag(declared)


def _hidden_act(fields: Fields) -> str:
    name = fields.text("hidden_act", "silu")
    if name not in _HIDDEN_ACTS:
        fields.refuse("hidden_act", name, f"one of {', '.join(_HIDDEN_ACTS)}; other activations are not built")
    return name


def _saved_dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in SAVED_DTYPES:
        fields.refuse(key, name, f"one of {', '.join(SAVED_DTYPES)}")
    return name


def _windows(fields: Fields, arch: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer by the architecture's rule; `layer_types` must agree where the rule does not read it."""
    window = _window(fields, arch)
    first = 0
    if arch.windows == "layered":
        first = fields.integer("max_window_layers", DEFAULT_FIRST_WINDOW_LAYER, minimum=0)
    full, sliding = LAYER_TYPES
    types = [full if window is None or layer < first else sliding for layer in range(num_layers)]
    given = fields.values.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers or not all(name in LAYER_TYPES for name in given):
            fields.refuse("layer_types", given, f"{num_layers} entries, each one of {', '.join(LAYER_TYPES)}")
        if arch.windows != "layered" and given != types:
            fields.refuse("layer_types", given, f"{types[0]} everywhere: {arch.name} has one kind of layer")
        if sliding in given and window is None:
            fields.refuse("layer_types", given, "use_sliding_window and sliding_window, or no sliding_attention")
        types = given
    return tuple(window if name == sliding else None for name in types)


def _window(fields: Fields, arch: Architecture) -> int | None:
    """Tokens of the sliding window; None when the architecture or the file has none."""
    if arch.windows == "none" or (arch.windows != "always" and not fields.flag("use_sliding_window")):
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", DEFAULT_WINDOW)


def _moe_from_hf(fields: Fields, num_layers: int) -> MoeConfig:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers` (Qwen3-MoE's rule)."""
    num_experts = fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts")
    per_token = fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        fields.refuse("num_experts_per_tok", per_token, f"at most num_experts={num_experts}")
    step = fields.integer("decoder_sparse_step", 1)
    plain = fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
        fields.refuse("mlp_only_layers", plain, "a list of layer numbers")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise_top_k=fields.flag("norm_topk_prob"),
        layers=frozenset(layer for layer in range(num_layers) if layer not in plain and (layer + 1) % step == 0),
    )


def _moe_from_gguf(fields: Fields, prefix: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> MoeConfig:
    """The layers with experts are those with a router; llama.cpp normalises a qwen3moe's shares unless told not to."""
    num_experts = fields.integer(f"{prefix}.expert_count")
    per_token = fields.integer(f"{prefix}.expert_used_count")
    if per_token > num_experts:
        fields.refuse(f"{prefix}.expert_used_count", per_token, f"at most {prefix}.expert_count={num_experts}")
    routers = (name.split(".") for name in tensor_shapes if name.endswith(".ffn_gate_inp.weight"))
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=fields.integer(f"{prefix}.expert_feed_forward_length"),
        normalise_top_k=fields.flag(f"{prefix}.expert_weights_norm", default=True),
        layers=frozenset(int(parts[1]) for parts in routers if parts[0] == "blk" and parts[1].isdecimal()),
    )


def _gguf_vocab_size(fields: Fields, arch: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding, which the vocabulary's key or else the token list must name, and no token may exceed."""
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if tokens is not None and not (isinstance(tokens, list) and tokens and isinstance(tokens[0], str)):
        fields.refuse("tokenizer.ggml.tokens", tokens, "an array of texts")
    num_tokens = len(tokens) if tokens else 0
    vocab_size = fields.integer(f"{arch}.vocab_size", num_tokens or None)
    if num_tokens > vocab_size:
        fields.refuse("tokenizer.ggml.tokens", num_tokens, f"at most {arch}.vocab_size={vocab_size} entries")
    shape = tensor_shapes.get("token_embd.weight")
    if shape is None or shape[0] != vocab_size:
        fields.refuse(f"{arch}.vocab_size", vocab_size, f"as many rows in token_embd.weight: {shape or 'missing'}")
    return vocab_size
