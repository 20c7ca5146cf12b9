"""Compares widths of weights on one machine in one run: decode and prefill, and the mean NLL of a text. Never asserts.

    python scripts/bench_quantization.py [--model M] [--rounds N] [--threads N] [--batches 1,8,32] [--json FILE]

One engine for each width holds the same weights; rounds are interleaved. `file` runs a quantised file in its own bits,
the others start from its values as bf16: `none` as they are, `int8` and `int4` rounded. A rate is tokens a second, the
median over rounds, and in brackets tokens a CPU second, which says more on a busy machine. "busy" is CPU seconds a
second: below 0.9 of the threads another program took the cores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from convert import gguf_file

from engine import LLM, SamplingParams
from engine.bench import Span, decode, make_prompts, prefill
from engine.weights.catalog import cache_dir, resolve_model

TEXT = (
    "Rivers carry water, sand and news from the mountains to the sea. A bridge over one of them is old when the people "
    "who cross it no longer know who built it, and it is loved when they repair it without being asked. In spring the "
    "snow melts, the current grows brown and fast, and fishermen wait on the banks with their nets folded beside them. "
    "Children throw sticks from one side and run to the other to see whose comes out first."
)
CONTEXT = 512


def mean_nll(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_new_tokens=1, return_logprob=True, logprob_start_len=0)
    scores = llm.generate(llm.tokenizer.encode(TEXT), params).prompt_logprobs or []
    found = [score.logprob for score in scores if score is not None]
    return -math.fsum(found) / len(found)


def engines(model: str, max_batch: int, folder: Path) -> dict[str, LLM]:
    source = resolve_model(model, cache_dir(None))
    tokens = (max_batch + 2) * (CONTEXT + 128)
    floats = source if source.is_dir() else gguf_file(source, "bfloat16", folder / "bf16.gguf")
    made = {
        width: LLM(str(floats), dtype="bfloat16", quantization=width, max_total_tokens=tokens)
        for width in ("none", "int8", "int4")
    }
    if not source.is_dir():
        made["file"] = LLM(str(source), dtype="bfloat16", max_total_tokens=tokens)
    return made


def jobs(batches: tuple[int, ...], steps: int) -> dict[str, Callable[[LLM, int], Span]]:
    """What is measured: name -> a function of an engine and the number of the round."""

    def prefilled(llm: LLM, index: int) -> Span:
        [prompt] = make_prompts(np.random.default_rng(index), llm.core.vocab_size, batch_size=1, input_len=CONTEXT)
        llm.flush_cache()
        return prefill(llm.core, [prompt])

    def decoded(batch: int) -> Callable[[LLM, int], Span]:
        def run(llm: LLM, index: int) -> Span:
            rng = np.random.default_rng(batch)
            prompts = list(make_prompts(rng, llm.core.vocab_size, batch_size=batch, input_len=CONTEXT))
            return decode(llm.core, prompts, steps, spare=2 * batch)[0]

        return run

    return {f"prefill {CONTEXT}": prefilled} | {f"decode {batch}": decoded(batch) for batch in batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        made = engines(args.model, max(args.batches), Path(folder))
        results: list[dict[str, Any]] = []
        for width, llm in made.items():
            size = llm.core.runner.model.step_bytes
            results.append({"what": "weights", "width": width, "mb": size / 1e6, "nll": mean_nll(llm)})
            print(f"{width:<5} {size / 1e6:6.1f} MB a step, mean NLL {results[-1]['nll']:.4f}", flush=True)
        for what, job in jobs(args.batches, args.steps).items():
            spans: dict[str, list[Span]] = {width: [] for width in made}
            for index in range(args.rounds + 1):  # the first round warms up
                for width, llm in made.items():
                    spans[width].append(job(llm, index))
            for width, (_, *seen) in spans.items():
                rates = [span.num_tokens / span.wall_s for span in seen]
                per_cpu = statistics.median(span.num_tokens / span.cpu_s for span in seen)
                busy = statistics.median(span.cpu_s / span.wall_s for span in seen)
                row = {"what": what, "width": width, "tokens_per_s": rates, "tokens_per_cpu_s": per_cpu, "busy": busy}
                results.append(row)
                low, high, middle = min(rates), max(rates), statistics.median(rates)
                print(f"{what:<12} {width:<5} {middle:7.1f} ({low:.0f} to {high:.0f}) [{per_cpu:.1f}] busy {busy:.2f}")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
