"""Prometheus metrics, with SGLang's stems and the prefix `rung:`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import Finish

if TYPE_CHECKING:
    from engine.server.engine_client import EngineClient
    from engine.server.serving import Usage

LATENCIES_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0, 300.0)


GRAPH_STEPS = "graph_steps_"
"""Start of the names of those figures (`engine.runner.ModelRunner.counts`)."""


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
        steps = GaugeMetricFamily(
            "rung:decode_graph_steps", "Steps by how they ran, where there are graphs.", labels=["how"]
        )
        for name, count in stats.items():
            if name.startswith(GRAPH_STEPS):
                steps.add_metric([name.removeprefix(GRAPH_STEPS)], count)
        yield steps


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
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished answers.")
        self._cached_tokens = counter("cached_tokens", "Of those, not computed.")
        self._lost = counter("prefix_lost_to_alignment_tokens", "Of those, computed again at page borders.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens of finished answers.")
        self._finished = counter("num_requests", "Finished answers.", ("finish_reason",))

    def finished(self, usage: Usage, finish: Finish | None, seconds: float) -> None:
        """Count an answer that ended."""
        self.end_to_end.observe(seconds)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._lost.inc(usage.lost_to_alignment)
        self._generation_tokens.inc(usage.completion_tokens)
        self._finished.labels(finish.reason if finish is not None else "abort").inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
