"""Measures the server; prints numbers; status 1 when a good client was wronged or the books are not right.

    python scripts/bench_server.py load [--model M] [--clients 256] [--warm-up 5] [--rounds 10] [--json FILE]
    python scripts/bench_server.py idle [--model M] [--seconds 20]
    python scripts/bench_server.py overhead [--model M] [--batch 32] [--rounds 7] [--json FILE]

load        streaming clients, all at once, of which a tenth hang up at random and a tenth send garbage: errors of the
            good ones, the audit after each round, resident memory of both processes and how much it grows a round, CPU
            time of the API process and of the clients, lag of the event loop, and, as control, that of an empty event
            loop in a process of its own at the same time: what it lags too is the machine's doing
idle        CPU time of both processes while nobody asks anything
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
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SMALL_POOL = ("--max-total-tokens", "16384")
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

    def processes(self) -> dict[str, int]:
        """Ids of the API process and of the engine process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return {"api": self.process.pid, "engine": max(map(int, children), key=_pages)}

    def resident_mb(self) -> dict[str, float]:
        """Memory of both processes."""
        return {f"{name}_mb": _pages(pid) * 4096 / 1e6 for name, pid in self.processes().items()}

    def lag(self) -> dict[float, float]:
        """Samples of the event loop's lag that were at most so many seconds."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"{LAG}_bucket")]
        return {float(line.split('"')[1]): float(line.rsplit(" ", 1)[1]) for line in lines}


def _pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS_PER_S


class EmptyLoop:
    """A process whose event loop does nothing but measure its own lag as the server does, for the time of a `with`.

    Attributes:
        lags_s: afterwards.
    """

    _BODY = """
import asyncio, sys
async def main():
    loop, lags = asyncio.get_running_loop(), []
    stopped = loop.run_in_executor(None, sys.stdin.read)
    while not stopped.done():
        due_s = loop.time() + 0.1
        await asyncio.sleep(0.1)
        lags.append(max(0.0, loop.time() - due_s))
    print(*lags)
asyncio.run(main())
"""

    def __enter__(self) -> EmptyLoop:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-c", self._BODY], stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *exc: object) -> None:
        said, _ = self._process.communicate()
        self.lags_s = [float(word) for word in said.split()]


def quantile_ms(counts: dict[float, float], share: float) -> float:
    """Upper end of the bucket in which a share of the samples lies."""
    total = max(counts.values())
    return min(bound for bound, count in counts.items() if count >= share * total) * 1e3


def _lags(counts: dict[float, float], control_s: list[float]) -> Result:
    shares = (50, 90, 99)
    of_server = {f"lag_p{p}_ms": quantile_ms(counts, p / 100) for p in shares}
    return {**of_server, **{f"empty_p{p}_ms": float(np.percentile(control_s, p)) * 1e3 for p in shares}}


class Client:
    """A client that costs little, so that it takes no processor from the server: one request a connection."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")

    async def post(self, path: str, body: bytes, *, leave_after: int | None = None) -> tuple[int, list[str]]:
        """Status and lines of the body; `leave_after`: hang up after so many events."""
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = bytearray()
            while piece := await reader.read(1 << 16):
                answer += piece
                if leave_after is not None and answer.count(b"data: ") > leave_after:
                    writer.transport.abort()
                    return 0, []
        finally:
            writer.close()
        top, _, rest = bytes(answer).partition(b"\r\n\r\n")
        text = _unchunked(rest) if b"transfer-encoding: chunked" in top.lower() else rest
        return int(top.split()[1]), [line for line in text.decode().splitlines() if line]


def _unchunked(data: bytes) -> bytes:
    """The body in `size CRLF bytes CRLF ... 0 CRLF CRLF`. Raises ValueError: it ends before."""
    parts, at = [], 0
    while size := int(data[at : (begin := data.index(b"\r\n", at) + 2)], 16):
        parts.append(data[begin : begin + size])
        at = begin + size + 2
    return b"".join(parts)


async def _round(url: str, num_clients: int, output_len: int, dice: random.Random) -> Result:
    client = Client(url)

    def completion(prompt: str, max_tokens: int) -> bytes:
        return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()

    async def good(index: int) -> str:
        status, lines = await client.post("/v1/completions", completion(f"number {index} " * 8, output_len))
        is_whole = status == 200 and lines[-1] == "data: [DONE]" and '"length"' in lines[-2]
        return "" if is_whole else f"{status} {lines[-2:]}"

    async def hangs_up(index: int) -> str:
        body = completion(f"gone {index}", 10 * output_len)
        await client.post("/v1/completions", body, leave_after=dice.randrange(output_len))
        return ""

    async def garbage(index: int) -> str:
        status, lines = await client.post(PATHS[index % len(PATHS)], GARBAGE[index % len(GARBAGE)])
        return "" if 400 <= status < 500 and "error" in json.loads("".join(lines)) else f"{status} {lines}"

    kinds = [dice.choices([good, hangs_up, garbage], [8, 1, 1])[0] for _ in range(num_clients)]
    started, cpu_s = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(kind(index) for index, kind in enumerate(kinds)), return_exceptions=True)
    errors = [f"{kind.__name__}: {answer!r}" for kind, answer in zip(kinds, answers, strict=True) if answer]
    times = {"seconds": time.perf_counter() - started, "clients_cpu_s": time.process_time() - cpu_s}
    return {**times, "num_good": kinds.count(good), "errors": errors}


def _idle_info(server: Served) -> Result:
    """`/server_info` with the audit, once no request is left."""
    for _ in range(600):
        info: Result = server.get("/server_info?audit=true").json()
        if info["stats"]["num_running"] == info["stats"]["num_waiting"] == 0:
            break
        time.sleep(0.1)
    return info


def _books_are_right(info: Result) -> bool:
    stats = info["stats"]
    is_all_there = stats["free_pages"] + stats["tree_evictable_pages"] == stats["num_pages"]
    return is_all_there and stats["free_rows"] == stats["num_rows"] and not info["violations"]


def load(args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Rounds of clients; the summary is of those after the warm-up, in which the pool of KV, a small one, fills."""
    results: list[Result] = []
    dice, counts, control_s = random.Random(args.seed), dict[float, float](), list[float]()
    with Served(args.model, *SMALL_POOL, *args.flags) as server:
        api = server.processes()["api"]
        for number in range(1 - args.warm_up, args.rounds + 1):
            before, cpu_s = server.lag(), _cpu_s(api)
            with EmptyLoop() as control:
                one = asyncio.run(_round(server.url, args.clients, args.output_len, dice))
            cpu_s, after = _cpu_s(api) - cpu_s, server.lag()
            more = {bound: after[bound] - before[bound] for bound in after}
            info = _idle_info(server)
            books, cached_pages = _books_are_right(info), info["stats"]["tree_evictable_pages"]
            errors = one.pop("errors")
            for error in errors[:5]:
                print(error)
            what = f"round {number}" if number > 0 else "warm-up"
            one |= {"num_errors": len(errors), "books": books, "api_cpu_s": cpu_s, **_lags(more, control.lags_s)}
            results.append({"what": what, **one, "cached_pages": cached_pages, **server.resident_mb()})
            print(_line(results[-1]), flush=True)
            if number > 0:
                counts = {bound: counts.get(bound, 0.0) + count for bound, count in more.items()}
                control_s += control.lags_s
    is_right = all(one["books"] and not one["num_errors"] for one in results)
    if counts:
        kept = results[args.warm_up :]
        growth = {f"{name}_mb_per_round": _slope([one[f"{name}_mb"] for one in kept]) for name in ("api", "engine")}
        results.append({"what": f"{len(kept)} rounds", **_lags(counts, control_s), **growth})
        print(_line(results[-1]))
    return results, is_right


def _slope(values: list[float]) -> float:
    """Growth from one value to the next, by least squares."""
    return float(np.polyfit(range(len(values)), values, 1)[0]) if len(values) > 1 else 0.0


def idle(args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Share of a core that each process takes while it has nothing to do."""
    with Served(args.model, *args.flags) as server:
        server.get("/health_generate")
        time.sleep(2.0)
        processes = server.processes()
        before = {name: _cpu_s(pid) for name, pid in processes.items()}
        time.sleep(args.seconds)
        spent = {name: _cpu_s(pid) - before[name] for name, pid in processes.items()}
    shares = {f"{name}_percent": 100 * seconds / args.seconds for name, seconds in spent.items()}
    result = {"what": f"idle for {args.seconds:g} s", **shares}
    print(_line(result))
    return [result], True


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
    pairs = []
    with Served(args.model, *SMALL_POOL, *args.flags) as server:
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
    parser.add_argument("what", choices=("load", "idle", "overhead"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    args.flags = flags
    measure = {"load": load, "idle": idle, "overhead": overhead}[args.what]
    results, is_right = measure(args)
    if args.what == "overhead":
        print(_line(results[0]))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
