"""The cluster file: one YAML file that says what to serve, how often, and where. Its shape is the structs below.

Exactly one of `hosts` (bare machines, over ssh or this one) and `kubernetes` stands in it. An unknown key is refused
with the nearest known one; every error names its place. docs/deploy-npu.md describes the fields.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from cluster.errors import ClusterError

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
Flag = str | int | float | bool


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one replica is spread. Today's engine serves with 1 and 1; more is planned and checked, and not started."""

    tensor: Positive = 1
    nnodes: Positive = 1


class Ports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First ports; the n-th replica of a host takes the n-th after them."""

    server: Port = 30000
    rendezvous: Port = 25000
    router: Port = 6677


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds."""

    ready_s: Positive = 1800
    drain_s: Positive = 30
    watchdog_s: Positive = 300
    hccl_connect_s: Annotated[int, msgspec.Meta(ge=120, le=7200)] = 1800
    hccl_exec_s: Annotated[int, msgspec.Meta(ge=0)] = 1836


class Router(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The router before the replicas of bare hosts; it runs on the first host when `host` is not given."""

    host: str | None = None
    listen: str | None = None
    prefix_chars: Positive = 256
    max_load_factor: Annotated[float, msgspec.Meta(ge=1.0)] = 1.5


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run replicas on bare hosts in a container."""

    image: str
    runtime: Literal["docker", "podman", "nerdctl"] = "docker"
    shm_size: str = "16g"
    privileged: bool = False
    mounts: tuple[str, ...] = ()


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine."""

    name: Name
    address: str
    transport: Literal["ssh", "local"] = "ssh"
    user: str | None = None
    ssh_port: Port = 22
    interface: str | None = None
    devices: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    device_ips: tuple[str, ...] = ()
    super_device_ids: tuple[str, ...] = ()
    super_pod: str | None = None
    python: str | None = None
    workdir: str | None = None
    setup: tuple[str, ...] | None = None
    state_dir: str = "~/.cache/rung/deploy"


class Kubernetes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and as what the pods run."""

    kind: Literal["volcano", "leaderworkerset"]
    image: str
    namespace: Name = "default"
    resource: str = "huawei.com/Ascend910"
    ring_controller: str = "ascend-910b"
    arch: Literal["arm", "x86"] = "arm"
    accelerator_type: str | None = None
    node_selector: dict[str, str] = {}
    cpus: Positive = 16
    memory: str = "128Gi"
    shm_size: str = "16Gi"
    interface: str | None = None
    host_network: bool = False
    privileged: bool = False
    model_host_path: str | None = None
    model_claim: str | None = None
    api_key_secret: str | None = None
    queue: str | None = None
    startup_budget_s: Annotated[int, msgspec.Meta(ge=1800)] = 1800


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    name: Name
    model: str
    replicas: Positive = 1
    device: Literal["npu", "cpu", "cuda"] = "npu"
    parallel: Parallel = Parallel()
    ports: Ports = Ports()
    timeouts: Timeouts = Timeouts()
    serve: dict[str, Flag] = {}
    environment: dict[str, str] = {}
    hccl_buffer_mb: Positive = 200
    api_key_env: str | None = None
    router: Router | None = None
    container: Container | None = None
    hosts: tuple[Host, ...] = ()
    kubernetes: Kubernetes | None = None


OWN_FLAGS = frozenset(
    {"model", "model_path", "device", "host", "port", "drain_timeout_s", "watchdog_timeout_s", "api_key"}
)
"""Flags of `rung serve` that the plan sets itself."""


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check a cluster file.

    Raises:
        ClusterError: it is missing, is no YAML, has an unknown key or a wrong value; the message names the place.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ClusterError(f"the cluster file {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"the cluster file {path} is no YAML: {' '.join(str(error).split())}") from None
    return parse_cluster(data)


def parse_cluster(data: Any) -> ClusterFile:
    """The same from what YAML gave."""
    if not isinstance(data, dict):
        raise ClusterError("a cluster file is a mapping with at least name, model and hosts or kubernetes")
    _refuse_unknown_keys(data, ClusterFile, "")
    try:
        cluster = msgspec.convert(data, ClusterFile)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise ClusterError(f"{place.strip('`.') or 'the cluster file'}: {what}") from None
    _check_whole(cluster)
    return cluster


def _refuse_unknown_keys(data: Any, kind: Any, place: str) -> None:
    """Walk data and struct together; the first key that the struct lacks is an error that names the nearest."""
    for option in typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
        if isinstance(option, type) and issubclass(option, msgspec.Struct) and isinstance(data, dict):
            hints = typing.get_type_hints(option, include_extras=False)
            for key, value in data.items():
                here = f"{place}.{key}" if place else str(key)
                if key not in hints:
                    near = difflib.get_close_matches(str(key), hints, 1, cutoff=0.5)
                    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}"
                    raise ClusterError(f"{here}: unknown key; {hint}")
                _refuse_unknown_keys(value, hints[key], here)
        elif typing.get_origin(option) is tuple and isinstance(data, list):
            for index, value in enumerate(data):
                _refuse_unknown_keys(value, typing.get_args(option)[0], f"{place}[{index}]")


def _check_whole(cluster: ClusterFile) -> None:
    """What no single field can say."""
    if bool(cluster.hosts) == (cluster.kubernetes is not None):
        raise ClusterError("give exactly one of hosts and kubernetes")
    parallel = cluster.parallel
    if parallel.tensor % parallel.nnodes:
        raise ClusterError(f"parallel.tensor={parallel.tensor} does not divide over parallel.nnodes={parallel.nnodes}")
    for flag in cluster.serve:
        if flag.replace("-", "_") in OWN_FLAGS:
            raise ClusterError(f"serve.{flag}: the plan sets this flag; see model, device, ports and timeouts")
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", flag):
            raise ClusterError(f"serve.{flag}: write the flag of rung serve without its leading hyphens")
    if cluster.kubernetes is not None:
        if cluster.router is not None:
            raise ClusterError("router: on Kubernetes a Service balances; remove router")
        if cluster.container is not None:
            raise ClusterError("container: on Kubernetes the image stands in kubernetes.image; remove container")
    _check_hosts(cluster)


def _check_hosts(cluster: ClusterFile) -> None:
    names = [host.name for host in cluster.hosts]
    if len(set(names)) != len(names):
        raise ClusterError("hosts: two hosts have the same name")
    addresses = [host.address for host in cluster.hosts]
    if len(set(addresses)) != len(addresses):
        raise ClusterError("hosts: two hosts have the same address; give one host more devices instead")
    for index, host in enumerate(cluster.hosts):
        place = f"hosts[{index}] ({host.name})"
        if not re.fullmatch(r"[A-Za-z0-9.:_-]+", host.address) or host.address.startswith("-"):
            raise ClusterError(f"{place}.address: {host.address!r} is no host name or address")
        if host.user is not None and not re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]*", host.user):
            raise ClusterError(f"{place}.user: {host.user!r} is no user name")
        if len(set(host.devices)) != len(host.devices):
            raise ClusterError(f"{place}.devices names a device twice; name each once")
        for field in ("device_ips", "super_device_ids"):
            values = getattr(host, field)
            if values and len(values) != len(host.devices):
                raise ClusterError(
                    f"{place}.{field} has {len(values)} entries for {len(host.devices)} devices; give one each"
                )
        if cluster.device == "npu":
            _check_npu_host(cluster, host, place)
    if cluster.router is not None and cluster.router.host is not None and cluster.router.host not in names:
        raise ClusterError(f"router.host: {cluster.router.host!r} is no host; known: {', '.join(names)}")


def _check_npu_host(cluster: ClusterFile, host: Host, place: str) -> None:
    if not host.devices:
        raise ClusterError(f"{place}.devices: list the physical device ids to use, such as [0, 1]")
    if host.interface is None:
        change = f"name the interface that owns {host.address} (ip -o addr)"
        raise ClusterError(f"{place}.interface: {change}; none is guessed, and never the loopback")
    if host.interface == "lo" and len(cluster.hosts) > 1:
        raise ClusterError(f"{place}.interface: over lo no other host answers; name the one that owns {host.address}")
