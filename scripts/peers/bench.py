"""Compares Rung with other engines: same weights, dtype, prompts and threads, one process each, interleaved rounds.

    scripts/bench_peers --peers transformers,llama-cpp,vllm --dtype bfloat16 --rounds 5 --json peers.json

prefill P   one prompt of P random tokens, nothing cached, to its first token
decode B    B requests with P tokens of context each, greedy: tokens/s over the batch

Within a round each engine does each measure in turn; a ratio is Rung's rate over the peer's in the same round. Samples
that got less than --min-busy of their threads are left out with their pairs and counted. A peer that cannot run is
named with its reason. Exits with 1 when no peer could be compared, with 2 when Rung itself cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convert import model_for
from environments import HERE, Peer, SetupError, peers, python_of, variables_of
from ratios import RUNG, Comparison, Sample, compare, turns

from engine.config import DEFAULT_MODEL
from engine.errors import RungError
from engine.weights.catalog import cache_dir, resolve_model

Command = dict[str, Any]
DEFAULT_ENV_DIR = Path.home() / ".cache" / "rung" / "peers"


class Worker:
    """An engine's process: commands in, answers out. Its standard error goes to a file."""

    def __init__(self, peer: Peer, options: argparse.Namespace, source: Path) -> None:
        """Install, convert, start and wait until the model is loaded. Raises SetupError."""
        python = python_of(peer, options.env_dir)
        model = model_for(peer.model_kind, source, options.dtype, options.env_dir / "models")
        self.name, self._log = peer.name, options.env_dir / f"{peer.name}-worker.log"
        sizes = ["--max-batch", str(max(options.batch_sizes)), "--max-len", str(options.context + options.steps + 8)]
        command = [str(python), str(HERE / peer.worker), "--model", str(model), "--dtype", options.dtype]
        command += ["--threads", str(options.threads), *sizes]
        options.env_dir.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables_of(peer, options.env_dir, options.threads),
            )
        self.version: str = self._read()["ready"]

    def ask(self, command: Command) -> dict[str, float]:
        """Raises SetupError when the process has died."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the read says why
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            status = self._process.wait()
            raise SetupError(f"ended with status {status}: {lines[-1] if lines else 'no message'}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run; `skipped` gives the reason for each peer that was not compared to the end."""

    machine: str
    model: str
    dtype: str
    threads: int
    load_average: tuple[float, float, float]
    min_busy: float
    versions: dict[str, str]
    skipped: dict[str, str]
    samples: list[Sample]
    comparisons: list[Comparison]


def start(
    options: argparse.Namespace, source: Path, note: Callable[[str], None]
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Rung and every peer that can run, and the reasons of those that cannot."""
    known = peers(options.threads)
    workers, skipped = {}, {}
    for name in (RUNG, *options.peers):
        note(f"starting {name}")
        try:
            workers[name] = Worker(known[name], options, source)
        except SetupError as error:
            if name == RUNG:
                raise
            skipped[name] = str(error)
            note(f"{name} is skipped: {error}")
    return workers, skipped


def measures_of(options: argparse.Namespace) -> dict[str, Command]:
    decodes = {
        f"decode {size}": {"do": "decode", "batch": size, "context": options.context, "steps": options.steps}
        for size in options.batch_sizes
    }
    return {f"prefill {options.context}": {"do": "prefill", "tokens": options.context}, **decodes}


def measure(
    workers: dict[str, Worker], skipped: dict[str, str], options: argparse.Namespace, note: Callable[[str], None]
) -> list[Sample]:
    """All rounds, after one that is thrown away. A worker that dies is moved to `skipped`."""
    samples = []
    for index in range(-1, options.rounds):
        for what, command in measures_of(options).items():
            for name in turns(list(workers), max(index, 0)):
                try:
                    answer = workers[name].ask(command | {"seed": 1000 + index})
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


def lines_of(report: Report, measures: Sequence[str]) -> list[str]:
    """The report as text; a pair without an undisturbed round says so."""
    versions = ", ".join(f"{name} ({version})" for name, version in report.versions.items())
    lines = [f"{report.model} {report.dtype}, {report.threads} threads, {report.machine}", versions, ""]
    lines.append(f"{'peer':<14}{'measure':<13}{'rung':>9}{'peer':>9}   ratio (min - max)       rounds")
    found = {(one.peer, one.measure): one for one in report.comparisons}
    for peer in report.versions:
        for what in measures if peer != RUNG and peer not in report.skipped else ():
            one = found.get((peer, what))
            if one is None:
                lines.append(f"{peer:<14}{what:<13}  no round got {report.min_busy:.2f} CPU seconds a second for both")
                continue
            spread = f"{one.ratio:.2f} ({one.low:.2f} - {one.high:.2f})"
            rounds = f"{one.num_rounds} of {one.num_rounds + one.num_dropped}"
            rates = f"{one.rung_tokens_per_s:9.1f}{one.peer_tokens_per_s:9.1f}"
            lines.append(f"{peer:<14}{what:<13}{rates}   {spread:<22}  {rounds}")
    return [*lines, *(f"{name:<14}skipped: {reason}" for name, reason in report.skipped.items())]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in peers(1) if name != RUNG]
    parser.add_argument("--peers", default=",".join(names), help="which, with commas between: %(default)s")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a built-in name, a GGUF file or a directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--min-busy", type=float, default=0.9, help="share of the threads; 0 keeps every round")
    parser.add_argument("--env-dir", type=Path, default=DEFAULT_ENV_DIR, help="environments, models, logs")
    parser.add_argument("--json", type=Path, help="write every sample and ratio to this file")
    options = parser.parse_args(arguments)
    options.peers = list(dict.fromkeys(options.peers.split(",")))
    unknown = [name for name in options.peers if name not in names]
    if unknown:
        parser.error(f"--peers: {', '.join(unknown)} is unknown; known are {', '.join(names)}")
    try:
        options.batch_sizes = [int(size) for size in options.batch_sizes.split(",")]
    except ValueError:
        parser.error("--batch-sizes: must be whole numbers with commas between")
    if min(options.rounds, options.steps, options.context, options.threads, *options.batch_sizes) < 1:
        parser.error("--rounds, --steps, --context, --threads and --batch-sizes must be at least 1")
    return options


def main() -> int:
    options = parse()

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        source = resolve_model(options.model, cache_dir())
        workers, skipped = start(options, source, note)
    except (RungError, SetupError) as error:
        note(f"error: rung: {error}")
        return 2
    versions = {name: worker.version for name, worker in workers.items()}
    samples = measure(workers, skipped, options, note)
    for worker in workers.values():
        worker.close()
    min_busy, measures = options.min_busy * options.threads, list(measures_of(options))
    pairs = [compare(samples, peer, what, min_busy) for peer in versions if peer != RUNG for what in measures]
    report = Report(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        load_average=os.getloadavg(),
        min_busy=min_busy,
        versions=versions,
        skipped=skipped,
        samples=samples,
        comparisons=[one for one in pairs if one is not None],
    )
    print("\n".join(lines_of(report, measures)))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if report.comparisons else 1


if __name__ == "__main__":
    sys.exit(main())
