"""Kubernetes manifests: a Volcano Job a replica or one LeaderWorkerSet, and the Service that balances.

Three probes ask three questions: startup (has it loaded? at least 30 minutes), readiness (`/ready`: are new requests
welcome?), liveness (`/health`: does a step end in time?). None generates a token. What is rendered is checked against
the schemas in scripts/npu/schemas and by rules that no schema can say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from cluster.cluster_file import ClusterFile, Kubernetes
from cluster.containers import DRIVER_MOUNTS
from cluster.environment import (
    LAUNCH_BLOCKING,
    PROXIES,
    check_environment,
    check_launch_blocking,
    npu_environment,
)
from cluster.plan import features_of, serve_arguments
from cluster.verdicts import Severity

Manifest = dict[str, Any]
SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"
DEPLOYMENT_LABEL, ROLE_LABEL, REPLICA_LABEL = "rung.io/deployment", "rung.io/role", "rung.io/replica"
CONTAINER = "ascend"
PROBE_PERIOD_S = 10
DRAIN_MARGIN_S = 15
SESSION_AFFINITY_S = 10800
MODEL_MOUNT = "/models"
SCHEMA_OF = {"Job": "volcano-job.json", "LeaderWorkerSet": "leaderworkerset.json", "Service": "service.json"}


def render_manifests(cluster: ClusterFile) -> list[Manifest]:
    """All documents of a deployment on Kubernetes."""
    assert cluster.kubernetes is not None
    workloads = _volcano_jobs(cluster) if cluster.kubernetes.kind == "volcano" else [_leader_worker_set(cluster)]
    return [*workloads, _service(cluster)]


def dump_manifests(documents: list[Manifest]) -> str:
    """YAML text, documents separated; no anchors, so that every part can be read where it stands."""
    plain = [json.loads(json.dumps(one)) for one in documents]
    text: str = yaml.safe_dump_all(plain, sort_keys=False, default_flow_style=False)
    return text


def _volcano_jobs(cluster: ClusterFile) -> list[Manifest]:
    """One Job a replica: its nodes start together or not at all, and one replica's loss does not restart the others."""
    kubernetes, nnodes = _of(cluster), cluster.parallel.nnodes
    jobs = []
    for index in range(cluster.replicas):
        labels = _labels(cluster) | {REPLICA_LABEL: str(index)}
        tasks = [{"name": "leader", "replicas": 1, "template": _pod(cluster, labels | {ROLE_LABEL: "leader"})}]
        if nnodes > 1:
            worker = _pod(cluster, labels | {ROLE_LABEL: "worker"}, is_leader=False)
            tasks.append({"name": "worker", "replicas": nnodes - 1, "template": worker})
        spec: Manifest = {
            "minAvailable": nnodes,
            "schedulerName": "volcano",
            "plugins": {"svc": [], "env": []},
            "policies": [
                {"event": "PodEvicted", "action": "RestartJob"},
                {"event": "PodFailed", "action": "RestartJob"},
            ],
            "maxRetry": 10,
            "tasks": tasks,
        }
        if kubernetes.queue is not None:
            spec["queue"] = kubernetes.queue
        metadata = _metadata(cluster, f"{cluster.name}-{index}", labels | _platform_labels(kubernetes))
        jobs.append({"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": metadata, "spec": spec})
    return jobs


def _leader_worker_set(cluster: ClusterFile) -> Manifest:
    template: Manifest = {
        "size": cluster.parallel.nnodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _pod(cluster, _labels(cluster) | {ROLE_LABEL: "leader"}),
        "workerTemplate": _pod(cluster, _labels(cluster) | {ROLE_LABEL: "worker"}, is_leader=False),
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(cluster, cluster.name, _labels(cluster)),
        "spec": {"replicas": cluster.replicas, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template},
    }


def _service(cluster: ClusterFile) -> Manifest:
    """Balances over the leaders that are ready. A client stays with one pod, for its sessions' sake."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cluster, cluster.name, _labels(cluster)),
        "spec": {
            "selector": _labels(cluster) | {ROLE_LABEL: "leader"},
            "ports": [
                {"name": "http", "port": cluster.ports.server, "targetPort": cluster.ports.server, "protocol": "TCP"}
            ],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": SESSION_AFFINITY_S}},
        },
    }


def _pod(cluster: ClusterFile, labels: dict[str, str], is_leader: bool = True) -> Manifest:
    kubernetes = _of(cluster)
    spec: Manifest = {
        "terminationGracePeriodSeconds": cluster.timeouts.drain_s + DRAIN_MARGIN_S,
        "containers": [_container(cluster, is_leader)],
        "volumes": _volumes(cluster),
        "nodeSelector": _node_selector(kubernetes),
    }
    if kubernetes.kind == "volcano":
        spec |= {"schedulerName": "volcano", "restartPolicy": "Never"}
        labels = labels | _platform_labels(kubernetes)
    if kubernetes.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {"metadata": {"labels": labels}, "spec": spec}


def _container(cluster: ClusterFile, is_leader: bool) -> Manifest:
    kubernetes, port = _of(cluster), cluster.ports.server
    share = cluster.parallel.tensor // cluster.parallel.nnodes
    amounts: dict[str, Any] = {"cpu": str(kubernetes.cpus), "memory": kubernetes.memory}
    if cluster.device == "npu":
        amounts[kubernetes.resource] = str(share)
    container: Manifest = {
        "name": CONTAINER,
        "image": kubernetes.image,
        "command": ["rung", *serve_arguments(cluster, "0.0.0.0", port, _model_in_pod(cluster))],
        "env": _pod_environment(cluster),
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": _mounts(cluster),
    }
    if kubernetes.privileged:
        container["securityContext"] = {"privileged": True}
    if is_leader:
        container |= _probes(cluster, port)
    return container


def _probes(cluster: ClusterFile, port: int) -> Manifest:
    def http(path: str, failures: int, timeout_s: int = 5) -> Manifest:
        action = {"path": path, "port": port}
        return {
            "httpGet": action,
            "periodSeconds": PROBE_PERIOD_S,
            "timeoutSeconds": timeout_s,
            "failureThreshold": failures,
        }

    budget = -(-_of(cluster).startup_budget_s // PROBE_PERIOD_S)
    return {
        "startupProbe": http("/health", budget),
        "readinessProbe": http("/ready", 2),
        "livenessProbe": http("/health", 6),
    }


def _pod_environment(cluster: ClusterFile) -> list[Manifest]:
    kubernetes, timeouts = _of(cluster), cluster.timeouts
    status = "status.hostIP" if kubernetes.host_network else "status.podIP"
    values: dict[str, str] = {}
    entries: list[Manifest] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": status}}},
    ]
    if cluster.device == "npu":
        interface = kubernetes.interface or "eth0"
        values = npu_environment(interface, None, timeouts.hccl_connect_s, timeouts.hccl_exec_s, cluster.hccl_buffer_mb)
        entries.append({"name": "HCCL_IF_IP", "valueFrom": {"fieldRef": {"fieldPath": status}}})
    values |= cluster.environment
    entries += [{"name": name, "value": value} for name, value in values.items()]
    if kubernetes.api_key_secret is not None:
        key = {"secretKeyRef": {"name": kubernetes.api_key_secret, "key": "api-key"}}
        entries.append({"name": "RUNG_API_KEY", "valueFrom": key})
    return entries


def _mount_name(path: str) -> str:
    return "host-" + "".join(character if character.isalnum() else "-" for character in path.strip("/").lower())


def _mounts(cluster: ClusterFile) -> list[Manifest]:
    kubernetes = _of(cluster)
    mounts: list[Manifest] = [{"name": "dshm", "mountPath": "/dev/shm"}]
    if cluster.device == "npu":
        mounts += [{"name": _mount_name(path), "mountPath": path, "readOnly": True} for path in DRIVER_MOUNTS]
    if kubernetes.model_host_path is not None or kubernetes.model_claim is not None:
        mounts.append({"name": "models", "mountPath": MODEL_MOUNT, "readOnly": True})
    return mounts


def _volumes(cluster: ClusterFile) -> list[Manifest]:
    kubernetes = _of(cluster)
    volumes: list[Manifest] = [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shm_size}}]
    if cluster.device == "npu":
        volumes += [{"name": _mount_name(path), "hostPath": {"path": path}} for path in DRIVER_MOUNTS]
    if kubernetes.model_claim is not None:
        volumes.append(
            {"name": "models", "persistentVolumeClaim": {"claimName": kubernetes.model_claim, "readOnly": True}}
        )
    elif kubernetes.model_host_path is not None:
        volumes.append({"name": "models", "hostPath": {"path": kubernetes.model_host_path, "type": "Directory"}})
    return volumes


def _model_in_pod(cluster: ClusterFile) -> str:
    """A model below model_host_path is the same file below the mount."""
    path = _of(cluster).model_host_path
    if path is not None and Path(cluster.model).is_relative_to(path):
        return str(Path(MODEL_MOUNT) / Path(cluster.model).relative_to(path))
    return cluster.model


def _node_selector(kubernetes: Kubernetes) -> dict[str, str]:
    selector = {"host-arch": f"huawei-{kubernetes.arch}"} if kubernetes.kind == "volcano" else {}
    if kubernetes.accelerator_type is not None:
        selector["accelerator-type"] = kubernetes.accelerator_type
    return selector | kubernetes.node_selector


def _platform_labels(kubernetes: Kubernetes) -> dict[str, str]:
    """What MindCluster looks at: the kind of chips, and that pods leave a device that it finds broken."""
    return {"ring-controller.atlas": kubernetes.ring_controller, "fault-scheduling": "force"}


def _labels(cluster: ClusterFile) -> dict[str, str]:
    return {DEPLOYMENT_LABEL: cluster.name}


def _metadata(cluster: ClusterFile, name: str, labels: dict[str, str]) -> Manifest:
    return {"name": name, "namespace": _of(cluster).namespace, "labels": labels}


def _of(cluster: ClusterFile) -> Kubernetes:
    assert cluster.kubernetes is not None
    return cluster.kubernetes


def check_manifests(cluster: ClusterFile, documents: list[Manifest]) -> list[str]:
    """Everything that is wrong with these documents, without a cluster; empty when nothing is."""
    wrong = [one for document in documents for one in check_schema(document)]
    if wrong:
        return wrong
    for document in documents:
        for place, template in pod_templates(document):
            wrong += [f"{place}: {one}" for one in _check_pod(template)]
    wrong += _check_selectors(documents)
    values = cluster.environment
    rules = check_launch_blocking(values)
    if cluster.device == "npu":
        whole = {entry["name"]: entry["value"] for entry in _pod_environment(cluster) if "value" in entry}
        rules = rules + check_environment(whole, features_of(cluster))
    return wrong + [f"environment: {one.what}; {one.change}" for one in rules if one.severity is Severity.FAIL]


def check_schema(document: Manifest) -> list[str]:
    """What the checked-in schema of its kind says."""
    kind = document.get("kind")
    if kind not in SCHEMA_OF:
        return [f"kind {kind!r} has no schema here; known: {', '.join(SCHEMA_OF)}"]
    validator = Draft202012Validator(_schema(SCHEMA_OF[kind]), registry=_registry())
    name = document.get("metadata", {}).get("name")
    return [
        f"{kind} {name}: {'.'.join(map(str, error.absolute_path)) or 'document'}: {error.message}"
        for error in sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
    ]


def _schema(name: str) -> Manifest:
    found: Manifest = json.loads((SCHEMAS / name).read_text())
    return found


def _registry() -> Any:
    return Registry().with_resources(
        [(path.name, Resource.from_contents(_schema(path.name))) for path in SCHEMAS.glob("*.json")]
    )


def pod_templates(document: Manifest) -> list[tuple[str, Manifest]]:
    """Every pod template of a document, with its place."""
    name = document["metadata"]["name"]
    if document["kind"] == "Job":
        return [(f"Job {name} task {task['name']}", task["template"]) for task in document["spec"]["tasks"]]
    if document["kind"] == "LeaderWorkerSet":
        template = document["spec"]["leaderWorkerTemplate"]
        return [
            (f"LeaderWorkerSet {name} {key}", template[key])
            for key in ("leaderTemplate", "workerTemplate")
            if key in template
        ]
    return []


def _check_pod(template: Manifest) -> list[str]:
    wrong, spec = [], template["spec"]
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    for container in spec["containers"]:
        resources = container["resources"]
        if resources["requests"] != resources["limits"]:
            wrong.append("requests and limits differ; devices and pinned memory need the same in both")
        wrong += [
            f"mount {one['name']} has no volume" for one in container["volumeMounts"] if one["name"] not in volumes
        ]
        names = [entry["name"] for entry in container["env"]]
        wrong += [f"variable {name} stands twice" for name in sorted({name for name in names if names.count(name) > 1})]
        wrong += [f"variable {name} must not be set" for name in names if name == LAUNCH_BLOCKING or name in PROXIES]
        if template["metadata"]["labels"].get(ROLE_LABEL) == "leader":
            wrong += _check_probes(container)
    if len(set(volumes)) != len(volumes):
        wrong.append("two volumes have the same name")
    return wrong


def _check_probes(container: Manifest) -> list[str]:
    wrong = []
    for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        if probe not in container:
            wrong.append(f"{probe} is missing")
        elif container[probe]["httpGet"]["path"] != path:
            wrong.append(f"{probe} asks {container[probe]['httpGet']['path']}, not {path}")
        elif container[probe]["httpGet"]["port"] not in [port["containerPort"] for port in container["ports"]]:
            wrong.append(f"{probe} asks a port that the container does not have")
    startup = container.get("startupProbe", {})
    budget = startup.get("periodSeconds", 0) * startup.get("failureThreshold", 0)
    if startup and budget < 1800:
        wrong.append(f"startupProbe gives up after {budget} s; weights and graphs need 1800")
    return wrong


def _check_selectors(documents: list[Manifest]) -> list[str]:
    """A Service that selects no pod of ours, or one of its workers, is wrong."""
    labels = [template["metadata"]["labels"] for document in documents for _, template in pod_templates(document)]
    wrong = []
    for service in (document for document in documents if document["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        chosen = [one for one in labels if selector <= one.items()]
        if not chosen:
            wrong.append(f"Service {service['metadata']['name']} selects no pod")
        if any(one.get(ROLE_LABEL) != "leader" for one in chosen):
            wrong.append(f"Service {service['metadata']['name']} selects workers, which answer nothing")
    return wrong
