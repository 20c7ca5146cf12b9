"""llama.cpp as a worker, through the low-level API of llama-cpp-python: one sequence id a request, `llama_decode`."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np
from worker import WARM_STEPS, Reply, reply, serve, start_watch

BATCH_TOKENS = 512
F32 = 0  # ggml type of the KV with float32; with bfloat16 it stays llama.cpp's own default, float16, as many bytes


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None: ...


class LlamaCppEngine:
    """Sequences `[0, max_batch)` hold the prompts of `decode` from round to round; the last one is for `prefill`."""

    def __init__(self, options: argparse.Namespace) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(options.model.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = options.max_batch + 1
        params.n_ctx = (options.max_len + 16) * params.n_seq_max
        params.n_batch = params.n_ubatch = max(BATCH_TOKENS, options.max_batch)
        params.n_threads = params.n_threads_batch = options.threads
        params.kv_unified = False
        if options.dtype == "float32":
            params.type_k = params.type_v = F32
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp could not open {options.model}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._spare = options.max_batch
        self._held: dict[int, int] = {}
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.version = llama_cpp.__version__

    def prefill(self, prompt: list[int]) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, self._spare, 0, -1)
        self._prompt(prompt, self._spare)

    def decode(self, prompts: list[list[int]], steps: int) -> Reply:
        for sequence, prompt in enumerate(prompts):
            if sequence not in self._held:
                self._held[sequence] = self._prompt(prompt, sequence)
        token_ids, context = [self._held[i] for i in range(len(prompts))], len(prompts[0])
        for step in range(WARM_STEPS):
            token_ids = self._step(token_ids, context + step)
        watch = start_watch()
        for step in range(steps):
            token_ids = self._step(token_ids, context + WARM_STEPS + step)
        timed = reply(len(prompts) * steps, watch)
        for sequence in range(len(prompts)):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1)
        return timed

    def _prompt(self, prompt: list[int], sequence: int) -> int:
        for first in range(0, len(prompt), BATCH_TOKENS):
            part = prompt[first : first + BATCH_TOKENS]
            wanted = [first + i == len(prompt) - 1 for i in range(len(part))]
            self._run(part, range(first, first + len(part)), [sequence] * len(part), wanted)
        return self._best(-1)

    def _step(self, token_ids: list[int], position: int) -> list[int]:
        n = len(token_ids)
        self._run(token_ids, [position] * n, range(n), [True] * n)
        return [self._best(i) for i in range(n)]

    def _run(
        self, token_ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for i, (token_id, position, sequence, has_logits) in enumerate(
            zip(token_ids, positions, sequences, wanted, strict=True)
        ):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode ended with status {status}")

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCppEngine)
