"""vLLM on the CPU as a worker: the offline engine in this process. Its variables are set by `environments.py`.

vLLM shows no single step, so decode is the time of `steps + 1` tokens less the time of 1 token, both over prompts that
its prefix cache has; `prefill` gets a new prompt each time, of which the cache has nothing.
"""

from __future__ import annotations

import argparse

import torch
import vllm
from worker import Reply, reply, serve, start_watch


class VllmEngine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.llm = vllm.LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=2 * options.max_len,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )
        self.vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        self.version = f"{vllm.__version__}, torch {torch.__version__}"
        self._known: set[int] = set()

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> Reply:
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

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.llm.generate(inputs, params, use_tqdm=False)


if __name__ == "__main__":
    serve(VllmEngine)
