"""Rung as a worker: token ids straight into the engine's core, as `rung bench` does."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from worker import WARM_STEPS, Prompts, Reply, serve

from devices.pages import IntArray
from engine import LLM, SamplingParams
from engine.bench import decode, prefill
from engine.runner import ModelRunner


class RungEngine:
    """The prompts of `decode` stay in the prefix tree between rounds; those of `prefill` are new each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        tokens = (options.max_batch + 2) * (options.max_len + 64) + options.sessions * (options.session_len + 64)
        asked = {"quantization": options.quantization} if options.quantization else {}
        self.llm = LLM(options.model, dtype=options.dtype, max_total_tokens=tokens, **asked)
        core, runner = self.llm.core, self.llm.core.runner
        assert isinstance(runner, ModelRunner)
        self.vocab_size = core.vocab_size
        self.weight_bytes = runner.model.step_bytes
        self.kv_bytes = sum(layer.k.nbytes + layer.v.nbytes for layer in runner.kv.layers)
        weights = f"quantization {options.quantization}" if options.quantization else options.dtype
        self.version = f"{weights}, page {core.allocator.geometry.page_size}, torch {torch.__version__}"

    def prefill(self, prompt: list[int]) -> None:
        prefill(self.llm.core, [ids_of(prompt)])

    def decode(self, prompts: Prompts, steps: int) -> Reply:
        ids = [ids_of(prompt) for prompt in prompts]
        decode(self.llm.core, ids, WARM_STEPS, spare=len(ids))
        span, _ = decode(self.llm.core, ids, steps, spare=len(ids))
        return {"tokens": span.num_tokens, "wall_s": span.wall_s, "cpu_s": span.cpu_s}

    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """Sessions: each holds its row between turns."""
        core, params = self.llm.core, SamplingParams(temperature=0.0, max_new_tokens=num_out, ignore_eos=True)
        sessions = [core.sessions.open() for _ in turns[0]]
        for prompts in turns:
            for session, prompt in zip(sessions, prompts, strict=True):
                core.add_turn(session.id, ids_of(prompt), params)
            while core.has_work:
                core.step()
        for session in sessions:
            core.close_session(session.id)


def ids_of(prompt: list[int]) -> IntArray:
    return np.array(prompt, dtype=np.int32)


if __name__ == "__main__":
    serve(RungEngine)
