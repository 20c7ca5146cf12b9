"""A dense decoder of the Llama family: pre-norm, rotary attention over paged KV, gated MLP.

The projections of a layer are stored fused (q, k, v in one matrix; gate and up in another); `destinations` lists the
parts of the fused matrices under the names that model files use, so loading needs no code of its own. `forward` sees
a step as a flat list of tokens: whose they are is the attention backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from devices.base import AttentionBackend, KvLayer
from engine.models.config import ModelConfig
from engine.models.rope import cos_sin, inverse_frequencies, rotate

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`; weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; `qkv` and `gate_up` are fused along their outputs."""

    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The model on one device. Its weights are uninitialised until `destinations` was filled, every entry."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self._device = device
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.norm = self._empty(config.hidden_size)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def _linear(self, out_size: int, in_size: int, bias: bool) -> Linear:
        return Linear(self._empty(out_size, in_size), self._empty(out_size) if bias else None)

    def _layer(self) -> DecoderLayer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        return DecoderLayer(
            input_norm=self._empty(hidden),
            qkv=self._linear(self._q_size + 2 * self._kv_size, hidden, config.attention_bias),
            out=self._linear(hidden, self._q_size, config.attention_bias),
            post_norm=self._empty(hidden),
            gate_up=self._linear(2 * inner, hidden, config.mlp_bias),
            down=self._linear(hidden, inner, config.mlp_bias),
        )

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a model file goes: Hugging Face name -> a view of the weights."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            named[LM_HEAD] = self.head
        sizes = (self._q_size, self._kv_size, self._kv_size)
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            named[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            named[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
            named |= _parts(layer.qkv, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"], sizes)
            named |= _parts(layer.out, [f"{prefix}.self_attn.o_proj"], (self.config.hidden_size,))
            inner = self.config.intermediate_size
            named |= _parts(layer.gate_up, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], (inner, inner))
            named |= _parts(layer.down, [f"{prefix}.mlp.down_proj"], (self.config.hidden_size,))
        return named

    def optional_names(self) -> frozenset[str]:
        """Names that a file may hold and that are not loaded: the head of a tied model."""
        return frozenset({LM_HEAD}) if self.config.tie_word_embeddings else frozenset()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        kv_layers: Sequence[KvLayer],
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step whose attention was planned already.

        Args:
            token_ids, positions: int64 [tokens].
            wanted: places of the tokens whose output is wanted, int64 [wanted].
        Returns:
            Hidden states for `logits`, [wanted, hidden_size].
        """
        config = self.config
        x = F.embedding(token_ids, self.embedding)
        cos, sin = cos_sin(positions, self._frequencies, self.dtype)
        for layer, kv in zip(self.layers, kv_layers, strict=True):
            x = x + self._attend(self._norm(x, layer.input_norm), layer, cos, sin, attention, kv)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return F.rms_norm(x[wanted], (config.hidden_size,), self.norm, config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [rows, vocab_size], of hidden states [rows, hidden_size]."""
        return F.linear(hidden, self.head).to(torch.float32)

    def _attend(
        self,
        x: torch.Tensor,
        layer: DecoderLayer,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
        kv: KvLayer,
    ) -> torch.Tensor:
        """x, result: [tokens, hidden_size]."""
        config, num_tokens = self.config, x.shape[0]
        qk, v = torch.split(layer.qkv(x), [self._q_size + self._kv_size, self._kv_size], dim=-1)
        qk = rotate(qk.view(num_tokens, config.num_heads + config.num_kv_heads, config.head_dim), cos, sin)
        q, k = torch.split(qk, [config.num_heads, config.num_kv_heads], dim=1)
        attended = attention.forward(q, k, v.view(num_tokens, config.num_kv_heads, config.head_dim), kv)
        return layer.out(attended.reshape(num_tokens, self._q_size))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)


def _parts(linear: Linear, names: Sequence[str], sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Views of a fused linear's outputs under the names of its parts."""
    named = dict(zip((f"{name}.weight" for name in names), torch.split(linear.weight, list(sizes)), strict=True))
    if linear.bias is not None:
        named |= zip((f"{name}.bias" for name in names), torch.split(linear.bias, list(sizes)), strict=True)
    return named
