"""How decode steps ran is a metric with a label, one figure a cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.server import metrics


def test_steps_and_rows_are_counted_by_how_they_ran() -> None:
    class Stats(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return 1

    stats = Stats({"graph_steps_replayed": 7, "graph_steps_eager_prefill": 2, "other": 5, "sampled_on_host_top_k": 3})
    client: Any = SimpleNamespace(beat=SimpleNamespace(stats=stats, step_age_s=0.0, page_size=1))
    families = {family.name: family for family in metrics.EngineGauges(client).collect()}
    samples = {sample.labels["how"]: sample.value for sample in families["rung:decode_graph_steps"].samples}
    assert samples == {"replayed": 7, "eager_prefill": 2}
    rows = {sample.labels["cause"]: sample.value for sample in families["rung:rows_sampled_on_host"].samples}
    assert rows == {"top_k": 3}
