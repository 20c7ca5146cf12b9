"""Kubernetes: what is rendered, what the checks refuse, and `kubectl` through a fake one on the PATH."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import kube
from cluster.cluster_file import ClusterFile, parse_cluster
from cluster.containers import CONTROL_DEVICES, DRIVER_MOUNTS, container_command
from cluster.deploy_cli import main
from cluster.errors import ClusterError
from cluster.manifests import check_manifests, dump_manifests, pod_templates, render_manifests

KINDS = ("volcano", "leaderworkerset")


def cluster_of(kind: str = "volcano", kubernetes: dict[str, Any] | None = None, **fields: Any) -> ClusterFile:
    where = {"kind": kind, "image": "registry.example/rung:1", "model_host_path": "/data/models", **(kubernetes or {})}
    return parse_cluster({"name": "chat", "model": "/data/models/qwen", "replicas": 2, "kubernetes": where, **fields})


def containers_of(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    templates = [template for document in documents for _, template in pod_templates(document)]
    return [container for template in templates for container in template["spec"]["containers"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [{"tensor": 1, "nnodes": 1}, {"tensor": 16, "nnodes": 2}])
@pytest.mark.parametrize("network", [{}, {"host_network": True, "privileged": True, "interface": "enp1s0"}])
def test_what_is_rendered_passes_the_checks(kind: str, parallel: dict[str, int], network: dict[str, Any]) -> None:
    cluster = cluster_of(kind, network, parallel=parallel)
    documents = render_manifests(cluster)
    assert check_manifests(cluster, documents) == []
    text = dump_manifests(documents)
    assert list(yaml.safe_load_all(text)) == documents
    assert "&id" not in text
    share = str(parallel["tensor"] // parallel["nnodes"])
    for container in containers_of(documents):
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["huawei.com/Ascend910"] == share
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {*DRIVER_MOUNTS, "/dev/shm", "/models"}
        assert container["command"][:4] == ["rung", "serve", "--model", "/models/qwen"]
        values = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
        names = {values[f"{name}_SOCKET_IFNAME"] for name in ("HCCL", "GLOO", "TP")}
        assert names == {network.get("interface", "eth0")}
        field = "status.hostIP" if network else "status.podIP"
        assert values["HCCL_IF_IP"] == {"fieldRef": {"fieldPath": field}}


def test_probes_ask_three_different_questions() -> None:
    (first, *_) = containers_of(render_manifests(cluster_of()))
    asked = {name: first[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert first["startupProbe"]["periodSeconds"] * first["startupProbe"]["failureThreshold"] >= 1800


def test_a_replica_is_a_gang_and_independent_of_the_others() -> None:
    cluster = cluster_of(parallel={"tensor": 16, "nnodes": 2})
    jobs = [one for one in render_manifests(cluster) if one["kind"] == "Job"]
    assert [job["metadata"]["name"] for job in jobs] == ["chat-0", "chat-1"]
    for job in jobs:
        assert job["spec"]["minAvailable"] == sum(task["replicas"] for task in job["spec"]["tasks"]) == 2
        pods = [task["template"]["metadata"] for task in job["spec"]["tasks"]]
        assert {one["labels"]["fault-scheduling"] for one in (job["metadata"], *pods)} == {"force"}


def test_the_service_selects_leaders_only() -> None:
    for kind in KINDS:
        documents = render_manifests(cluster_of(kind, parallel={"tensor": 2, "nnodes": 2}))
        selector = documents[-1]["spec"]["selector"].items()
        roles = [
            template["metadata"]["labels"]["rung.io/role"]
            for document in documents
            for _, template in pod_templates(document)
            if selector <= template["metadata"]["labels"].items()
        ]
        assert set(roles) == {"leader"}


def first_pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = documents[0]["spec"]["tasks"][0]["template"]
    return found


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = first_pod(documents)["spec"]["containers"][0]
    return found


FAULTS: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "unknown key": (lambda all_: container(all_).update(comand=["x"]), "'comand' was unexpected"),
    "no image": (lambda all_: container(all_).pop("image"), "'image' is a required property"),
    "api version": (lambda all_: all_[0].update(apiVersion="batch/v1"), "apiVersion"),
    "kind": (lambda all_: all_[0].update(kind="Jop"), "kind 'Jop' has no schema"),
    "name": (lambda all_: all_[0]["metadata"].update(name="Chat_0"), "metadata.name"),
    "label": (lambda all_: first_pod(all_)["metadata"]["labels"].update(a="b c"), "b c"),
    "quantity": (lambda all_: container(all_)["resources"]["limits"].update(memory="a lot"), "memory"),
    "port": (lambda all_: container(all_)["ports"][0].update(containerPort=70000), "70000"),
    "env both": (lambda all_: container(all_)["env"][0].update(value="x"), "env.0"),
    "volume": (lambda all_: first_pod(all_)["spec"]["volumes"].pop(), "has no volume"),
    "limits": (lambda all_: container(all_)["resources"]["limits"].update(cpu="1"), "requests and limits differ"),
    "no readiness": (lambda all_: container(all_).pop("readinessProbe"), "readinessProbe is missing"),
    "no liveness": (lambda all_: container(all_).pop("livenessProbe"), "livenessProbe is missing"),
    "no startup": (lambda all_: container(all_).pop("startupProbe"), "startupProbe is missing"),
    "probe path": (lambda all_: container(all_)["readinessProbe"]["httpGet"].update(path="/health"), "not /ready"),
    "probe port": (lambda all_: container(all_)["livenessProbe"]["httpGet"].update(port=1), "does not have"),
    "budget": (lambda all_: container(all_)["startupProbe"].update(failureThreshold=3), "gives up after 30 s"),
    "blocking": (
        lambda all_: container(all_)["env"].append({"name": "ASCEND_LAUNCH_BLOCKING", "value": "1"}),
        "ASCEND_LAUNCH_BLOCKING must not be set",
    ),
    "twice": (lambda all_: container(all_)["env"].append({"name": "POD_IP", "value": "x"}), "POD_IP stands twice"),
    "selector": (lambda all_: all_[-1]["spec"]["selector"].update({"rung.io/role": "x"}), "selects no pod"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_manifest_is_named(fault: str) -> None:
    cluster = cluster_of()
    documents = copy.deepcopy([json.loads(json.dumps(one)) for one in render_manifests(cluster)])
    change, words = FAULTS[fault]
    change(documents)
    wrong = check_manifests(cluster, documents)
    assert any(words in one for one in wrong), wrong


def test_a_service_that_selects_workers_is_wrong() -> None:
    cluster = cluster_of(parallel={"tensor": 2, "nnodes": 2})
    documents = render_manifests(cluster)
    del documents[-1]["spec"]["selector"]["rung.io/role"]
    assert any("selects workers" in one for one in check_manifests(cluster, documents))


def test_forbidden_settings_are_refused_before_anything_is_applied() -> None:
    cluster = cluster_of(environment={"GLOO_SOCKET_IFNAME": "lo"})
    wrong = " | ".join(check_manifests(cluster, render_manifests(cluster)))
    assert "differ" in wrong
    assert "is lo" in wrong


def test_a_container_gets_the_devices_and_mounts() -> None:
    fields = {
        "container": {"image": "rung:1"},
        "hosts": [{"name": "a", "address": "10.0.0.1", "interface": "eth0", "devices": [10, 2]}],
    }
    container = parse_cluster({"name": "chat", "model": "/m", **fields}).container
    assert container is not None
    words = container_command(container, "chat-0", ["rung", "serve"], {"RUNG_API_KEY": "secret"}, (10, 2), "/m", True)
    devices = [words[place + 1] for place, word in enumerate(words) if word == "--device"]
    assert devices == ["/dev/davinci2", "/dev/davinci10", *CONTROL_DEVICES]
    mounts = [words[place + 1] for place, word in enumerate(words) if word == "-v"]
    assert mounts == [f"{path}:{path}:ro" for path in (*DRIVER_MOUNTS, "/m")]
    assert "secret" not in " ".join(words)
    assert words[-3:] == ["rung:1", "rung", "serve"]
    assert "--privileged" not in words


FAKE_KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[3] == "get":
    print((folder / "pods.json").read_text())
elif sys.argv[3] in ("apply", "delete"):
    (folder / sys.argv[3]).write_text(sys.stdin.read())
    print(sys.argv[3] + " done")
elif sys.argv[3] == "logs":
    print("log of " + sys.argv[4])
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in kubectl's place that answers with pods.json and writes down what it is asked."""
    tool = tmp_path / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(FAKE_KUBECTL.format(python=sys.executable, folder=str(tmp_path)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tmp_path


def pod(name: str, phase: str = "Running", ready: bool = True, waiting: str | None = None) -> dict[str, Any]:
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"restartCount": 1, "state": state}],
        },
    }


def test_up_waits_for_pods_found_by_label(kubectl: Path) -> None:
    (kubectl / "pods.json").write_text(json.dumps({"items": [pod("chat-0-leader-0"), pod("chat-1-leader-0")]}))
    said: list[str] = []
    cluster = cluster_of()
    text = dump_manifests(render_manifests(cluster))
    kube.up(cluster, text, said.append, poll_s=0.01)
    assert (kubectl / "apply").read_text() == text
    assert said[-1] == "2 of 2 pods are ready"
    calls = [json.loads(line) for line in (kubectl / "calls").read_text().splitlines()]
    assert calls[1] == ["-n", "default", "get", "pods", "-l", "rung.io/deployment=chat", "-o", "json"]
    kube.down(cluster, text, said.append)
    assert (kubectl / "delete").read_text() == text


def test_up_ends_when_waiting_cannot_help(kubectl: Path) -> None:
    (kubectl / "pods.json").write_text(
        json.dumps({"items": [pod("chat-0-leader-0", "Pending", False, "ErrImagePull")]})
    )
    with pytest.raises(ClusterError, match="chat-0-leader-0 is ErrImagePull"):
        kube.up(cluster_of(), "", lambda _: None, poll_s=0.01)
    (kubectl / "pods.json").write_text(json.dumps({"items": [pod("chat-0-leader-0", ready=False)]}))
    with pytest.raises(ClusterError, match="0 of 2 pods are ready after 1 s"):
        kube.up(cluster_of(timeouts={"ready_s": 1}), "", lambda _: None, poll_s=0.2)


def test_logs_want_the_exact_name(kubectl: Path) -> None:
    """A part of a name would also find others: chat-1 is in chat-10."""
    (kubectl / "pods.json").write_text(json.dumps({"items": [pod("chat-10-leader-0"), pod("chat-1-leader-0")]}))
    assert kube.logs(cluster_of(), "chat-1-leader-0", 5, follow=False) == 0
    with pytest.raises(ClusterError, match="is no pod of chat; known: chat-1-leader-0, chat-10-leader-0"):
        kube.logs(cluster_of(), "chat-1", 5, follow=False)


def test_the_script_renders_and_dry_runs(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubectl / "cluster.yaml"
    fields = {"name": "chat", "model": "m", "kubernetes": {"kind": "leaderworkerset", "image": "x"}}
    file.write_text(yaml.safe_dump(fields))
    outputs = []
    for arguments in (["render", str(file)], ["up", str(file), "--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["deploy", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert [one["kind"] for one in yaml.safe_load_all(outputs[0])] == ["LeaderWorkerSet", "Service"]
    assert not (kubectl / "calls").exists()
