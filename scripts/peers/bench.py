"""Compares Rung with other engines: same weights, prompts and threads, one process each, interleaved rounds.

    scripts/bench_peers --peers llama-cpp,openvino,vllm,vllm-zen --weights bfloat16 --rounds 5 --json peers.json
    scripts/bench_peers --peers llama-cpp,openvino --weights file --rung-quantization int4
    scripts/bench_peers --measures turns,start

prefill P   one prompt of P random tokens, nothing cached, to its first token
decode B    B requests with P tokens of context each, greedy: tokens/s over the batch
turns       8 conversations of 10 turns, 64 new tokens and 64 decoded in each, with each engine's own cache: decoded
            tokens/s over all of it
start       seconds from the start of a process to its first token, files and compilations cached; peak memory

Within a round each engine does each measure in turn; a ratio is Rung's rate over the peer's in the same round. Samples
that got less than --min-busy of their threads are left out with their pairs and counted. A peer that cannot run is
named with its reason. Exits with 1 when no peer could be compared, with 2 when Rung itself cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from convert import WEIGHTS, is_quantised
from environments import SetupError, peers
from processes import Command, Launch, Setting, Size, Worker, prepare
from ratios import RUNG, Sample, compare, turns
from report import Report, lines_of
from starts import Start, measure_starts

from engine.config import DEFAULT_MODEL
from engine.errors import RungError
from engine.weights.catalog import cache_dir, resolve_model

DEFAULT_ENV_DIR = Path.home() / ".cache" / "rung" / "peers"
MEASURES = ("prefill", "decode", "turns", "start")
QUANTISED_PEERS = ("rung-bf16", "llama-cpp", "openvino")
"""Asked for by default with quantised weights: Rung on bf16, and the engines that compute with such weights."""

SETTLE_S = 0.5
"""Waited before each sample: threads of the engine before it go on spinning for up to 0.2 s (Intel's OpenMP)."""

Note = Callable[[str], None]


def launches_of(
    options: argparse.Namespace, setting: Setting, size: Size, note: Note
) -> tuple[list[Launch], dict[str, str]]:
    """Rung and every peer that can be set up, and the reasons of those that cannot. Raises SetupError for Rung."""
    known, launches, skipped = peers(options.threads), [], {}
    for name in (RUNG, *options.peers):
        try:
            launches.append(prepare(known[name], setting, size))
        except SetupError as error:
            if name == RUNG:
                raise
            skipped[name] = str(error)
            note(f"{name} is skipped: {error}")
    return launches, skipped


def start(launches: Sequence[Launch], skipped: dict[str, str], note: Note) -> dict[str, Worker]:
    """The workers that came up. Raises SetupError when Rung did not."""
    workers = {}
    for launch in launches:
        note(f"starting {launch.name}")
        try:
            workers[launch.name] = Worker(launch)
        except SetupError as error:
            if launch.name == RUNG:
                raise
            skipped[launch.name] = str(error)
            note(f"{launch.name} is skipped: {error}")
    return workers


def measures_of(options: argparse.Namespace) -> dict[str, Command]:
    """What is measured in each round, by its name in the report."""
    found: dict[str, Command] = {}
    if "prefill" in options.measures:
        found[f"prefill {options.context}"] = {"do": "prefill", "tokens": options.context}
    for size in options.batch_sizes if "decode" in options.measures else ():
        found[f"decode {size}"] = {"do": "decode", "batch": size, "context": options.context, "steps": options.steps}
    if "turns" in options.measures:
        shape = {"sessions": options.sessions, "turns": options.turns}
        found["turns"] = {"do": "turns", **shape, "new": options.turn_tokens, "out": options.turn_tokens}
    return found


def size_of(options: argparse.Namespace) -> Size:
    has_turns = "turns" in options.measures
    return Size(
        max_batch=max(options.batch_sizes) if "decode" in options.measures else 1,
        max_len=options.context + options.steps + 8,
        sessions=options.sessions if has_turns else 0,
        session_len=2 * options.turns * options.turn_tokens if has_turns else 0,
    )


def measure(
    workers: dict[str, Worker], skipped: dict[str, str], options: argparse.Namespace, note: Note
) -> list[Sample]:
    """All rounds, after one that is thrown away. A worker that dies is moved to `skipped`."""
    samples = []
    for index in range(-1, options.rounds):
        for what, command in measures_of(options).items():
            short = {"turns": 1} if index < 0 and what == "turns" else {}  # enough to warm up
            for name in turns(list(workers), max(index, 0)):
                time.sleep(SETTLE_S)
                try:
                    answer = workers[name].ask(command | {"seed": 1000 + index} | short)
                except SetupError as error:
                    skipped[name] = str(error)
                    del workers[name]
                    note(f"{name} is skipped: {error}")
                    continue
                rate, busy = answer["tokens"] / answer["wall_s"], answer["cpu_s"] / answer["wall_s"]
                note(f"round {index + 1:2d}  {what:<12} {name:<14}{rate:10.1f} tokens/s  busy {busy:.2f}")
                if index >= 0:
                    samples.append(Sample(name, what, index, rate, busy))
    return samples


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in peers(1) if name != RUNG]
    unquantised = [name for name in names if name not in ("rung-bf16", "vllm-int8")]
    usual = f"{','.join(unquantised)}; with quantised weights {','.join(QUANTISED_PEERS)}"
    parser.add_argument("--peers", help=f"which, with commas between, of {','.join(names)}; default: {usual}")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a built-in name, a GGUF file or a directory")
    weights = "q8_0 and q4_0 are made from the model; file: a GGUF file's own. Peers that cannot use them get bfloat16"
    parser.add_argument("--weights", default="bfloat16", choices=WEIGHTS, help=weights)
    parser.add_argument(
        "--rung-quantization", help="Rung's --quantization; without it Rung does what it does by default"
    )
    parser.add_argument("--measures", default="prefill,decode", help=f"of {','.join(MEASURES)}: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--sessions", type=int, default=8, help="conversations at the same time")
    parser.add_argument("--turns", type=int, default=10, help="of each conversation")
    parser.add_argument("--turn-tokens", type=int, default=64, help="new tokens of a turn, and as many decoded")
    parser.add_argument("--starts", type=int, default=3, help="of each engine, after one that does not count")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--min-busy", type=float, default=0.9, help="share of the threads; 0 keeps every round")
    parser.add_argument("--env-dir", type=Path, default=DEFAULT_ENV_DIR, help="environments, models, logs")
    parser.add_argument("--json", type=Path, help="write every sample and ratio to this file")
    options = parser.parse_args(arguments)
    if options.peers is None:
        options.peers = ",".join(QUANTISED_PEERS if is_quantised(options.weights) else unquantised)
    options.peers = listed(parser, "--peers", options.peers, names)
    options.measures = listed(parser, "--measures", options.measures, MEASURES)
    try:
        options.batch_sizes = [int(size) for size in options.batch_sizes.split(",")]
    except ValueError:
        parser.error("--batch-sizes: must be whole numbers with commas between")
    counts = ("rounds", "steps", "context", "threads", "sessions", "turns", "turn_tokens", "starts")
    if min(*(getattr(options, name) for name in counts), *options.batch_sizes) < 1:
        parser.error(f"--{', --'.join(counts).replace('_', '-')} and --batch-sizes must be at least 1")
    return options


def listed(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> list[str]:
    """ "a,b" -> ["a", "b"], without repeats; ends the program on a name that is not known."""
    found = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in found if name not in known]
    if unknown:
        parser.error(f"{flag}: {', '.join(unknown)} is unknown; known are {', '.join(known)}")
    return found


def main() -> int:
    options, begun = parse(), time.monotonic()

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    versions: dict[str, str] = {}
    samples: list[Sample] = []
    starts: list[Start] = []
    measures = list(measures_of(options))
    try:
        source = resolve_model(options.model, cache_dir())
        setting = Setting(source, options.weights, options.rung_quantization, options.threads, options.env_dir)
        launches, skipped = launches_of(options, setting, size_of(options), note)
        if measures:
            workers = start(launches, skipped, note)
            versions = {name: worker.version for name, worker in workers.items()}
            samples = measure(workers, skipped, options, note)
            for worker in workers.values():
                worker.close()
        if "start" in options.measures:
            small = Size(max_batch=1, max_len=options.context)
            alone, _ = launches_of(options, setting, small, note)
            wanted = [launch for launch in alone if launch.name not in skipped]
            starts = measure_starts(wanted, skipped, options.starts, options.context, note)
    except (RungError, SetupError) as error:
        note(f"error: rung: {error}")
        return 2
    min_busy = options.min_busy * options.threads
    pairs = [compare(samples, peer, what, min_busy) for peer in versions if peer != RUNG for what in measures]
    report = Report(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        model=options.model,
        weights=options.weights,
        quantization=options.rung_quantization,
        threads=options.threads,
        load_average=os.getloadavg(),
        min_busy=min_busy,
        wall_s=time.monotonic() - begun,
        versions=versions,
        skipped=skipped,
        samples=samples,
        comparisons=[one for one in pairs if one is not None],
        starts=starts,
    )
    print("\n".join(lines_of(report, measures)))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if report.comparisons or any(one.engine != RUNG for one in starts) else 1


if __name__ == "__main__":
    sys.exit(main())
