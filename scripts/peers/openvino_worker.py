"""OpenVINO GenAI as a worker: its continuous batching over a GGUF file, prefix caching on, stepped by hand.

What its users get by default is left so: on a CPU it computes in bfloat16 where the CPU can, and it chooses the KV's
precision itself.
"""

from __future__ import annotations

import argparse
from itertools import count
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import WARM_STEPS, Prompts, Reply, file_bytes, reply, serve, start_watch

BATCH_TOKENS = 4096
KV_GIB = 1


class OpenVinoEngine:
    """Prompts of `decode` are in the prefix cache after the first time; those of `prefill` are new each time."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = KV_GIB
        scheduling.enable_prefix_caching = True
        scheduling.max_num_seqs = max(options.max_batch, options.sessions)
        scheduling.max_num_batched_tokens = BATCH_TOKENS
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self.pipe = openvino_genai.ContinuousBatchingPipeline(options.model, scheduling, "CPU", properties)
        self.vocab_size = len(self.pipe.get_tokenizer().get_vocab())
        self.version = openvino_genai.__version__
        self.weight_bytes = file_bytes(options.model)
        self.kv_bytes = KV_GIB << 30
        self._ids = count()
        self._known: set[int] = set()

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def decode(self, prompts: Prompts, steps: int) -> Reply:
        if len(prompts) not in self._known:
            self._generate(prompts, 1)
            self._known.add(len(prompts))
        handles = self._add(prompts, 1 + 2 * len(prompts) + WARM_STEPS + steps)
        while not all(handle.can_read() for handle in handles):
            self.pipe.step()
        for _ in range(WARM_STEPS):
            self.pipe.step()
        watch = start_watch()
        for _ in range(steps):
            self.pipe.step()
        timed = reply(len(prompts) * steps, watch)
        for handle in handles:
            handle.cancel()
        self._drain()
        return timed

    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """Each turn sends the whole conversation; the prefix cache has all but what is new."""
        histories: Prompts = [[] for _ in turns[0]]
        for prompts in turns:
            asked = [history + prompt for history, prompt in zip(histories, prompts, strict=True)]
            histories = [ids + out for ids, out in zip(asked, self._generate(asked, num_out), strict=True)]

    def _generate(self, prompts: Prompts, num_tokens: int) -> Prompts:
        handles = self._add(prompts, num_tokens)
        self._drain()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def _add(self, prompts: Prompts, num_tokens: int) -> list[Any]:
        config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        return [
            self.pipe.add_request(next(self._ids), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]

    def _drain(self) -> None:
        while self.pipe.has_non_finished_requests():
            self.pipe.step()


if __name__ == "__main__":
    serve(OpenVinoEngine)
