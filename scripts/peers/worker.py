"""One engine in a process of its own that measures on command: a JSON object a line in, one a line out.

    {"do": "prefill", "seed": 7, "tokens": 512}                 -> {"tokens": 512, "wall_s": ..., "cpu_s": ...}
    {"do": "decode", "batch": 8, "context": 512, "steps": 32}   -> {"tokens": 256, "wall_s": ..., "cpu_s": ...}
    {"do": "turns", "seed": 7, "sessions": 8, "turns": 10, "new": 64, "out": 64}
                                                                -> {"tokens": 5120, "wall_s": ..., "cpu_s": ...}
    {"do": "memory"}         -> {"peak_bytes": ..., "weight_bytes": ..., "kv_bytes": ...}

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
from pathlib import Path
from typing import Any, Protocol

WARM_STEPS = 2
"""Untimed steps before a decode that is timed."""

Watch = tuple[float, float]
Prompts = list[list[int]]


class Engine(Protocol):
    """What a worker must be able to do. Greedy, end tokens ignored; every prompt token is computed in `prefill`.

    Attributes:
        weight_bytes: of the weights as the process holds them.
    """

    version: str
    vocab_size: int
    weight_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV that the process holds, or of the whole pool where there is one."""

    def prefill(self, prompt: list[int]) -> None:
        """Compute one prompt to its first token; nothing of it may come from a cache."""

    def decode(self, prompts: Prompts, steps: int) -> Reply:
        """Time `steps` steps of all prompts together; their own computation is not timed and may be kept."""

    def turns(self, turns: list[Prompts], num_out: int) -> None:
        """Hold one conversation for each prompt of a turn, all at the same time.

        A turn adds a prompt to each conversation and decodes `num_out` tokens; the next turn comes behind them. The
        engine keeps what it can of the conversations, the way its users would have it do so.
        """


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


def turns_of(command: dict[str, Any], vocab_size: int) -> list[Prompts]:
    """What each session says in each turn: [turn][session][token]; no two sessions begin alike."""
    sessions, new = range(command["sessions"]), command["new"]
    first = command["seed"] * 1_000_000
    return [
        [prompt_of(first + 1000 * turn + session, new, vocab_size) for session in sessions]
        for turn in range(command["turns"])
    ]


def file_bytes(model: str) -> int:
    """Bytes of a model file, or of a directory's weights."""
    path = Path(model)
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def peak_bytes() -> int:
    """Most memory that this process has had resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def serve(load: Callable[[argparse.Namespace], Engine]) -> None:
    """Load the engine named on the command line and answer commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True, help="tokens of one sequence of prefill and decode")
    parser.add_argument("--sessions", type=int, required=True, help="most conversations at once; 0 for none")
    parser.add_argument("--session-len", type=int, required=True, help="tokens of one conversation")
    parser.add_argument("--quantization", help="Rung's own flag; no other worker reads it")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # from here on, prints of any library, C or Python, go to standard error
    engine = load(options)
    print(json.dumps({"ready": engine.version}), file=replies)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies)


def answer(engine: Engine, command: dict[str, Any]) -> Reply:
    what = command["do"]
    if what == "memory":
        return {"peak_bytes": peak_bytes(), "weight_bytes": engine.weight_bytes, "kv_bytes": engine.kv_bytes}
    if what == "prefill":
        prompt = prompt_of(command["seed"], command["tokens"], engine.vocab_size)
        watch = start_watch()
        engine.prefill(prompt)
        return reply(len(prompt), watch)
    if what == "turns":
        said = turns_of(command, engine.vocab_size)
        watch = start_watch()
        engine.turns(said, command["out"])
        return reply(command["turns"] * command["sessions"] * command["out"], watch)
    prompts = [prompt_of(seed, command["context"], engine.vocab_size) for seed in range(command["batch"])]
    return engine.decode(prompts, command["steps"])
