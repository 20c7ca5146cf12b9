"""From a cluster file to everything that will be done, decided before anything is: who runs where with what.

    replica   one server that answers; today one process on one host
    node      one replica's share of one host: node_rank of nnodes, its devices, its environment
    rank      one device of a replica

Nothing here asks a host or starts anything. `check_plan` says what cannot work.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cluster_file import ClusterFile, Host, read_cluster_file
from cluster.environment import Features, check_environment, check_launch_blocking, npu_environment
from cluster.errors import ClusterError
from cluster.needs import Needs
from cluster.rank_table import Rank, check_rank_table, rank_table
from cluster.verdicts import Finding, Severity, fail
from cluster.visible_devices import VARIABLE, format_visible_devices

MARKER = "RUNG_DEPLOYMENT"
"""Variable that every process of a deployment carries: `<deployment>/<process>`. By it they are found again."""
CANN_SETUP = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
MOONCAKE_FIRST_PORT, MOONCAKE_PORTS_PER_DEVICE = 20000, 1000


@dataclass(frozen=True)
class Node:
    """A replica's share of one host."""

    host: Host
    node_rank: int
    nnodes: int
    devices: tuple[int, ...]
    """Physical ids, ascending; empty on a device without ids."""
    environment: dict[str, str]


@dataclass(frozen=True)
class Replica:
    """One server, on one host or over several."""

    index: int
    name: str
    port: int
    rendezvous_port: int
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]

    @property
    def leader(self) -> Host:
        return self.nodes[0].host

    @property
    def url(self) -> str:
        return f"http://{_bracketed(self.leader.address)}:{self.port}"

    @property
    def rendezvous(self) -> str:
        return f"{_bracketed(self.leader.address)}:{self.rendezvous_port}"

    @property
    def table(self) -> dict[str, Any] | None:
        """The rank table; None when there is one rank and nobody to find."""
        return rank_table(self.ranks) if len(self.ranks) > 1 else None


@dataclass(frozen=True)
class Plan:
    """A whole deployment on bare hosts."""

    cluster: ClusterFile
    replicas: tuple[Replica, ...]
    router_host: Host | None

    @property
    def router_url(self) -> str | None:
        if self.router_host is None:
            return None
        return f"http://{_bracketed(self.router_host.address)}:{self.cluster.ports.router}"


def make_plan(cluster: ClusterFile) -> Plan:
    """Spread the replicas over the hosts, in the file's order: as many as fit on a host before the next one.

    Raises:
        ClusterError: there are not enough devices, or hosts for a replica that spans several.
    """
    if cluster.kubernetes is not None:
        raise ClusterError("ranks on Kubernetes are planned by its scheduler; use render")
    free = {host.name: sorted(host.devices) for host in cluster.hosts}
    num_servers: dict[str, int] = defaultdict(int)
    replicas = []
    for index in range(cluster.replicas):
        hosts = _hosts_for(cluster, free, num_servers)
        replicas.append(_replica(cluster, index, hosts, free, num_servers[hosts[0].name]))
        num_servers[hosts[0].name] += 1
    router = cluster.router
    router_host = None
    if router is not None:
        wanted = router.host or cluster.hosts[0].name
        router_host = next(host for host in cluster.hosts if host.name == wanted)
    return Plan(cluster, tuple(replicas), router_host)


def _hosts_for(cluster: ClusterFile, free: dict[str, list[int]], num_servers: dict[str, int]) -> list[Host]:
    """The hosts of the next replica: the first ones with enough devices, or without devices the least loaded one."""
    nnodes, share = cluster.parallel.nnodes, cluster.parallel.tensor // cluster.parallel.nnodes
    if cluster.device != "npu" and not any(host.devices for host in cluster.hosts):
        if nnodes > len(cluster.hosts):
            raise ClusterError(f"parallel.nnodes={nnodes} needs as many hosts; {len(cluster.hosts)} are given")
        return sorted(cluster.hosts, key=lambda host: num_servers[host.name])[:nnodes]
    fitting = [host for host in cluster.hosts if len(free[host.name]) >= share]
    if len(fitting) < nnodes:
        left = ", ".join(f"{name}: {len(devices)}" for name, devices in free.items())
        raise ClusterError(
            f"{cluster.replicas} replicas of {cluster.parallel.tensor} devices on {nnodes} hosts each do not fit; "
            f"devices left: {left}. Lower replicas or parallel.tensor, or add hosts"
        )
    return fitting[:nnodes]


def _replica(cluster: ClusterFile, index: int, hosts: list[Host], free: dict[str, list[int]], place: int) -> Replica:
    name, share = f"replica-{index}", cluster.parallel.tensor // cluster.parallel.nnodes
    nodes: list[Node] = []
    ranks: list[Rank] = []
    for node_rank, host in enumerate(hosts):
        devices = tuple(free[host.name][:share])
        del free[host.name][:share]
        for device in devices:
            at = host.devices.index(device)
            address = host.device_ips[at] if host.device_ips else None
            super_device = host.super_device_ids[at] if host.super_device_ids else None
            ranks.append(Rank(len(ranks), host.address, device, address, super_device, host.super_pod))
        environment = _environment(cluster, host, devices, f"{cluster.name}/{name}", len(hosts))
        nodes.append(Node(host, node_rank, len(hosts), devices, environment))
    ports = cluster.ports
    return Replica(index, name, ports.server + place, ports.rendezvous + place, tuple(nodes), tuple(ranks))


def _environment(
    cluster: ClusterFile, host: Host, devices: tuple[int, ...], marker: str, nnodes: int
) -> dict[str, str]:
    values = {MARKER: marker}
    if cluster.device == "npu":
        assert host.interface is not None
        timeouts = cluster.timeouts
        values |= npu_environment(
            host.interface, host.address, timeouts.hccl_connect_s, timeouts.hccl_exec_s, cluster.hccl_buffer_mb
        )
        values[VARIABLE] = format_visible_devices(devices)
        if cluster.parallel.tensor > 1:
            values["RANK_TABLE_FILE"] = rank_table_path(cluster, host, marker.rpartition("/")[2])
    return values | cluster.environment


def rank_table_path(cluster: ClusterFile, host: Host, replica: str) -> str:
    """Where a replica's rank table lies on a host."""
    return f"{host.state_dir.rstrip('/')}/{cluster.name}/{replica}.rank_table.json"


def setup_of(cluster: ClusterFile, host: Host) -> tuple[str, ...]:
    """Scripts that a shell sources before it starts a replica on a host: a shell over ssh has read none of them."""
    if cluster.container is not None:
        return ()
    if host.setup is None:
        return (CANN_SETUP,) if cluster.device == "npu" else ()
    return host.setup


def serve_arguments(cluster: ClusterFile, address: str, port: int, model: str | None = None) -> list[str]:
    """The words behind `rung`: what a replica is told."""
    words = ["serve", "--model", model or cluster.model, "--device", cluster.device]
    words += ["--host", address, "--port", str(port)]
    words += [
        "--drain-timeout-s",
        str(cluster.timeouts.drain_s),
        "--watchdog-timeout-s",
        str(cluster.timeouts.watchdog_s),
    ]
    for name, value in cluster.serve.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return words


def features_of(cluster: ClusterFile) -> Features:
    """What the flags ask for, as far as it excludes environment settings."""
    flags = {name.replace("-", "_"): value for name, value in cluster.serve.items()}
    eager = bool(flags.get("disable_cuda_graph") or flags.get("enforce_eager"))
    sleeps = bool(flags.get("enable_memory_saver") or flags.get("enable_sleep_mode"))
    return Features(uses_graphs=not eager, uses_sleep_mode=sleeps)


def ports_of(plan: Plan) -> dict[str, list[tuple[int, str]]]:
    """The ports that each host must have free, by host name."""
    wanted: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for replica in plan.replicas:
        wanted[replica.leader.name].append((replica.port, replica.name))
        if len(replica.nodes) > 1:
            wanted[replica.leader.name].append((replica.rendezvous_port, f"{replica.name} rendezvous"))
    if plan.router_host is not None:
        wanted[plan.router_host.name].append((plan.cluster.ports.router, "router"))
    return wanted


def check_plan(plan: Plan) -> list[Finding]:
    """Everything that cannot work, before a host is asked."""
    findings = list(_check_ports(plan))
    for replica in plan.replicas:
        for node in replica.nodes:
            rules = check_launch_blocking(node.environment)
            if plan.cluster.device == "npu":
                rules = rules + check_environment(node.environment, features_of(plan.cluster))
                if not node.environment.get(VARIABLE, "").strip():
                    rules.append(fail(f"{VARIABLE} is empty", "give the host devices"))
            findings += [
                Finding(one.severity, f"{replica.name} on {node.host.name}: {one.what}", one.change) for one in rules
            ]
        if replica.table is not None:
            change = "see hosts: devices, device_ips, super_pod, super_device_ids"
            findings += [
                fail(f"{replica.name}: rank table: {one}", change)
                for one in check_rank_table(json.dumps(replica.table))
            ]
    containers_need = plan.cluster.container is not None and plan.cluster.parallel.tensor > 1
    if containers_need and any(host.state_dir.startswith("~") for host in plan.cluster.hosts):
        findings.append(fail("a container cannot mount a rank table below ~", "give hosts an absolute state_dir"))
    if plan.cluster.parallel.tensor > 1:
        what = "parallel.tensor is more than 1, and this version of rung serve computes on one device"
        findings.append(fail(what, "set parallel.tensor: 1 and more replicas; plan and render work already"))
    return findings


def _check_ports(plan: Plan) -> Iterator[Finding]:
    for host in plan.cluster.hosts:
        wanted = ports_of(plan).get(host.name, [])
        for number in sorted({number for number, _ in wanted}):
            purposes = [what for port, what in wanted if port == number]
            if len(purposes) > 1:
                yield fail(f"{host.name}: port {number} is wanted by {' and '.join(purposes)}", "move one under ports")
            if number > 65535:
                yield fail(
                    f"{host.name}: port {number} ({purposes[0]}) is no port", "lower ports.server or ports.rendezvous"
                )
        end = MOONCAKE_FIRST_PORT + MOONCAKE_PORTS_PER_DEVICE * len(host.devices)
        for number, what in wanted:
            if plan.cluster.device == "npu" and MOONCAKE_FIRST_PORT <= number < end:
                change = f"choose ports from {end} up"
                said = f"{host.name}: port {number} ({what}) lies in {MOONCAKE_FIRST_PORT} to {end - 1}"
                yield Finding(Severity.WARN, f"{said}, which Mooncake's Ascend transport takes", change)


def needs_of_host(path: Path, name: str | None) -> Needs:
    """What preflight must find on a host of a cluster file.

    Raises:
        ClusterError: the file is wrong, or no such host is in it.
    """
    plan = make_plan(read_cluster_file(path))
    hosts = {host.name: host for host in plan.cluster.hosts}
    if name is None or name not in hosts:
        raise ClusterError(f"--host must be one of {', '.join(hosts)}")
    nodes = [node for replica in plan.replicas for node in replica.nodes if node.host.name == name]
    spanning = max((node.nnodes for node in nodes), default=1)
    devices = tuple(sorted(device for node in nodes for device in node.devices))
    peers = {
        rank.device_ip
        for replica in plan.replicas
        if any(node.host.name == name for node in replica.nodes)
        for rank in replica.ranks
        if rank.device_ip is not None and rank.server_id != hosts[name].address
    }
    return Needs(
        num_devices=max(1, len(devices)),
        devices=devices,
        num_hosts=spanning,
        interface=hosts[name].interface,
        ports=tuple(ports_of(plan).get(name, ())),
        peers=tuple(sorted(peers)),
        load_skew_s=min(600, plan.cluster.timeouts.hccl_connect_s),
        features=features_of(plan.cluster),
    )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
