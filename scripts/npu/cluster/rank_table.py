"""The rank table that HCCL reads (`RANK_TABLE_FILE`): made from ranks, and checked by its rules.

    version 1.0 (A2)   server_list: server_id, device: [device_id, device_ip, rank_id]
    version 1.2 (A3)   the same with super_device_id, and super_pod_list: super_pod_id, server_list: [server_id]

Numbers are strings in the file. The checks look at any table, also one that another tool wrote.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rank:
    """One device of a replica. `super_pod` and `super_device` are None on machines without super pods."""

    rank_id: int
    server_id: str
    device: int
    device_ip: str | None
    super_device: str | None = None
    super_pod: str | None = None


def rank_table(ranks: Sequence[Rank]) -> dict[str, Any]:
    """The table of these ranks, in their order; version 1.2 as soon as there is a super pod."""
    servers: dict[str, list[dict[str, str]]] = {}
    pods: dict[str, list[str]] = {}
    for rank in ranks:
        device = {"device_id": str(rank.device), "rank_id": str(rank.rank_id)}
        if rank.device_ip is not None:
            device["device_ip"] = rank.device_ip
        if rank.super_device is not None:
            device["super_device_id"] = rank.super_device
        servers.setdefault(rank.server_id, []).append(device)
        if rank.super_pod is not None and rank.server_id not in pods.setdefault(rank.super_pod, []):
            pods[rank.super_pod].append(rank.server_id)
    table: dict[str, Any] = {
        "version": "1.2" if pods else "1.0",
        "server_count": str(len(servers)),
        "server_list": [{"server_id": name, "device": devices} for name, devices in servers.items()],
        "status": "completed",
    }
    if pods:
        table["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": name} for name in names]} for pod, names in pods.items()
        ]
    return table


def check_rank_table(text: str) -> list[str]:
    """Everything that is wrong with a rank table; empty when it is right."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        return [f"it is no JSON: {error.msg} at line {error.lineno}"]
    if not isinstance(table, dict):
        return ["it is no JSON object"]
    servers = table.get("server_list")
    if not isinstance(servers, list) or not servers or not all(isinstance(one, dict) for one in servers):
        return ["server_list is missing or empty"]
    try:
        return [*_check_head(table, servers), *_check_devices(servers), *_check_super_pods(table, servers)]
    except (AttributeError, TypeError):
        return ["a list holds something else than objects; see the vendor's rank table reference"]


def _check_head(table: dict[str, Any], servers: list[dict[str, Any]]) -> list[str]:
    wrong = []
    if table.get("version") not in ("1.0", "1.2"):
        wrong.append(f"version is {table.get('version')!r}; HCCL knows 1.0 and, with super pods, 1.2")
    if table.get("status") != "completed":
        wrong.append(
            f"status is {table.get('status')!r}, not 'completed': whoever writes it has not finished; wait for it"
        )
    if str(table.get("server_count")) != str(len(servers)):
        wrong.append(f"server_count is {table.get('server_count')!r} and server_list has {len(servers)}")
    names = Counter(str(server.get("server_id", "")) for server in servers)
    if "" in names:
        wrong.append("a server has no server_id")
    wrong += [f"server_id {name} stands {count} times" for name, count in names.items() if name and count > 1]
    return wrong


def _check_devices(servers: list[dict[str, Any]]) -> list[str]:
    wrong, ranks, addresses = [], [], Counter[str]()
    total = sum(len(server.get("device") or ()) for server in servers)
    for server in servers:
        name, devices = server.get("server_id"), server.get("device")
        if not isinstance(devices, list) or not devices:
            wrong.append(f"server {name} has no device")
            continue
        ids = Counter(str(device.get("device_id")) for device in devices)
        wrong += [f"server {name}: device_id {one!r} is no number" for one in ids if not one.isdigit()]
        wrong += [f"server {name}: device_id {one} stands {count} times" for one, count in ids.items() if count > 1]
        for device in devices:
            rank = str(device.get("rank_id"))
            if not rank.isdigit():
                wrong.append(f"server {name}: rank_id {rank!r} is no number")
            else:
                ranks.append(int(rank))
            address = device.get("device_ip")
            if address is None and len(servers) > 1:
                wrong.append(
                    f"server {name}: device {device.get('device_id')} has no device_ip; more than one server needs it"
                )
            elif address is not None:
                addresses[str(address)] += 1
    for address, count in addresses.items():
        if not _is_address(address):
            wrong.append(f"device_ip {address} is no address")
        elif count > 1:
            wrong.append(f"device_ip {address} stands {count} times")
    if sorted(ranks) != list(range(total)):
        wrong.append(f"rank ids must be 0 to {total - 1}, each once; they are {', '.join(map(str, sorted(ranks)))}")
    return wrong


def _check_super_pods(table: dict[str, Any], servers: list[dict[str, Any]]) -> list[str]:
    pods = table.get("super_pod_list")
    if pods is None:
        return ["version 1.2 needs super_pod_list"] if table.get("version") == "1.2" else []
    wrong = []
    if table.get("version") != "1.2":
        wrong.append(f"super_pod_list needs version 1.2, not {table.get('version')!r}")
    names = Counter(str(pod.get("super_pod_id", "")) for pod in pods)
    if "" in names:
        wrong.append("a super pod has no super_pod_id")
    wrong += [f"super_pod_id {name} stands {count} times" for name, count in names.items() if name and count > 1]
    members = Counter(str(one.get("server_id")) for pod in pods for one in pod.get("server_list") or ())
    known = {str(server.get("server_id")) for server in servers}
    wrong += [f"super pods name server {name}, which is not in server_list" for name in members if name not in known]
    wrong += [f"server {name} is in {count} super pods" for name, count in members.items() if count > 1]
    wrong += [f"server {name} is in no super pod" for name in sorted(known - set(members))]
    devices = [device for server in servers for device in server.get("device") or ()]
    if any("super_device_id" not in device for device in devices):
        wrong.append("a device has no super_device_id, which super pods need")
    return wrong


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
