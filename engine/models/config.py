"""The shape of a decoder-only language model, as plain checked numbers.

`ModelConfig` is what the layers, the KV sizing and the tokenizer agree on. It is read once, from a Hugging Face
`config.json` (`from_hf`) or from GGUF metadata (`from_gguf`), and every number that would make a later step fail or
silently compute something else is refused here, by the key the file uses. Nothing here imports torch, so the scheduler
and the command line may import it freely. Read next: `engine/weights/source.py`, which pairs a config with its tensors.
"""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "llama3")
GGUF_ARCHITECTURES: Mapping[str, str] = {"llama": "LlamaForCausalLM"}
SAVED_DTYPES = ("float32", "bfloat16", "float16")

_HIDDEN_ACTS = ("silu",)
_MAX_INT = 2**31 - 1
# GGUF keys that change what a llama computes and that the llama here does not implement.
_GGUF_UNSUPPORTED = ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale", "embedding_scale")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: inverse frequency `i` of a head of `head_dim` is `theta ** (-2i / head_dim)`, scaled.

    Attributes:
        kind: how the inverse frequencies are scaled.
            "default": not at all.
            "linear": divided by `factor` (Chen et al. 2023, "position interpolation").
            "llama3": wavelengths above `original / low_freq_factor` divided by `factor`, below
                `original / high_freq_factor` kept, blended between (Llama 3.1).
            "freq_factors": the i-th divided by `freq_factors[i]`; GGUF stores the llama3 scaling this way.
        theta: base of the frequencies.
        factor: how many times the context was stretched.
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only, above `low_freq_factor`.
        original_max_position_embeddings: context in tokens before scaling; 0 when the file does not say.
        freq_factors: `head_dim / 2` positive divisors when kind is "freq_factors", else None.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one model. Sizes are counts of elements, `max_position_embeddings` is in tokens.

    `saved_dtype` is the dtype that most weights have in the file; "float32" for quantised ones, which are dequantised.
    `eos_token_ids` holds every id that ends a generation, without repeats, the file's main one first.
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
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    saved_dtype: str

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the rope scaling covers.

        A linear scaling stretches the context it was given for: `factor` times the original context, or times
        `max_position_embeddings` where no original is named (vLLM reads such files the same way). The other kinds
        come with `max_position_embeddings` already stretched.
        """
        if self.rope.kind != "linear":
            return self.max_position_embeddings
        base = self.rope.original_max_position_embeddings or self.max_position_embeddings
        return int(base * self.rope.factor)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the contents of `config.json` and, for further end tokens, of `generation_config.json`.

        A key that is absent and a key that is null mean the same. What may be absent gets the value that
        `transformers.LlamaConfig` gives it.

        Raises:
            ModelLoadError: a needed key is absent, or a value is impossible or not implemented; names the key.
        """
        fields = _Fields(config, "config.json")
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            fields.refuse("architectures", architectures, "a list that starts with the model class's name")
        num_heads, num_kv_heads, head_dim = _attention_sizes(
            fields, "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
        )
        vocab_size = fields.integer("vocab_size")
        eos = _token_ids(fields, "eos_token_id", vocab_size)
        if generation_config is not None:
            eos += _token_ids(_Fields(generation_config, "generation_config.json"), "eos_token_id", vocab_size)
        bos = _token_ids(fields, "bos_token_id", vocab_size)
        dtype_key = "dtype" if config.get("dtype") is not None else "torch_dtype"
        saved_dtype = fields.text(dtype_key, "float32").removeprefix("torch.")
        if saved_dtype not in SAVED_DTYPES:
            fields.refuse(dtype_key, saved_dtype, f"one of {', '.join(SAVED_DTYPES)}")
        hidden_act = fields.text("hidden_act", "silu")
        if hidden_act not in _HIDDEN_ACTS:
            fields.refuse(
                "hidden_act", hidden_act, f"one of {', '.join(_HIDDEN_ACTS)}; other activations are not built"
            )
        return cls(
            architecture=architectures[0],
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=_rope_from_hf(config),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            hidden_act=hidden_act,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            saved_dtype=saved_dtype,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tensor_shapes: Mapping[str, tuple[int, ...]],
        freq_factors: tuple[float, ...] | None = None,
        saved_dtype: str = "float32",
    ) -> ModelConfig:
        """Read GGUF key/value metadata, and from the tensors what GGUF has no key for.

        Args:
            metadata: every key of the file with a plain Python value, arrays as lists.
            tensor_shapes: GGUF tensor name -> torch shape (rows first). The head is tied when there is no
                `output.weight`; biases are there when their tensors are.
            freq_factors: contents of `rope_freqs.weight` when the file has it.
            saved_dtype: dtype of most of the weights once read.
        Raises:
            ModelLoadError: as `from_hf`.
        """
        fields = _Fields(metadata, "GGUF metadata")
        arch = fields.text("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            known = ", ".join(sorted(GGUF_ARCHITECTURES))
            fields.refuse("general.architecture", arch, f"an architecture built here: {known}")
        for key in (f"{arch}.{name}" for name in _GGUF_UNSUPPORTED):
            if metadata.get(key):
                fields.refuse(key, metadata[key], f"0 or no such key: {GGUF_ARCHITECTURES[arch]} here does not have it")
        num_heads, num_kv_heads, head_dim = _attention_sizes(
            fields,
            f"{arch}.embedding_length",
            f"{arch}.attention.head_count",
            f"{arch}.attention.head_count_kv",
            f"{arch}.attention.key_length",
        )
        for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
            if fields.integer(key, head_dim) != head_dim:
                fields.refuse(key, metadata[key], f"{head_dim}, the head dimension")
        vocab_size = _gguf_vocab_size(fields, arch, tensor_shapes)
        eos: tuple[int, ...] = ()
        for name in ("eos", "eot", "eom"):  # end of text, of turn, of message: each ends a generation
            eos += _token_ids(fields, f"tokenizer.ggml.{name}_token_id", vocab_size)
        bos = _token_ids(fields, "tokenizer.ggml.bos_token_id", vocab_size)
        return cls(
            architecture=GGUF_ARCHITECTURES[arch],
            vocab_size=vocab_size,
            hidden_size=fields.integer(f"{arch}.embedding_length"),
            intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
            num_layers=fields.integer(f"{arch}.block_count"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{arch}.context_length"),
            rms_norm_eps=_decimal(fields.number(f"{arch}.attention.layer_norm_rms_epsilon")),
            rope=_rope_from_gguf(fields, arch, head_dim, freq_factors),
            tie_word_embeddings="output.weight" not in tensor_shapes,
            attention_bias="blk.0.attn_q.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
            hidden_act="silu",
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            saved_dtype=saved_dtype,
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checked reads from `values`; null means absent. `origin` says in errors which file the key is from."""

    values: Mapping[str, Any]
    origin: str

    def refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        shown = " is missing" if value is None else f"={reprlib.repr(value)}"
        raise ModelLoadError(f"{self.origin}: {key}{shown}: needs {needed}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_INT:
            self.refuse(key, value, f"a whole number from 1 to {_MAX_INT}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number above 0 and not below `minimum`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            self.refuse(key, value, "a finite number above 0")
        if value < minimum:
            self.refuse(key, value, f"at least {minimum}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.refuse(key, value, "a text")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value


def _attention_sizes(
    fields: _Fields, hidden_key: str, heads_key: str, kv_heads_key: str, head_dim_key: str
) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dimension; the last two may be left out of the file."""
    hidden_size, num_heads = fields.integer(hidden_key), fields.integer(heads_key)
    num_kv_heads = fields.integer(kv_heads_key, num_heads)
    if num_heads % num_kv_heads:
        fields.refuse(kv_heads_key, num_kv_heads, f"a divisor of {heads_key}={num_heads}")
    if fields.values.get(head_dim_key) is None and hidden_size % num_heads:
        fields.refuse(heads_key, num_heads, f"a divisor of {hidden_key}={hidden_size}, or a {head_dim_key}")
    head_dim = fields.integer(head_dim_key, hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse(head_dim_key, head_dim, "an even number: rotary embedding turns pairs")
    return num_heads, num_kv_heads, head_dim


def _token_ids(fields: _Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids, or none; each must be a row of the embedding."""
    value = fields.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            fields.refuse(key, value, f"token ids from 0 to {vocab_size - 1} (the vocabulary has {vocab_size})")
    return tuple(ids)


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Rope from `rope_parameters` (transformers 5) or `rope_scaling` (before); theta inside it or at the top level."""
    top = _Fields(config, "config.json")
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    name, section = next(iter(given.items()), ("rope_parameters", {}))
    if not isinstance(section, Mapping) or any(isinstance(value, Mapping) for value in section.values()):
        top.refuse(name, section, "one set of rope parameters, the same for all layers")
    if any(other != section for other in given.values()):
        top.refuse("rope_scaling", given["rope_scaling"], f"to equal rope_parameters={reprlib.repr(section)}")
    fields = _Fields(section, f"config.json: {name}")
    for owner in (top, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            owner.refuse("partial_rotary_factor", owner.values["partial_rotary_factor"], "1.0: whole heads are turned")
    kind_key = "rope_type" if section.get("rope_type") is not None else "type"
    if section.get("type") not in (None, section.get(kind_key)):
        fields.refuse("rope_type", section[kind_key], f"to equal type={section['type']!r}")
    kind = fields.text(kind_key, None if section.get("factor") is not None else "default")
    theta = fields.number("rope_theta", top.number("rope_theta", 10000.0))
    return _scaled_rope(fields, kind_key, kind, theta)


def _rope_from_gguf(fields: _Fields, arch: str, head_dim: int, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    """Rope from GGUF keys (a factor without a type means linear) and from the `rope_freqs.weight` tensor."""
    prefix = f"{arch}.rope.scaling"
    section = {
        "rope_type": fields.values.get(f"{prefix}.type"),
        "factor": fields.values.get(f"{prefix}.factor") or fields.values.get(f"{arch}.rope.scale_linear"),
        "original_max_position_embeddings": fields.values.get(f"{prefix}.original_context_length"),
    }
    scaling = _Fields(section, f"{fields.origin}: {prefix}")
    kind = scaling.text("rope_type", "linear" if section["factor"] else "none")
    theta = _decimal(fields.number(f"{arch}.rope.freq_base", 10000.0))
    rope = _scaled_rope(scaling, "rope_type", "default" if kind == "none" else kind, theta)
    if freq_factors is None:
        return rope
    if rope.kind != "default":
        scaling.refuse("rope_type", kind, "none, because the tensor rope_freqs.weight already scales the frequencies")
    if len(freq_factors) != head_dim // 2 or not all(0 < factor <= sys.float_info.max for factor in freq_factors):
        fields.refuse("rope_freqs.weight", freq_factors, f"{head_dim // 2} finite numbers above 0")
    return dataclasses.replace(rope, kind="freq_factors", freq_factors=freq_factors)


def _scaled_rope(fields: _Fields, kind_key: str, kind: str, theta: float) -> RopeConfig:
    """A rope of one of `ROPE_KINDS`, with every parameter that the kind needs."""
    if kind not in ROPE_KINDS:
        fields.refuse(kind_key, kind, f"a rope kind that is built here: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = fields.number("factor", minimum=1.0)
    original_key = "original_max_position_embeddings"
    if kind == "linear":
        return RopeConfig(kind, theta, factor, original_max_position_embeddings=fields.integer(original_key, 0))
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        fields.refuse("high_freq_factor", high, f"to be above low_freq_factor={low}")
    return RopeConfig(kind, theta, factor, low, high, fields.integer(original_key))


def _gguf_vocab_size(fields: _Fields, arch: str, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
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


def _decimal(value: float) -> float:
    """The decimal that a float32 was written from (1e-05, not 9.99999974e-06): it holds 7 significant digits."""
    return float(f"{value:.7g}")
