"""llama.cpp as a worker, through the low-level API of llama-cpp-python: one sequence id a request, `llama_decode`."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from worker import WARM_STEPS, Prompts, Reply, file_bytes, reply, serve, start_watch

BATCH_TOKENS = 512
F32 = 0  # ggml type of the KV with float32; with bfloat16 it stays llama.cpp's own default, float16, as many bytes


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None: ...


class Context:
    """A `llama_context` of its own KV for `num_sequences` sequences of up to `length` tokens.

    It computes up to `batch_tokens` tokens at once, and no more in one call.
    """

    def __init__(
        self, model: Any, options: argparse.Namespace, num_sequences: int, length: int, batch_tokens: int
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = (length + 16) * num_sequences
        params.n_batch = params.n_ubatch = max(batch_tokens, num_sequences)
        params.n_threads = params.n_threads_batch = options.threads
        params.kv_unified = False
        if options.dtype == "float32":
            params.type_k = params.type_v = F32
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp could not make a context of {params.n_ctx} tokens for {options.model}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._batch_tokens = batch_tokens
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        layers, heads = llama_cpp.llama_model_n_layer(model), llama_cpp.llama_model_n_head_kv(model)
        head_dim = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
        value_bytes = 4 if options.dtype == "float32" else 2
        self.kv_bytes = 2 * layers * heads * head_dim * value_bytes * llama_cpp.llama_n_ctx(self._context)

    def forget(self, sequence: int, start: int) -> None:
        """Drop a sequence's tokens from `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def prompts(self, prompts: Prompts, sequences: Sequence[int], start: int) -> list[int]:
        """Compute prompts of one length at `start` of their sequences, together; returns the next token of each."""
        length = len(prompts[0])
        tokens = [
            (token_id, start + i, sequence, i == length - 1)
            for sequence, prompt in zip(sequences, prompts, strict=True)
            for i, token_id in enumerate(prompt)
        ]
        found = []
        for first in range(0, len(tokens), self._batch_tokens):
            part = tokens[first : first + self._batch_tokens]
            self._run(part)
            found += [self._best(i) for i, (_, _, _, is_wanted) in enumerate(part) if is_wanted]
        return found

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        """One token of sequences 0, 1, ...; returns the next of each."""
        self._run([(token_id, position, sequence, True) for sequence, token_id in enumerate(token_ids)])
        return [self._best(i) for i in range(len(token_ids))]

    def _run(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Tokens as (id, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token_id, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode ended with status {status}")

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


class LlamaCppEngine:
    """Sequences `[0, max_batch)` hold the prompts of `decode` from round to round; the last one is for `prefill`.

    Conversations have a context of their own, made when the first is asked for.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options.model.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp could not open {options.model}")
        self._options = options
        self._context = Context(self._model, options, options.max_batch + 1, options.max_len, BATCH_TOKENS)
        self._talk: Context | None = None
        self._spare = options.max_batch
        self._held: dict[int, int] = {}
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.version = llama_cpp.__version__
        self.weight_bytes = file_bytes(options.model)

    @property
    def kv_bytes(self) -> int:
        return self._context.kv_bytes + (self._talk.kv_bytes if self._talk else 0)

    def prefill(self, prompt: list[int]) -> None:
        self._context.forget(self._spare, 0)
        self._context.prompts([prompt], [self._spare], 0)

    def decode(self, prompts: Prompts, steps: int) -> Reply:
        for sequence, prompt in enumerate(prompts):
            if sequence not in self._held:
                self._held[sequence] = self._context.prompts([prompt], [sequence], 0)[0]
        token_ids, length = [self._held[i] for i in range(len(prompts))], len(prompts[0])
        for step in range(WARM_STEPS):
            token_ids = self._context.step(token_ids, length + step)
        watch = start_watch()
        for step in range(steps):
            token_ids = self._context.step(token_ids, length + WARM_STEPS + step)
        timed = reply(len(prompts) * steps, watch)
        for sequence in range(len(prompts)):
            self._context.forget(sequence, length)
        return timed

    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """A sequence for each conversation, which keeps its KV, as a slot of llama.cpp's server does."""
        if self._talk is None:
            together = len(turns[0]) * (len(turns[0][0]) + 1)
            most, length = self._options.sessions, self._options.session_len
            self._talk = Context(self._model, self._options, most, length, max(BATCH_TOKENS, together))
        sequences, position = range(len(turns[0])), 0
        last: Prompts = [[] for _ in sequences]
        for prompts in turns:
            asked = [one + prompt for one, prompt in zip(last, prompts, strict=True)]
            token_ids = self._talk.prompts(asked, sequences, position)
            position += len(asked[0])
            for _ in range(num_out - 1):
                token_ids = self._talk.step(token_ids, position)
                position += 1
            last = [[token_id] for token_id in token_ids]
        for sequence in sequences:
            self._talk.forget(sequence, 0)


if __name__ == "__main__":
    serve(LlamaCppEngine)
