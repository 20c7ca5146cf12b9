"""Checks 5, 6, 7, 11, 12 and 13: device network, host interface, ports, timeouts, socket queues, rank table."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from cluster import hccn
from cluster.checks_npu import read_environment, read_npu_smi, wanted_devices
from cluster.environment import (
    CONNECT_TIMEOUT_RANGE_S,
    DEFAULT_HCCL_CONNECT_TIMEOUT_S,
    INTERFACE_NAMES,
    check_interface_names,
)
from cluster.evidence import Evidence
from cluster.needs import Needs
from cluster.rank_table import check_rank_table
from cluster.verdicts import Finding, fail, not_applicable, ok, softened, warn

HCCN_CONF = "/etc/hccn.conf"
MANY_HOSTS = 8
QUEUE_SYSCTLS = {"/proc/sys/net/core/somaxconn": 4096, "/proc/sys/net/ipv4/tcp_max_syn_backlog": 4096}


def check_device_network(evidence: Evidence, needs: Needs) -> list[Finding]:
    """5: each device's own port. On one host nothing leaves it over these ports, so failures are warnings there."""
    table = read_npu_smi(evidence)
    if isinstance(table, Finding):
        return [not_applicable("no device is known (check 1)")]
    findings = []
    conf = evidence.file(HCCN_CONF)
    addresses = hccn.parse_hccn_conf(conf.text)
    if not conf.is_there:
        findings.append(fail(str(conf.problem), "configure the device addresses with hccn_tool, mount /etc/hccn.conf"))
    devices = wanted_devices(needs, table, read_environment(evidence))
    has_super_pods = len(table.chips) > len({chip.card for chip in table.chips})
    switches: dict[bool, list[int]] = defaultdict(list)
    for device in devices:
        probe = evidence.command("hccn_tool", "-i", str(device), "-link", "-g")
        if not probe.is_there:
            change = "mount hccn_tool (/usr/local/Ascend/driver/tools) into the container"
            findings.append(fail(str(probe.problem), change))
            break
        findings += _check_device(evidence, device, has_super_pods, addresses)
        encrypted = hccn.parse_tls(evidence.command("hccn_tool", "-i", str(device), "-tls", "-g").text)
        if encrypted is not None:
            switches[encrypted].append(device)
        findings += _check_peers(evidence, device, has_super_pods, needs.peers)
    if len(switches) > 1:
        findings.append(
            fail(
                f"TLS is on for devices {switches[True]} and off for {switches[False]}",
                "hccn_tool -i N -tls -s enable 0 on all",
            )
        )
    findings = findings or [ok(f"the ports of {len(devices)} devices are up and healthy")]
    return findings if needs.is_distributed else softened(findings)


def _check_device(evidence: Evidence, device: int, has_super_pods: bool, conf: dict[int, str]) -> list[Finding]:
    def ask(option: str) -> str:
        return evidence.command("hccn_tool", "-i", str(device), f"-{option}", "-g").text

    findings = []
    if (link := hccn.parse_link(ask("link"))) != "UP":
        findings.append(
            fail(
                f"device {device}: link {link or 'unknown'}",
                "check the optical module, the cable and the switch's port",
            )
        )
    health = hccn.parse_net_health(ask("net_health"))
    if health != "Success":
        findings.append(
            fail(f"device {device}: net health {health or 'unknown'}", "check that the detection address answers")
        )
    address = hccn.parse_ip(ask("ip"))
    if address is None:
        findings.append(
            fail(f"device {device} has no address", f"hccn_tool -i {device} -ip -s address A.B.C.D netmask M.M.M.M")
        )
    elif conf and conf.get(device) != address:
        findings.append(
            warn(
                f"device {device} has {address}, {HCCN_CONF} says {conf.get(device)}",
                "write the address again so that it outlives a reboot",
            )
        )
    for option, parse, what in (
        ("netdetect", hccn.parse_netdetect, "detection address"),
        ("gateway", hccn.parse_gateway, "gateway"),
        ("lldp", hccn.parse_lldp, "switch port seen"),
    ):
        if parse(ask(option)) is None:
            findings.append(warn(f"device {device}: no {what}", f"hccn_tool -i {device} -{option} -g; configure it"))
    if has_super_pods:
        vnic = hccn.parse_vnic(ask("vnic"))
        if vnic is None or vnic.link != "UP":
            findings.append(
                fail(
                    f"device {device}: vnic {vnic.link if vnic else 'not there'}", "check the super pod's configuration"
                )
            )
    return findings


def _check_peers(evidence: Evidence, device: int, has_super_pods: bool, peers: tuple[str, ...]) -> list[Finding]:
    findings, option = [], "-hccs_ping" if has_super_pods else "-ping"
    for peer in peers:
        said = evidence.command("hccn_tool", "-i", str(device), option, "-g", "address", peer)
        answer = hccn.parse_ping(said.text)
        if answer is None or not answer.all_came_back:
            got = f"{answer.received} of {answer.sent} came back" if answer else "no answer"
            findings.append(fail(f"device {device} to {peer}: {got}", "check VLAN, gateway and the peer's address"))
    return findings


def check_interface(evidence: Evidence, needs: Needs) -> list[Finding]:
    """6: the named interface exists and owns HCCL_IF_IP, the three names agree, and it is not the loopback."""
    environment = read_environment(evidence)
    findings = check_interface_names(environment)
    names = {environment[name].lstrip("=") for name in INTERFACE_NAMES if environment.get(name)}
    names |= {needs.interface} if needs.interface else set()
    if not names:
        if not needs.is_distributed:
            return [not_applicable("one host, and no interface is named")]
        return [fail("no interface is named for more than one host", f"set {' and '.join(INTERFACE_NAMES)}")]
    said = evidence.probe("interfaces")
    if not said.is_there:
        return [*findings, not_applicable(f"not known: {said.problem}")]
    present = dict(line.split() for line in said.text.splitlines() if len(line.split()) == 2)
    for name in sorted(names - {"lo"}):
        matching = [one for one in present if one.startswith(name)]
        if not matching:
            findings.append(
                fail(f"interface {name} does not exist (present: {', '.join(present)})", "name one that exists")
            )
            continue
        address = environment.get("HCCL_IF_IP")
        if address and address not in [present[one] for one in matching]:
            owner = next((one for one, own in present.items() if own == address), "none")
            findings.append(
                fail(
                    f"HCCL_IF_IP={address} is not {name}'s address (its owner: {owner})",
                    f"name {owner}" if owner != "none" else "give this host's address",
                )
            )
    return findings or [ok(f"{', '.join(sorted(names))} exists and the names agree")]


def check_ports(evidence: Evidence, needs: Needs) -> list[Finding]:
    """7: the ports are free, each is used once, and the transfer store answers."""
    findings = []
    numbers = [number for number, _ in needs.ports]
    for number in sorted({number for number in numbers if numbers.count(number) > 1}):
        purposes = " and ".join(what for port, what in needs.ports if port == number)
        findings.append(fail(f"port {number} is wanted by {purposes}", "give each its own port"))
    said = evidence.probe("ports", *[str(number) for number in dict.fromkeys(numbers)])
    states = dict(line.split(" ", 1) for line in said.text.splitlines() if " " in line)
    for number, what in needs.ports:
        state = states.get(str(number))
        if state is None:
            findings.append(not_applicable(f"port {number} ({what}) is not known: {said.problem or 'not probed'}"))
        elif state != "free":
            findings.append(
                fail(f"port {number} ({what}) is {state}", "end what listens there, or choose another port")
            )
    if needs.store is not None:
        answer = evidence.probe("reach", needs.store)
        if f"{needs.store} ok" not in answer.text.splitlines():
            reason = answer.text.strip().removeprefix(needs.store).strip() or answer.problem
            findings.append(
                fail(f"the store {needs.store} does not answer: {reason}", "start it, open the port, check the address")
            )
    return findings or [ok("free: " + ", ".join(f"{number} ({what})" for number, what in needs.ports))]


def check_timeouts(evidence: Evidence, needs: Needs) -> list[Finding]:
    """11: HCCL waits longer for the others than the slowest rank takes to load (EI0006)."""
    environment = read_environment(evidence)
    if not needs.is_distributed and needs.num_devices == 1:
        return [not_applicable("one device: nothing waits for another rank")]
    text = environment.get("HCCL_CONNECT_TIMEOUT", str(DEFAULT_HCCL_CONNECT_TIMEOUT_S))
    low, high = CONNECT_TIMEOUT_RANGE_S
    if not text.isdigit() or not low <= int(text) <= high:
        return [
            fail(
                f"HCCL_CONNECT_TIMEOUT={text} is not in {low} to {high} s",
                f"set it to {min(high, max(low, needs.load_skew_s))}",
            )
        ]
    if int(text) < needs.load_skew_s:
        what = f"HCCL_CONNECT_TIMEOUT={text} s is less than the {needs.load_skew_s} s that loading may differ"
        return [fail(what, f"set HCCL_CONNECT_TIMEOUT={min(high, needs.load_skew_s)} (EI0006 otherwise)")]
    return [ok(f"HCCL_CONNECT_TIMEOUT={text} s")]


def check_queues(evidence: Evidence, needs: Needs) -> list[Finding]:
    """12: queues of new connections, for large clusters."""
    if needs.num_hosts < MANY_HOSTS:
        return [not_applicable(f"{needs.num_hosts} hosts; it matters from {MANY_HOSTS}")]
    findings = []
    for path, least in QUEUE_SYSCTLS.items():
        name, said = path.removeprefix("/proc/sys/").replace("/", "."), evidence.file(path)
        if not said.is_there or not said.text.strip().isdigit():
            findings.append(warn(f"{name} is not known", f"sysctl {name}"))
        elif int(said.text) < least:
            findings.append(warn(f"{name} is {said.text.strip()}", f"sysctl -w {name}={least}"))
    return findings or [ok("the queues of new connections are long enough")]


def check_table(evidence: Evidence, needs: Needs) -> list[Finding]:
    """13: the rank table keeps its rules."""
    path = needs.rank_table or read_environment(evidence).get("RANK_TABLE_FILE")
    if not path:
        return [not_applicable("no rank table is named (RANK_TABLE_FILE)")]
    said = evidence.file(str(Path(path)))
    if not said.is_there:
        return [fail(str(said.problem), "write the rank table, or wait until the platform has")]
    wrong = check_rank_table(said.text)
    return [fail(f"{path}: {one}", "make the table again: scripts/npu/deploy plan") for one in wrong] or [
        ok(f"{path} keeps its rules")
    ]
