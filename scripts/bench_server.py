"""Measures the server; prints numbers; status 1 when a good client was wronged or the books are not right.

    python scripts/bench_server.py load [--model M] [--clients 256] [--rounds 3] [--json FILE]
    python scripts/bench_server.py overhead [--model M] [--batch 32] [--rounds 7] [--json FILE]

load        streaming clients, all at once, of which a tenth hang up at random and a tenth send garbage: errors of the
            good ones, the audit after each round, resident memory of both processes, lag of the event loop
overhead    the same prompts through the server (streamed) and through `LLM` in this process, one after the other, in
            pairs whose order changes; the ratio of the times of each pair, its median and range
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 300.0
GARBAGE = (b"{", b"\xff\xfe", b'{"prompt": 3}', b'{"prompt": "x", "n": -1}', b"[]" * 1000, b'{"prompt": [99999999]}')
PATHS = ("/v1/completions", "/generate", "/v1/chat/completions", "/v1/responses")
LAG = "rung:event_loop_lag_seconds"
Result = dict[str, Any]


class Served:
    """A `rung serve` of this checkout, for the time of a `with`."""

    def __init__(self, model: str, *flags: str) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--model", model]
        command += ["--port", "0", "--max-concurrent-requests", "4096", *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=ROOT)

    def __enter__(self) -> Served:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            said = Path(self._log.name).read_text()
            if " on http://" in said:
                self.url = "http://" + said.partition(" on http://")[2].split()[0]
                return self
            time.sleep(0.2)
        self.process.kill()
        raise SystemExit(f"the server did not start: {Path(self._log.name).read_text()}")

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60.0)

    def resident_mb(self) -> dict[str, float]:
        """Memory of the API process and of the engine process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engine = max(children, key=lambda pid: _pages(int(pid)))
        return {"api_mb": _pages(self.process.pid) * 4096 / 1e6, "engine_mb": _pages(int(engine)) * 4096 / 1e6}

    def lag(self) -> dict[float, float]:
        """Samples of the event loop's lag that were at most so many seconds."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"{LAG}_bucket")]
        return {float(line.split('"')[1]): float(line.rsplit(" ", 1)[1]) for line in lines}


def _pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def quantile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Upper end of the bucket in which a share of the samples between two readings lies."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = max(counts.values())
    return min(bound for bound, count in counts.items() if count >= share * total) * 1e3


async def _round(url: str, num_clients: int, output_len: int, dice: random.Random) -> dict[str, Any]:
    async def good(client: httpx.AsyncClient, index: int) -> str:
        body = {"prompt": f"number {index} " * 8, "max_tokens": output_len, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        is_whole = answer.status_code == 200 and lines[-1] == "data: [DONE]" and '"length"' in lines[-2]
        return "" if is_whole else f"{answer.status_code} {lines[-2:]}"

    async def hangs_up(client: httpx.AsyncClient, index: int) -> str:
        body = {"prompt": f"gone {index}", "max_tokens": 10 * output_len, "stream": True, "ignore_eos": True}
        left = dice.randrange(output_len)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        return ""

    async def garbage(client: httpx.AsyncClient, index: int) -> str:
        path, content = PATHS[index % len(PATHS)], GARBAGE[index % len(GARBAGE)]
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        return "" if 400 <= answer.status_code < 500 and "error" in answer.json() else answer.text[:200]

    limits = httpx.Limits(max_connections=None)
    kinds = [dice.choices([good, hangs_up, garbage], [8, 1, 1])[0] for _ in range(num_clients)]
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(kind(client, index) for index, kind in enumerate(kinds)), return_exceptions=True
        )
    errors = [f"{kind.__name__}: {answer!r}" for kind, answer in zip(kinds, answers, strict=True) if answer]
    return {"seconds": time.perf_counter() - started, "num_good": kinds.count(good), "errors": errors}


def load(args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Rounds of clients; the first is a warm-up for memory."""
    results, is_right = [], True
    dice = random.Random(args.seed)
    with Served(args.model, *args.flags) as server:
        for number in range(args.rounds + 1):
            before = server.lag()
            one = asyncio.run(_round(server.url, args.clients, args.output_len, dice))
            after = server.lag()
            for _ in range(600):
                info = server.get("/server_info?audit=true").json()
                if info["stats"]["num_running"] == info["stats"]["num_waiting"] == 0:
                    break
                time.sleep(0.1)
            stats = info["stats"]
            books = stats["free_pages"] + stats["tree_evictable_pages"] == stats["num_pages"]
            books = books and stats["free_rows"] == stats["num_rows"] and not info["violations"]
            is_right = is_right and books and not one["errors"]
            lags = {f"lag_p{p}_ms": quantile_ms(before, after, p / 100) for p in (50, 90, 99)}
            errors = one.pop("errors")
            what = "warm-up" if number == 0 else f"round {number}"
            results.append(
                {"what": what, **one, "num_errors": len(errors), "books": books, **lags, **server.resident_mb()}
            )
            for error in errors[:5]:
                print(error)
            print(_line(results[-1]))
    return results, is_right


async def _through_server(url: str, prompts: list[list[int]], output_len: int) -> float:
    async def one(client: httpx.AsyncClient, ids: list[int]) -> int:
        body = {"prompt": ids, "max_tokens": output_len, "stream": True, "ignore_eos": True, "temperature": 0}
        count = 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                count += line.startswith("data: {")
        return count

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(client, ids) for ids in prompts))
        seconds = time.perf_counter() - started
    assert min(counts) > 0, counts
    return seconds


def overhead(args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Pairs of the same batch through the server and in this process; round 0 is a warm-up."""
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=args.output_len, ignore_eos=True)
    rng = np.random.default_rng(args.seed)
    size = ("--max-total-tokens", "16384")
    pairs = []
    with Served(args.model, *size, *args.flags) as server:
        llm = LLM(args.model, max_total_tokens=16384)
        for number in range(args.rounds + 1):
            shape = (args.batch, args.input_len)
            prompts = rng.integers(0, llm.core.vocab_size, shape).tolist()
            times: dict[str, float] = {}
            for side in ("server", "process") if number % 2 else ("process", "server"):
                started = time.perf_counter()
                if side == "server":
                    times[side] = asyncio.run(_through_server(server.url, prompts, args.output_len))
                else:
                    llm.generate(prompts, params)
                    times[side] = time.perf_counter() - started
            print(_line({"what": f"pair {number}", **times, "ratio": times["server"] / times["process"]}))
            if number:
                pairs.append(times)
    ratios = [pair["server"] / pair["process"] for pair in pairs]
    median = statistics.median(ratios)
    result = {"what": f"overhead, batch {args.batch}", "ratio": median, "min": min(ratios), "max": max(ratios)}
    return [{**result, "num_pairs": len(ratios), "load_average": os.getloadavg()[0], "pairs": pairs}], True


def _line(result: Result) -> str:
    shown = {key: value for key, value in result.items() if key not in ("what", "pairs")}
    numbers = "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
    return f"{result['what']:<22} {numbers}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "overhead"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args, args.flags = parser.parse_known_args()
    results, is_right = (load if args.what == "load" else overhead)(args)
    if args.what == "overhead":
        print(_line(results[0]))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
