"""Prometheus metrics, with SGLang's stems and the prefix `rung:`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import Finish
from engine.server.throughput import Throughput
from mem_cache.tree.misses import MISS_REASONS

if TYPE_CHECKING:
    from engine.server.engine_client import EngineClient
    from engine.server.serving import Usage

LAG_SAMPLE_S = 0.1
LATENCIES_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    60.0,
    300.0,
)


GRAPH_STEPS = "graph_steps_"
"""Start of the names of those figures (`engine.runner.ModelRunner.counts`)."""

ROWS_ON_HOST = "sampled_on_host_"
"""The same."""

FAMILY_PAGES = "family_pages_"
"""Start of the names of other families' pages (`EngineCore.stats`): the owner, then the family."""


class EngineGauges(Collector):
    """The engine's own figures, from its latest sign of life."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        stats = self._client.beat.stats
        if not stats:
            return
        page, pages = stats["page_size"], stats["num_pages"]
        in_tree = stats["tree_evictable_pages"] + stats["tree_protected_pages"]
        used = pages - stats["free_pages"] - stats["tree_evictable_pages"]
        gauges = {
            "num_running_reqs": ("Requests that hold KV.", stats["num_running"]),
            "num_queue_reqs": ("Requests that wait.", stats["num_waiting"]),
            "num_grammar_queue_reqs": ("Requests whose grammar is being compiled.", stats["num_compiling"]),
            "num_prefill_reqs": ("Of those that hold KV, before their first token.", stats["num_prefilling"]),
            "num_decode_reqs": ("Of those that hold KV, behind it.", stats["num_running"] - stats["num_prefilling"]),
            "token_usage": ("Share of the pool that is in use.", used / pages),
            "kv_available_tokens": ("Tokens of free pages.", stats["free_pages"] * page),
            "kv_evictable_tokens": ("Tokens of cached pages that may go.", stats["tree_evictable_pages"] * page),
            "kv_used_tokens": ("Tokens of pages in use.", used * page),
            "cache_hit_rate": (
                "Share of prompt tokens that were cached.",
                stats["cached_tokens_total"] / max(1, stats["prompt_tokens_total"]),
            ),
            "num_retracted_reqs": ("Retractions since the start.", stats["num_retracted_total"]),
            "num_streaming_sessions": ("Open sessions.", stats["num_sessions"]),
            "streaming_session_held_tokens": ("Tokens in rows of sessions.", stats["session_held_tokens"]),
            "prefix_hit_quantum_tokens": ("The smallest prefix that can be reused.", page),
            "engine_step_age_seconds": ("Age of the current step.", self._client.beat.step_age_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"rung:{name}", text, value=value)
        owners = GaugeMetricFamily("rung:kv_tokens_by_owner", "Tokens of pages by who holds them.", labels=["owner"])
        for owner, count in (
            ("free", stats["free_pages"]),
            ("pending", stats["pending_pages"]),
            ("tree", in_tree),
            ("session", stats["session_pages"]),
            ("request", stats["request_pages"]),
        ):
            owners.add_metric([owner], count * page)
        yield owners
        text = "Pages of the families beside the one of all tokens, where there are some, by who holds them."
        families = GaugeMetricFamily("rung:kv_family_pages", text, labels=["family", "owner"])
        for name, count in stats.items():
            if name.startswith(FAMILY_PAGES):
                owner, _, family = name.removeprefix(FAMILY_PAGES).partition("_")
                families.add_metric([family, owner], count)
        yield families
        steps = GaugeMetricFamily(
            "rung:decode_graph_steps", "Steps by how they ran, where there are graphs.", labels=["how"]
        )
        for name, count in stats.items():
            if name.startswith(GRAPH_STEPS):
                steps.add_metric([name.removeprefix(GRAPH_STEPS)], count)
        yield steps
        text = "Rows whose token was drawn on the host although the engine runs on a device, by cause."
        on_host = CounterMetricFamily("rung:rows_sampled_on_host", text, labels=["cause"])
        for name, count in stats.items():
            if name.startswith(ROWS_ON_HOST):
                on_host.add_metric([name.removeprefix(ROWS_ON_HOST)], count)
        yield on_host
        yield CounterMetricFamily(
            "rung:evicted_tokens", "Cached tokens that had to go.", value=stats["evicted_tokens_total"]
        )
        text = "Prompts that found less than all of their whole pages, by why the first missing page was not there."
        misses = CounterMetricFamily("rung:prefix_miss_reason", text, labels=["reason"])
        for reason in MISS_REASONS:
            misses.add_metric([reason], stats[f"prefix_miss_{reason}_total"])
        yield misses


class Metrics:
    """What the API process counts, and the engine's gauges beside it."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineGauges(client))

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"rung:{name}", text, buckets=LATENCIES_S, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"rung:{name}", text, labels, registry=self.registry)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = histogram("inter_token_latency_seconds", "Between two pieces of an answer.")
        text = "HTTP requests that are being answered, but for health and control."
        self.num_http_requests = Gauge("rung:num_http_requests", text, registry=self.registry)
        self.queue_time = histogram("queue_time_seconds", "From arrival to the first step.")
        self.event_loop_lag = histogram("event_loop_lag_seconds", "How late the API process wakes.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished answers.")
        self._cached_tokens = counter("cached_tokens", "Of those, not computed.")
        self._lost = counter("prefix_lost_to_alignment_tokens", "Of those, computed again at page borders.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens of finished answers.")
        self.generated = Throughput()
        text = "Tokens generated a second, over the last ten seconds."
        Gauge("rung:gen_throughput", text, registry=self.registry).set_function(self.generated.per_second)
        self._finished = counter("num_requests", "Finished answers.", ("finish_reason",))

    def finished(self, usage: Usage, finish: Finish | None, seconds: float, queue_s: float) -> None:
        """Count an answer that ended. Seconds in all, and until its first step."""
        self.queue_time.observe(queue_s)
        self.end_to_end.observe(seconds)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._lost.inc(usage.lost_to_alignment)
        self._generation_tokens.inc(usage.completion_tokens)
        self._finished.labels(finish.reason if finish is not None else "abort").inc()

    async def watch_event_loop(self) -> None:
        """Measure for ever how late the loop wakes whoever sleeps in it."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_SAMPLE_S
            await asyncio.sleep(LAG_SAMPLE_S)
            self.event_loop_lag.observe(max(0.0, loop.time() - due_s))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
