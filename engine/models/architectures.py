"""The architectures that the decoder builds: what tells them apart, as data.

One entry says what an architecture fixes, which keys of its files say the rest and how its GGUF files differ. Reading a
config (`engine/models/config.py`), reading GGUF tensors (`engine/weights/gguf.py`) and the errors for unknown names
consult this table, so a further architecture of the family is a further entry: docs/adding-a-model.md. The rules are
those of the configuration and modelling files of transformers 5.24 and, for GGUF, of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WindowRule = Literal["none", "always", "switched", "layered"]

DEFAULT_WINDOW = 4096
"""Tokens of a sliding window whose key is absent; a null means no window (all of transformers' configs here)."""

DEFAULT_FIRST_WINDOW_LAYER = 28
"""`max_window_layers` when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A member of the decoder family.

    Attributes:
        name: the model class that config.json names.
        gguf_name: `general.architecture` of its GGUF files; None when they are another's.
        gguf_permuted: whether llama.cpp's converter interleaves the rows of its q and k projections.
        qkv_bias, out_bias, mlp_bias: whether the projections have a bias, or the key of config.json that says it; in a
            GGUF file the latter is seen by the tensors.
        qk_norm: whether each head of q and k is normalised (RMS) before it is rotated.
        head_dim: head dimension when config.json leaves it out; None means hidden_size / num_attention_heads.
        windows: which layers attend to the last `sliding_window` tokens only.
            "none": no layer.
            "always": every layer, unless `sliding_window` is null.
            "switched": every layer, if `use_sliding_window`.
            "layered": if `use_sliding_window`, those that `layer_types` names or, without it, those from
                `max_window_layers` on.
        moe: whether layers have a mixture of experts in place of the MLP.
    """

    name: str
    gguf_name: str | None = None
    gguf_permuted: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: WindowRule = "none"
    moe: bool = False


_ALL = (
    Architecture(
        name="LlamaForCausalLM",
        gguf_name="llama",
        gguf_permuted=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    Architecture(name="MistralForCausalLM", windows="always"),  # its GGUF files say "llama"
    Architecture(name="Qwen2ForCausalLM", gguf_name="qwen2", qkv_bias=True, windows="layered"),
    Architecture(
        name="Qwen3ForCausalLM",
        gguf_name="qwen3",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        windows="layered",
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        gguf_name="qwen3moe",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        moe=True,
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {entry.name: entry for entry in _ALL}
GGUF_ARCHITECTURES: Mapping[str, Architecture] = {entry.gguf_name: entry for entry in _ALL if entry.gguf_name}
