"""What a turn costs: time to first token of 32 new tokens behind 1k to 16k of history; and what a fork costs.

    python scripts/bench_sessions.py [--model M] [--lengths 1024,4096,16384] [--rounds 7] [--json FILE]

session     the next turn of a session that holds its row
tree        the same tokens as one prompt, found in the prefix tree (sent as ids: a client would tokenise it all too)
no cache    the same tokens as one prompt, computed
host        planning, the page tables and the attention's plan of that first step: all but the model, session and tree
fork        of a session with such a history

Every round measures all of them in turn on the same history. Without --model it makes a random one of 4 layers with
a context of 20k, since what is measured does not depend on what the weights say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from engine import LLM, SamplingParams
from engine.core import EngineCore

NUM_NEW = 32
ONE = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
NO_CACHE_LIMIT = 4096
"""Longer prompts are not computed from scratch here: it takes minutes and says nothing new."""


def random_model(folder: Path) -> Path:
    """A Llama of 4 layers and 256 dimensions with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=20_480,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet | {f"<{i}>": i for i in range(256, 1024)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


class Stopwatch:
    """Time to first token: from here to the end of a request of one token."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._begun = time.perf_counter()

    def run(self) -> tuple[float, float]:
        """Milliseconds until nothing is left to do, and those of them that were not the model's."""
        while self._core.has_work:
            self._core.step()
        total = (time.perf_counter() - self._begun) * 1e3
        return total, total - self._core.timings[-1].device_s * 1e3


def turns(core: EngineCore, length: int, rounds: int) -> dict[str, Any]:
    """Medians over paired rounds at one length of history."""
    rng = np.random.default_rng(length)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(4, core.vocab_size, n).astype(np.int32)

    session = core.sessions.open()
    core.add_turn(session.id, tokens(length - 1), ONE)
    Stopwatch(core).run()
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        begun = time.perf_counter()
        fork = core.sessions.fork(session.id)  # the turn runs on it, so that every round has the same history
        seen["fork_ms"].append((time.perf_counter() - begun) * 1e3)
        watch = Stopwatch(core)
        core.add_turn(fork.id, tokens(NUM_NEW), ONE)
        total, host = watch.run()
        seen["session_ms"].append(total)
        seen["session_host_ms"].append(host)
        core.close_session(fork.id)
        watch = Stopwatch(core)
        core.add(np.concatenate([session.log.tokens, tokens(NUM_NEW)]), ONE)
        total, host = watch.run()
        seen["tree_ms"].append(total)
        seen["tree_host_ms"].append(host)
        if length <= NO_CACHE_LIMIT:
            watch = Stopwatch(core)
            core.add(tokens(length + NUM_NEW), ONE)
            seen["no_cache_ms"].append(watch.run()[0])
    core.close_session(session.id)
    return {"history": length} | {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a built-in name, a GGUF file or a directory; a random one when not given")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384", help="tokens of history, commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    lengths = [int(word) for word in options.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(random_model(Path(folder)))
        llm = LLM(model, page_size=options.page_size, max_total_tokens=4 * (max(lengths) + 64), chunked_prefill_size=-1)
        turns(llm.core, min(lengths), 2)  # warm up
        results = [turns(llm.core, length, options.rounds) for length in lengths]
    print(
        f"{'history':>8}{'session':>10}{'tree':>10}{'no cache':>10}   host: {'session':>8}{'tree':>9}{'fork':>9}   ms"
    )
    for row in results:
        no_cache = f"{row['no_cache_ms']:10.1f}" if "no_cache_ms" in row else f"{'-':>10}"
        print(
            f"{row['history']:>8}{row['session_ms']:10.1f}{row['tree_ms']:10.1f}{no_cache}"
            f"         {row['session_host_ms']:8.2f}{row['tree_host_ms']:9.2f}{row['fork_ms']:9.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
