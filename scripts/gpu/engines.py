"""The engine on the device: its greedy tokens against the CPU's, and `rung bench` on a real and on a random model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from engine import LLM, SamplingParams
from engine.models.config import ModelConfig

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "page 16, chunks of 48, eager": {"page_size": 16, "chunked_prefill_size": 48, "disable_cuda_graph": True},
    "page 64, graphs": {"page_size": 64, "cuda_graph_max_bs": 8},
    "page 128, no tree, graphs": {"page_size": 128, "disable_radix_cache": True, "cuda_graph_max_bs": 8},
    "plain torch": {"page_size": 64, "kernels": "torch"},
}


def matrix(model: Path, num_new: int, lengths: tuple[int, ...]) -> dict[str, bool]:
    """Whether greedy fp32 tokens are those of the plain engine on the CPU, by configuration."""
    params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
    prompts = [[(7 * i * i + 3 * n) % 290 + 3 for i in range(n)] for n in lengths]

    def tokens(**arguments: Any) -> list[list[int]]:
        llm = LLM(str(model), dtype="float32", max_total_tokens=4096, max_running_requests=8, **arguments)
        return [result.token_ids for result in llm.generate(prompts, params)]

    want = tokens(device="cpu", page_size=16, kernels="torch", disable_radix_cache=True)
    return {name: tokens(device="cuda", **arguments) == want for name, arguments in CONFIGURATIONS.items()}


def bench(model: Path, batch_sizes: tuple[int, ...], **arguments: Any) -> list[dict[str, Any]]:
    """`rung bench`, two rounds: its rows."""
    from dataclasses import asdict

    from engine.bench import BenchPlan, run_bench

    plan = BenchPlan(batch_sizes, input_len=512, output_len=33, rounds=2)
    tokens = 2 * (max(batch_sizes) + 2) * 640
    llm = LLM(
        str(model), device="cuda", max_total_tokens=tokens, max_running_requests=max(batch_sizes) + 1, **arguments
    )
    return [asdict(row) for row in run_bench(llm, plan).rows]


class RandomSource:
    """Random weights of a config, made on the GPU; see `engine.weights.source.WeightSource`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (config.vocab_size, hidden),
        }
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
            shapes[f"{layer}.self_attn.q_proj.weight"] = (config.num_heads * dim, hidden)
            shapes |= {f"{layer}.self_attn.{x}_proj.weight": (config.num_kv_heads * dim, hidden) for x in "kv"}
            shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, config.num_heads * dim)
            shapes |= {f"{layer}.mlp.{x}_proj.weight": (wide, hidden) for x in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, wide)
        return shapes

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        draw = torch.Generator(device)
        for name, shape in self._shapes().items():
            draw.manual_seed(crc32(name.encode()))  # the same weights each time
            weight = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=draw) * 0.02
            yield name, weight + 1 if name.endswith("norm.weight") else weight


SHAPE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_model(folder: Path, shape: dict[str, Any]) -> Path:
    """A folder with a config of this shape and a tokenizer; its weights are `RandomSource`'s."""
    from tiny_models import tiny_config
    from tiny_tokenizers import save_tiny_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder, "byte_level")
    config = tiny_config("llama").to_dict() | shape | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def with_random_weights(act: Callable[[], Any]) -> Any:
    """Call `act` while folders of models have random weights."""
    from engine import assembly

    plain = assembly.open_source
    assembly.open_source = RandomSource  # type: ignore[assignment]
    try:
        return act()
    finally:
        assembly.open_source = plain
