"""The dashboard, the alerts and the compose file name what there is: metrics and labels of a real server, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from served import Server

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "monitoring"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"


def read_dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana/rung.json").read_text())
    return found


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in read_dashboard()["panels"] for target in panel["targets"]]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def metrics(server: Server) -> dict[str, dict[str, set[str]]]:
    """What /metrics gives after a request: the values of every label, by sample name."""
    server.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    text = httpx.get(f"{server.url}/metrics").text
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def offences(query: str, metrics: dict[str, dict[str, set[str]]]) -> list[str]:
    """Metrics and labels of a query that no server has, and brackets that do not match."""
    wrong = [f"unbalanced {pair}" for pair in ("()", "[]", "{}") if query.count(pair[0]) != query.count(pair[1])]
    names = [name for name in re.findall(r"(?<![\w:$\"])(rung:\w+|up\b)", query) if name != "up"]
    wrong += [f"no metric {name}" for name in names if name not in metrics]
    known = SCRAPED.union(*(metrics.get(name, {}) for name in names))
    for labels in re.findall(r"\bby \(([^)]*)\)", query):
        wrong += [f"no label {label.strip()}" for label in labels.split(",") if label.strip() not in known]
    for label in re.findall(rf"[{{,]\s*({NAME})\s*(?:=~|!=|!~|=)", query):
        wrong += [f"no label {label}"] if label not in known else []
    if "histogram_quantile" in query and not all(name.endswith("_bucket") for name in names):
        wrong.append("a quantile of no histogram")
    if not names and not query.startswith("up{"):
        wrong.append("no metric of ours")
    return wrong


def test_every_query_names_metrics_and_labels_that_a_server_has(metrics):
    for query in [*dashboard_queries(), *alert_queries()]:
        assert offences(query, metrics) == [], query
    for panel in read_dashboard()["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], f"{panel['title']}: the query has no {label}"
    variable = read_dashboard()["templating"]["list"][0]["query"]
    assert re.fullmatch(r"label_values\((rung:\w+), instance\)", variable)[1] in metrics


@pytest.mark.parametrize(
    "query",
    [
        "sum(rate(rung:no_such_total[5m]))",
        "sum by (user) (rung:token_usage)",
        'rung:token_usage{owner="tree"}',
        "histogram_quantile(0.5, rate(rung:time_to_first_token_seconds_sum[5m]))",
        "sum(rung:token_usage",
        "1 + 1",
    ],
)
def test_a_query_that_names_what_is_not_there_is_noticed(metrics, query):
    assert offences(query, metrics)


def test_every_metric_of_ours_is_on_the_dashboard(metrics):
    shown = " ".join([*dashboard_queries(), *alert_queries()])
    left_out = {"kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens", "cache_hit_rate"}  # others say the same
    left_out |= {"prefix_hit_quantum_tokens"}  # does not change
    for name in metrics:
        stem = re.sub(r"_(bucket|count|sum|created|total)$", "", name.removeprefix("rung:"))
        assert stem in left_out or f"rung:{stem}" in shown, name


def test_the_dashboard_is_what_its_script_writes():
    namespace: dict[str, Any] = {"__name__": "dashboard", "__file__": str(FOLDER / "dashboard.py")}
    exec((FOLDER / "dashboard.py").read_text(), namespace)
    board = read_dashboard()
    assert board == namespace["dashboard"]()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_compose_file_mounts_what_is_there_and_pins_its_images():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (FOLDER / source).exists(), source
    source = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in read_dashboard()["panels"]} == {source["uid"]}
    provider = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/rung.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/rung.json" in mounted
    rules = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    assert [f"/etc/prometheus/{rule}" in str(services["prometheus"]["volumes"]) for rule in rules] == [True]
