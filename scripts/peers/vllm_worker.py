"""vLLM on the CPU as a worker: the offline engine in this process. Its variables are set by `environments.py`.

vLLM shows no single step, so decode is the time of `steps + 1` tokens less the time of 1 token, both over prompts that
its prefix cache has; `prefill` gets a new prompt each time, of which the cache has nothing. Which platform it runs on
("cpu", or AMD's where zentorch is installed) is part of the version.
"""

from __future__ import annotations

import argparse
import os

import torch
import vllm
from vllm.platforms import current_platform
from worker import Prompts, Reply, file_bytes, reply, serve, start_watch


class VllmEngine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.llm = vllm.LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=2 * max(options.max_len, options.session_len),
            max_num_seqs=max(options.max_batch, options.sessions),
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )
        self.vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        self.version = f"{vllm.__version__}, {type(current_platform).__name__}, torch {torch.__version__}"
        self.weight_bytes = file_bytes(options.model)
        self.kv_bytes = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
        self._known: set[int] = set()

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def decode(self, prompts: Prompts, steps: int) -> Reply:
        if len(prompts) not in self._known:
            self._generate(prompts, 2)
            self._known.add(len(prompts))
        one = start_watch()
        self._generate(prompts, 1)
        first = reply(0, one)
        watch = start_watch()
        self._generate(prompts, steps + 1)
        timed = reply(len(prompts) * steps, watch)
        return timed | {name: timed[name] - first[name] for name in ("wall_s", "cpu_s")}

    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """Each turn sends the whole conversation; the prefix cache has all but what is new."""
        histories: Prompts = [[] for _ in turns[0]]
        for prompts in turns:
            asked = [history + prompt for history, prompt in zip(histories, prompts, strict=True)]
            histories = [ids + out for ids, out in zip(asked, self._generate(asked, num_out), strict=True)]

    def _generate(self, prompts: Prompts, num_tokens: int) -> Prompts:
        inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        done = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]


if __name__ == "__main__":
    serve(VllmEngine)
