"""Hugging Face transformers as a worker: eager, sdpa attention, DynamicCache, a greedy loop without `generate`."""

from __future__ import annotations

import argparse

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from worker import WARM_STEPS, Prompts, Reply, file_bytes, reply, serve, start_watch


class TransformersEngine:
    """The caches of `decode` are kept for each batch size and cropped to the prompts after it."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        dtype = getattr(torch, options.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa").eval()
        self.vocab_size = self.model.config.vocab_size
        self.version = f"{transformers.__version__}, sdpa, torch {torch.__version__}"
        self.weight_bytes = file_bytes(options.model)
        self._kept: dict[int, tuple[DynamicCache, torch.Tensor]] = {}

    @property
    def kv_bytes(self) -> int:
        layers = [layer for cache, _ in self._kept.values() for layer in cache.layers]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def prefill(self, prompt: list[int]) -> None:
        self._next(torch.tensor([prompt]), DynamicCache(config=self.model.config)).tolist()

    @torch.inference_mode()
    def decode(self, prompts: Prompts, steps: int) -> Reply:
        if len(prompts) not in self._kept:
            cache = DynamicCache(config=self.model.config)
            self._kept[len(prompts)] = cache, self._next(torch.tensor(prompts), cache)
        cache, token_ids = self._kept[len(prompts)]
        for _ in range(WARM_STEPS):
            token_ids = self._next(token_ids, cache)
        watch = start_watch()
        for _ in range(steps):
            token_ids = self._next(token_ids, cache)
            token_ids.tolist()
        timed = reply(len(prompts) * steps, watch)
        cache.crop(-(WARM_STEPS + steps))  # a negative number: how many tokens to take off the end
        return timed

    @torch.inference_mode()
    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """One cache for all conversations, which grow in step; each turn computes what is new."""
        cache = DynamicCache(config=self.model.config)
        last = torch.empty(len(turns[0]), 0, dtype=torch.int64)
        for prompts in turns:
            last = self._next(torch.cat([last, torch.tensor(prompts)], 1), cache)
            for _ in range(num_out - 1):
                last = self._next(last, cache)
                last.tolist()

    @torch.inference_mode()
    def _next(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Greedy next tokens, int64 [batch, 1], of token ids [batch, tokens] behind the cache."""
        output = self.model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return chosen


if __name__ == "__main__":
    serve(TransformersEngine)
