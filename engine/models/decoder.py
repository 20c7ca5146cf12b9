"""A decoder of the Llama family: pre-norm, rotary attention over paged KV, gated MLP or mixture of experts.

What tells the architectures of the family apart (biases, norms of the heads, windows, experts) is declared in the
config; there is one forward for all. `forward` sees a step as a flat list of tokens: whose they are is the attention
backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from devices.base import AttentionBackend, Device, KvLayer, Linear
from engine.models.config import ModelConfig
from engine.models.layers import GatedMlp, Mlp, MoeMlp
from engine.models.parts import Named, Parts
from engine.models.rope import Rotation, build_rope
from engine.weights.slot import Quantization

LM_HEAD = "lm_head.weight"


class DecoderLayer:
    """One layer; its KV is the attention backend's."""

    def __init__(self, config: ModelConfig, index: int, parts: Parts) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        self._operators = parts.operators
        self.q_size, self.kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.input_norm, self.post_norm = parts.tensor(hidden), parts.tensor(hidden)
        self.qkv = parts.linear(hidden, (self.q_size, self.kv_size, self.kv_size), config.qkv_bias)
        self.out = parts.linear(self.q_size, (hidden,), config.out_bias)
        self.q_norm = parts.tensor(dim) if config.qk_norm else None
        self.k_norm = parts.tensor(dim) if config.qk_norm else None
        self.mlp: Mlp
        if config.moe is not None and index in config.moe.layers:
            self.mlp = MoeMlp(parts, hidden, config.moe)
        else:
            self.mlp = GatedMlp(parts, hidden, config.intermediate_size, config.mlp_bias)

    def destinations(self, prefix: str) -> Named:
        named: Named = {
            f"{prefix}.input_layernorm.weight": self.input_norm,
            f"{prefix}.post_attention_layernorm.weight": self.post_norm,
        }
        if self.q_norm is not None and self.k_norm is not None:
            named[f"{prefix}.self_attn.q_norm.weight"] = self.q_norm
            named[f"{prefix}.self_attn.k_norm.weight"] = self.k_norm
        named |= self.qkv.destinations([f"{prefix}.self_attn.{part}_proj" for part in "qkv"])
        named |= self.out.destinations([f"{prefix}.self_attn.o_proj"])
        return named | self.mlp.destinations(f"{prefix}.mlp")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, turns: Rotation, attention: AttentionBackend, kv: KvLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input and its output are sums of two addends, all [tokens, hidden_size]: whoever norms adds."""
        operators, eps = self._operators, self.config.rms_norm_eps
        qkv, residual = operators.norm_linear(x, residual, self.input_norm, eps, self.qkv.linear)
        attended = self._attend(qkv, turns, attention, kv)
        x, residual = operators.linear_norm(attended, residual, self.out.linear, self.post_norm, eps)
        return self.mlp(x), residual

    def _attend(self, qkv: torch.Tensor, turns: Rotation, attention: AttentionBackend, kv: KvLayer) -> torch.Tensor:
        """What the heads get, [tokens, q_size]; qkv: queries, keys and values, side by side."""
        config, num_tokens = self.config, len(qkv)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        # `split_with_sizes`, because `torch.split` takes longer to find out that it is meant.
        by_head = qkv.view(num_tokens, heads + 2 * kv_heads, dim)
        qk, v = by_head.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes([heads, kv_heads], dim=1)
            qk = torch.cat([self._norm(q, self.q_norm), self._norm(k, self.k_norm)], dim=1)
        q, k = self._operators.rotate(qk, turns.cos, turns.sin).split_with_sizes([heads, kv_heads], dim=1)
        return attention.forward(q, k, v, kv).reshape(num_tokens, self.q_size)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._operators.rms_norm(x, weight, self.config.rms_norm_eps)


class Decoder:
    """The model on one device. Fill every entry of `destinations`, then `prepare` it, then it runs."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: Device,
        context_len: int,
        quantization: Quantization = "none",
    ) -> None:
        """`context_len`: the longest sequence that the engine takes, in tokens; some ropes depend on it."""
        self.config = config
        self._parts = parts = Parts(dtype, device, quantization)
        self.rope = build_rope(config.rope, config.head_dim, context_len, device.torch_device)
        self._embedding = parts.table(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index, parts) for index in range(config.num_layers)]
        self.norm = parts.tensor(config.hidden_size)
        is_tied = config.tie_word_embeddings
        self._head = self._embedding if is_tied else parts.table(config.vocab_size, config.hidden_size)
        self._project: Linear

    def prepare(self) -> None:
        """Give the filled weights to the device; `destinations` may not be asked for again."""
        self._parts.prepare()
        self._project = self._head.linear(torch.float32)

    def destinations(self) -> Named:
        """Where each tensor of a model file goes: Hugging Face name -> a view of the weights."""
        named: Named = {"model.embed_tokens.weight": self._embedding.destination, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            named[LM_HEAD] = self._head.destination
        for index, layer in enumerate(self.layers):
            named |= layer.destinations(f"model.layers.{index}")
        return named

    @property
    def dtype(self) -> torch.dtype:
        return self._parts.dtype

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads, if it reaches all experts: all but an embedding that is not the head."""
        return self._parts.num_bytes - (0 if self.config.tie_word_embeddings else self._embedding.num_bytes)

    @property
    def is_static(self) -> bool:
        """Whether steps of one shape always launch the same work: experts are launched as their tokens demand."""
        return self.config.moe is None

    def optional_names(self) -> frozenset[str]:
        """Names that a file may hold and that are not loaded: the head of a tied model."""
        return frozenset({LM_HEAD}) if self.config.tie_word_embeddings else frozenset()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Sequence[AttentionBackend],
        kv_layers: Sequence[KvLayer],
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step whose attention was planned already.

        Args:
            token_ids, positions: int64 [tokens].
            attention, kv_layers: one of each layer; layers of the same window share a backend.
            wanted: places of the tokens whose output is wanted, int64 [wanted].
        Returns:
            Hidden states for `logits`, [wanted, hidden_size].
        """
        x = self._embedding.rows(token_ids)
        residual = torch.zeros_like(x)
        turns = self.rope.at(positions)
        for layer, backend, kv in zip(self.layers, attention, kv_layers, strict=True):
            x, residual = layer.forward(x, residual, turns, backend, kv)
        add_norm = self._parts.operators.add_rms_norm
        return add_norm(x[wanted], residual[wanted], self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [rows, vocab_size], of hidden states [rows, hidden_size]."""
        return self._project(hidden)
