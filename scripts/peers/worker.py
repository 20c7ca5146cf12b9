"""One engine in a process of its own that measures on command: a JSON object a line in, one a line out.

    {"do": "prefill", "seed": 7, "tokens": 512}                 -> {"tokens": 512, "wall_s": ..., "cpu_s": ...}
    {"do": "decode", "batch": 8, "context": 512, "steps": 32}   -> {"tokens": 256, "wall_s": ..., "cpu_s": ...}

The process lives through all rounds, so weights are loaded once and only what is timed runs. It runs in the peer's own
environment: standard library only here. What a library prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

WARM_STEPS = 2
"""Untimed steps before a decode that is timed."""

Watch = tuple[float, float]


class Engine(Protocol):
    """What a worker must be able to do. Greedy, end tokens ignored; every prompt token is computed in `prefill`."""

    version: str
    vocab_size: int

    def prefill(self, prompt: list[int]) -> None:
        """Compute one prompt to its first token; nothing of it may come from a cache."""

    def decode(self, prompts: list[list[int]], steps: int) -> Reply:
        """Time `steps` steps of all prompts together; their own computation is not timed and may be kept."""


Reply = dict[str, float]


def start_watch() -> Watch:
    return time.perf_counter(), time.process_time()


def reply(num_tokens: float, watch: Watch) -> Reply:
    """Tokens, and seconds since `watch` by the wall clock and of this process's CPU over all threads."""
    wall_s, cpu_s = time.perf_counter() - watch[0], time.process_time() - watch[1]
    return {"tokens": num_tokens, "wall_s": wall_s, "cpu_s": cpu_s}


def prompt_of(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Seeded random token ids, the same for every engine."""
    draw = random.Random(seed)
    return [draw.randrange(100, min(40_000, vocab_size - 200)) for _ in range(num_tokens)]


def serve(load: Callable[[argparse.Namespace], Engine]) -> None:
    """Load the engine named on the command line and answer commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True, help="tokens of one sequence")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # from here on, prints of any library, C or Python, go to standard error
    engine = load(options)
    print(json.dumps({"ready": engine.version}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies)


def answer(engine: Engine, command: dict[str, Any]) -> Reply:
    if command["do"] == "prefill":
        prompt = prompt_of(command["seed"], command["tokens"], engine.vocab_size)
        watch = start_watch()
        engine.prefill(prompt)
        return reply(len(prompt), watch)
    prompts = [prompt_of(seed, command["context"], engine.vocab_size) for seed in range(command["batch"])]
    return engine.decode(prompts, command["steps"])
