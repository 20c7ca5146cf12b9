"""A deployment on Kubernetes through `kubectl`: apply, wait for the pods, show, delete. Pods are found by label alone,
never by a part of their name.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.cluster_file import ClusterFile
from cluster.errors import ClusterError
from cluster.manifests import DEPLOYMENT_LABEL

KUBECTL_TIMEOUT_S = 120.0
POLL_S = 5.0


@dataclass(frozen=True)
class Pod:
    """One pod of the deployment."""

    name: str
    node: str
    phase: str
    ready: bool
    restarts: int
    reason: str


def up(cluster: ClusterFile, manifests: str, say: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Apply and wait until every pod is ready.

    Raises:
        ClusterError: kubectl refuses, a pod fails, or it took too long; nothing is deleted, so that one can look.
    """
    say(_kubectl(cluster, ["apply", "-f", "-"], manifests).strip())
    wanted = cluster.replicas * cluster.parallel.nnodes
    deadline = time.monotonic() + cluster.timeouts.ready_s
    while True:
        pods = status(cluster)
        num_ready = sum(pod.ready for pod in pods)
        if num_ready >= wanted:
            say(f"{num_ready} of {wanted} pods are ready")
            return
        if failed := [pod for pod in pods if pod.phase == "Failed" or pod.reason in HOPELESS]:
            pod = failed[0]
            raise ClusterError(f"pod {pod.name} is {pod.reason or pod.phase}; see: logs {pod.name}")
        if time.monotonic() > deadline:
            states = ", ".join(f"{pod.name}: {pod.reason or pod.phase}" for pod in pods) or "there is none"
            raise ClusterError(f"{num_ready} of {wanted} pods are ready after {cluster.timeouts.ready_s} s ({states})")
        time.sleep(poll_s)


HOPELESS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"})
"""Reasons to wait that waiting does not cure."""


def status(cluster: ClusterFile) -> list[Pod]:
    """The deployment's pods, by name."""
    selector = f"{DEPLOYMENT_LABEL}={cluster.name}"
    found = json.loads(_kubectl(cluster, ["get", "pods", "-l", selector, "-o", "json"]))
    return sorted((_pod(item) for item in found["items"]), key=lambda pod: pod.name)


def _pod(item: dict[str, Any]) -> Pod:
    state = item.get("status", {})
    containers = state.get("containerStatuses", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in state.get("conditions", []))
    waiting = [one["state"]["waiting"].get("reason", "") for one in containers if "waiting" in one.get("state", {})]
    restarts = sum(one.get("restartCount", 0) for one in containers)
    node = item.get("spec", {}).get("nodeName", "-")
    return Pod(
        item["metadata"]["name"], node, state.get("phase", "Unknown"), ready, restarts, waiting[0] if waiting else ""
    )


def logs(cluster: ClusterFile, pod: str, lines: int, follow: bool) -> int:
    """Show a pod's log; kubectl's own exit status."""
    names = [one.name for one in status(cluster)]
    if pod not in names:
        raise ClusterError(f"{pod!r} is no pod of {cluster.name}; known: {', '.join(names) or 'none'}")
    words = ["kubectl", *_namespace(cluster), "logs", pod, f"--tail={lines}", *(["-f"] if follow else [])]
    return subprocess.run(words, check=False).returncode


def down(cluster: ClusterFile, manifests: str, say: Callable[[str], None]) -> None:
    """Delete what was applied and wait until it is gone."""
    timeout_s = cluster.timeouts.drain_s + KUBECTL_TIMEOUT_S
    say(_kubectl(cluster, ["delete", "-f", "-", "--ignore-not-found", "--wait=true"], manifests, timeout_s).strip())


def _namespace(cluster: ClusterFile) -> list[str]:
    assert cluster.kubernetes is not None
    return ["-n", cluster.kubernetes.namespace]


def _kubectl(cluster: ClusterFile, words: list[str], stdin: str = "", timeout_s: float = KUBECTL_TIMEOUT_S) -> str:
    try:
        done = subprocess.run(
            ["kubectl", *_namespace(cluster), *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError("kubectl is not installed or not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"kubectl {words[0]} gave no answer within {timeout_s:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ClusterError(f"kubectl {words[0]}: {said[-1] if said else f'status {done.returncode}'}")
    return done.stdout
