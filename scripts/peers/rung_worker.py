"""Rung as a worker: token ids straight into the engine's core, as `rung bench` does."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from worker import WARM_STEPS, Reply, serve

from engine import LLM
from engine.bench import decode, prefill


class RungEngine:
    """The prompts of `decode` stay in the prefix tree between rounds; those of `prefill` are new each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        tokens = (options.max_batch + 2) * (options.max_len + 64)
        self.llm = LLM(options.model, dtype=options.dtype, max_total_tokens=tokens)
        self.vocab_size = self.llm.core.vocab_size
        self.version = f"page {self.llm.core.allocator.geometry.page_size}, torch {torch.__version__}"

    def prefill(self, prompt: list[int]) -> None:
        prefill(self.llm.core, [np.array(prompt, dtype=np.int32)])

    def decode(self, prompts: list[list[int]], steps: int) -> Reply:
        ids = [np.array(prompt, dtype=np.int32) for prompt in prompts]
        decode(self.llm.core, ids, WARM_STEPS, spare=len(ids))
        span, _ = decode(self.llm.core, ids, steps, spare=len(ids))
        return {"tokens": span.num_tokens, "wall_s": span.wall_s, "cpu_s": span.cpu_s}


if __name__ == "__main__":
    serve(RungEngine)
