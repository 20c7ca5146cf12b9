"""Writes grafana/rung.json, the dashboard: `python scripts/monitoring/dashboard.py`. Its panels are listed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "grafana" / "rung.json"
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "rung-prometheus"}


def metric(name: str) -> str:
    return f'rung:{name}{{instance=~"$instance"}}'


def quantile(name: str, q: float) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({metric(name + '_bucket')}[5m])))"


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric(name)}[5m]))"


def latency(name: str) -> list[tuple[str, str]]:
    return [(quantile(name, q), f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99)]


def hit_rate() -> str:
    return f"{rate('cached_tokens_total')} / clamp_min({rate('prompt_tokens_total')}, 1)"


STATS = [
    ("Running", [(f"sum({metric('num_running_reqs')})", "running")], "short"),
    ("Waiting", [(f"sum({metric('num_queue_reqs')})", "waiting")], "short"),
    ("KV in use", [(f"max({metric('token_usage')})", "in use")], "percentunit"),
    ("Prompt tokens from the cache", [(hit_rate(), "cached")], "percentunit"),
    ("Open sessions", [(f"sum({metric('num_streaming_sessions')})", "sessions")], "short"),
    ("Age of the current step", [(f"max({metric('engine_step_age_seconds')})", "age")], "s"),
]
GRAPHS = [
    ("Time to first token", latency("time_to_first_token_seconds"), "s"),
    ("Between tokens", latency("inter_token_latency_seconds"), "s"),
    ("Whole answer", latency("e2e_request_latency_seconds"), "s"),
    ("In the queue", latency("queue_time_seconds"), "s"),
    (
        "Tokens a second",
        [
            (f"sum({metric('gen_throughput')})", "generated"),
            (rate("generation_tokens_total"), "of finished answers"),
            (rate("prompt_tokens_total"), "prompt"),
            (rate("cached_tokens_total"), "of them cached"),
        ],
        "short",
    ),
    (
        "Answers a second, by how they ended",
        [(rate("num_requests_total", "finish_reason"), "{{finish_reason}}")],
        "short",
    ),
    (
        "Requests",
        [
            (f"sum({metric('num_decode_reqs')})", "decode"),
            (f"sum({metric('num_prefill_reqs')})", "prefill"),
            (f"sum({metric('num_queue_reqs')})", "waiting"),
            (f"sum({metric('num_grammar_queue_reqs')})", "grammar"),
            (f"sum({metric('num_http_requests')})", "HTTP"),
        ],
        "short",
    ),
    ("Retractions in 5 minutes", [(f"sum(delta({metric('num_retracted_reqs')}[5m]))", "retractions")], "short"),
    ("KV by owner, tokens", [(f"sum by (owner) ({metric('kv_tokens_by_owner')})", "{{owner}}")], "short"),
    ("Evicted tokens a second", [(rate("evicted_tokens_total"), "evicted")], "short"),
    ("Why prefixes were not found", [(rate("prefix_miss_reason_total", "reason"), "{{reason}}")], "short"),
    (
        "Computed again at page borders, tokens a second",
        [(rate("prefix_lost_to_alignment_tokens_total"), "lost to alignment")],
        "short",
    ),
    (
        "Sessions",
        [
            (f"sum({metric('streaming_session_held_tokens')})", "held tokens"),
            (f"sum({metric('num_streaming_sessions')})", "open"),
        ],
        "short",
    ),
    ("Event loop lag", latency("event_loop_lag_seconds"), "s"),
]


def panel(number: int, kind: str, title: str, queries: list[tuple[str, str]], unit: str, grid: dict[str, int]) -> Any:
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[Any] = []
    for i, stat in enumerate(STATS):
        panels.append(panel(len(panels) + 1, "stat", *stat, {"x": 4 * i, "y": 0, "w": 4, "h": 4}))
    for i, graph in enumerate(GRAPHS):
        place = {"x": WIDTH // 2 * (i % 2), "y": 4 + 8 * (i // 2), "w": WIDTH // 2, "h": 8}
        panels.append(panel(len(panels) + 1, "timeseries", *graph, place))
    return {
        "uid": "rung",
        "title": "Rung",
        "tags": ["rung"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(rung:token_usage, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                }
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
