"""Rules that preflight and deploy share: visible devices, rank tables, environment, the cluster file and its plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.cluster_file import parse_cluster, read_cluster_file
from cluster.environment import Features, check_environment, check_launch_blocking, npu_environment
from cluster.errors import ClusterError
from cluster.plan import Plan, check_plan, make_plan, needs_of_host, ports_of, serve_arguments
from cluster.rank_table import Rank, check_rank_table, rank_table
from cluster.verdicts import Severity
from cluster.visible_devices import format_visible_devices, logical_id, parse_visible_devices
from hypothesis import given, settings
from hypothesis import strategies as st


def npu_host(number: int, **fields: Any) -> dict[str, Any]:
    host = {
        "name": f"node-{number}",
        "address": f"10.0.0.{number + 1}",
        "interface": "eth0",
        "devices": list(range(8)),
        "device_ips": [f"10.20.{number}.{device}" for device in range(8)],
        "workdir": "/opt/rung",
    }
    return {**host, **fields}


def npu_cluster(num_hosts: int = 2, **fields: Any) -> dict[str, Any]:
    hosts = [npu_host(number) for number in range(num_hosts)]
    return {"name": "chat", "model": "/models/qwen", "hosts": hosts, **fields}


# Visible devices: CASES B070


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "set but empty"),
        (" ", "set but empty"),
        ("1,0", "write 0,1"),
        ("10,2", "write 2,10"),
        ("0,0", "twice"),
        ("a", "'a', which is no device number"),
        ("0,", "'', which is no device number"),
        ("-1", "no device number"),
        ("0,1.5", "no device number"),
        ("\u0661", "no device number"),
        ("0,1,3,4", "device 4, which is not there"),
    ],
)
def test_wrong_visible_devices_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ClusterError, match=reason):
        parse_visible_devices(text, present={0, 1, 3})


def test_right_visible_devices() -> None:
    assert parse_visible_devices("0", present={0}) == (0,)
    assert parse_visible_devices("4, 5,6,7") == (4, 5, 6, 7)
    assert logical_id((4, 5, 6, 7), 5) == 1
    with pytest.raises(ClusterError, match="device 1 is not visible"):
        logical_id((4, 5), 1)


@given(devices=st.sets(st.integers(0, 63), min_size=1))
def test_what_is_written_is_read_again(devices: set[int]) -> None:
    assert parse_visible_devices(format_visible_devices(list(devices)), devices) == tuple(sorted(devices))


# Rank tables


@st.composite
def ranks(draw: st.DrawFn) -> list[Rank]:
    num_servers, share = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    has_pods = draw(st.booleans())
    made = []
    for server in range(num_servers):
        for device in range(share):
            super_pod = str(server // 2) if has_pods else None
            super_device = str(1000 * server + device) if has_pods else None
            rank = Rank(len(made), f"10.0.0.{server}", device, f"10.2.{server}.{device}", super_device, super_pod)
            made.append(rank)
    return made


@given(ranks=ranks())
def test_planned_tables_keep_the_rules(ranks: list[Rank]) -> None:
    assert check_rank_table(json.dumps(rank_table(ranks))) == []


def _drop(table: dict[str, Any], name: str) -> None:
    del table[name]


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "count": (lambda table: table.update(server_count="3"), "server_count is '3' and server_list has 2"),
    "version": (lambda table: table.update(version="2.0"), "version is '2.0'"),
    "status": (lambda table: table.update(status="initializing"), "status is 'initializing'"),
    "servers": (lambda table: table.update(server_list=[]), "server_list is missing"),
    "gap": (lambda table: table["server_list"][1]["device"][0].update(rank_id="9"), "rank ids must be 0 to 3"),
    "twice": (lambda table: table["server_list"][1]["device"][0].update(rank_id="0"), "rank ids must be 0 to 3"),
    "device twice": (lambda table: table["server_list"][0]["device"][1].update(device_id="0"), "device_id 0 stands 2"),
    "no number": (lambda table: table["server_list"][0]["device"][1].update(device_id="x"), "'x' is no number"),
    "no address": (lambda table: _drop(table["server_list"][0]["device"][0], "device_ip"), "has no device_ip"),
    "address": (lambda table: table["server_list"][0]["device"][0].update(device_ip="10.2"), "10.2 is no address"),
    "address twice": (
        lambda table: table["server_list"][0]["device"][0].update(device_ip="10.2.1.1"),
        "stands 2 times",
    ),
    "server twice": (lambda table: table["server_list"][1].update(server_id="10.0.0.0"), "server_id 10.0.0.0 stands 2"),
    "no device": (lambda table: table["server_list"][1].update(device=[]), "has no device"),
    "no pods": (lambda table: _drop(table, "super_pod_list"), "needs super_pod_list"),
    "no pod id": (lambda table: table["super_pod_list"][0].update(super_pod_id=""), "no super_pod_id"),
    "pod member": (lambda table: table["super_pod_list"][0]["server_list"].pop(), "is in no super pod"),
    "pod stranger": (
        lambda table: table["super_pod_list"][0]["server_list"].append({"server_id": "x"}),
        "name server x",
    ),
    "super device": (
        lambda table: _drop(table["server_list"][0]["device"][0], "super_device_id"),
        "no super_device_id",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_each_broken_rule_is_named(fault: str) -> None:
    made = [Rank(n, f"10.0.0.{n // 2}", n % 2, f"10.2.{n // 2}.{n % 2}", str(n), "0") for n in range(4)]
    table = rank_table(made)
    change, words = BREAKS[fault]
    change(table)
    assert any(words in one for one in check_rank_table(json.dumps(table))), check_rank_table(json.dumps(table))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "0", "1.2", "10.0.0.1", "completed"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["device", "server_id", "rank_id"]), inner)
    ),
    max_leaves=12,
)


@given(
    table=st.dictionaries(st.sampled_from(["version", "server_list", "super_pod_list", "server_count", "status"]), JSON)
)
def test_any_json_is_judged(table: dict[str, Any]) -> None:
    assert check_rank_table(json.dumps(table))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"server_list": [1]}', '{"server_list": {}}'])
def test_what_is_no_table_is_an_answer(text: str) -> None:
    assert check_rank_table(text)


# Environment


def test_planned_environment_keeps_its_own_rules() -> None:
    assert check_environment(npu_environment("eth0", "10.0.0.1", 1800, 1836, 200)) == []


@pytest.mark.parametrize(
    ("environment", "features", "words"),
    [
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:21"}, Features(), "max_split_size_mb"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.6"},
            Features(),
            "garbage",
        ),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, Features(uses_sleep_mode=True), "sleep mode"),
        ({"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}, Features(), "graphs"),
        ({"PYTORCH_NPU_ALLOC_CONF": "base_addr_aligned_kb:32"}, Features(), "0 to 16"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segment:True"}, Features(), "unknown option 'expandable_segment'"),
        ({"TASK_QUEUE_ENABLE": "3"}, Features(), "TASK_QUEUE_ENABLE=3"),
        (
            {"HCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth0"},
            Features(),
            "differ",
        ),
        (dict.fromkeys(("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "=lo"), Features(), "lo"),
    ],
)
def test_what_excludes_each_other_is_found(environment: dict[str, str], features: Features, words: str) -> None:
    (finding,) = check_environment(environment, features)
    assert words in finding.what
    assert finding.severity is Severity.FAIL


def test_what_is_allowed_is_not_found() -> None:
    allowed = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:20", "TASK_QUEUE_ENABLE": "2"}
    assert check_environment(allowed) == []
    assert check_environment({"PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}, Features(False)) == []


def test_blocking_launches() -> None:
    assert check_launch_blocking({}) == []
    assert [one.severity for one in check_launch_blocking({"ASCEND_LAUNCH_BLOCKING": "1"})] == [Severity.FAIL]
    assert [one.severity for one in check_launch_blocking({"ASCEND_LAUNCH_BLOCKING": "0"})] == [Severity.WARN]


# The cluster file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replica": 2}, "replica: unknown key; did you mean 'replicas'?"),
        ({"ports": {"sever": 1}}, "ports.sever: unknown key; did you mean 'server'?"),
        ({"hosts": [npu_host(0, adress="x")]}, r"hosts\[0\].adress: unknown key; did you mean 'address'?"),
        ({"router": {"prefix_char": 1}}, "router.prefix_char: unknown key; did you mean 'prefix_chars'?"),
        ({"ports": {"server": 70000}}, "ports.server: "),
        ({"replicas": 0}, "replicas: "),
        ({"replicas": "two"}, "replicas: "),
        ({"name": "Chat!"}, "name: "),
        ({"timeouts": {"hccl_connect_s": 60}}, "timeouts.hccl_connect_s: "),
        ({"kubernetes": {"kind": "volcano", "image": "x"}}, "exactly one of hosts and kubernetes"),
        ({"hosts": []}, "exactly one of hosts and kubernetes"),
        ({"parallel": {"tensor": 3, "nnodes": 2}}, "does not divide"),
        ({"serve": {"port": 1}}, "serve.port: the plan sets this flag"),
        ({"serve": {"--page-size": 1}}, "without its leading hyphens"),
        ({"hosts": [npu_host(0, interface=None)]}, "interface: name the interface that owns 10.0.0.1"),
        ({"hosts": [npu_host(0, interface="lo"), npu_host(1)]}, "over lo no other host answers"),
        ({"hosts": [npu_host(0, devices=[], device_ips=[])]}, "list the physical device ids"),
        ({"hosts": [npu_host(0, devices=[0, 0])]}, "twice"),
        ({"hosts": [npu_host(0, device_ips=["10.0.0.1"])]}, "has 1 entries for 8 devices"),
        ({"hosts": [npu_host(0), npu_host(0)]}, "two hosts have the same name"),
        ({"hosts": [npu_host(0), npu_host(0, name="b")]}, "same address"),
        ({"hosts": [npu_host(0, address="-oProxyCommand=x")]}, "is no host name or address"),
        ({"hosts": [npu_host(0, user="-l root")]}, "is no user name"),
        ({"router": {"host": "nobody"}}, "known: node-0, node-1"),
    ],
)
def test_wrong_cluster_files_name_the_place(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_cluster({**npu_cluster(), **change})


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        read_cluster_file(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ClusterError, match="is no YAML"):
        read_cluster_file(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ClusterError, match="is a mapping"):
        read_cluster_file(tmp_path / "list.yaml")


# The plan


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    nnodes = draw(st.integers(1, 3))
    share = draw(st.sampled_from([1, 2, 4, 8]))
    hosts = []
    for number in range(draw(st.integers(1, 5))):
        devices = draw(st.permutations(list(range(draw(st.integers(1, 16))))))
        ips = [f"10.20.{number}.{device}" for device in devices]
        hosts.append(npu_host(number, devices=devices, device_ips=ips))
    parallel = {"tensor": nnodes * share, "nnodes": nnodes}
    return npu_cluster(hosts=hosts, parallel=parallel, replicas=draw(st.integers(1, 6)))


def plan_or_refusal(data: dict[str, Any]) -> Plan | str:
    try:
        return make_plan(parse_cluster(data))
    except ClusterError as error:
        return str(error)


@settings(max_examples=80)
@given(data=clusters())
def test_a_plan_gives_each_device_once(data: dict[str, Any]) -> None:
    """Against plain counting: who owns what, in which order, and that a refusal is deserved."""
    nnodes, share = data["parallel"]["nnodes"], data["parallel"]["tensor"] // data["parallel"]["nnodes"]
    plan = plan_or_refusal(data)
    if isinstance(plan, str):
        assert "do not fit" in plan
        room = sum(len(host["devices"]) // share for host in data["hosts"])
        assert room < data["replicas"] * nnodes or nnodes > 1
        return
    owned = [(node.host.name, device) for one in plan.replicas for node in one.nodes for device in node.devices]
    assert len(set(owned)) == len(owned) == data["replicas"] * nnodes * share
    for replica in plan.replicas:
        assert [node.node_rank for node in replica.nodes] == list(range(nnodes))
        assert len({node.host.name for node in replica.nodes}) == nnodes
        assert [rank.rank_id for rank in replica.ranks] == list(range(nnodes * share))
        for node in replica.nodes:
            assert parse_visible_devices(node.environment["ASCEND_RT_VISIBLE_DEVICES"]) == node.devices
        if replica.table is not None:
            assert check_rank_table(json.dumps(replica.table)) == []
    for wanted in ports_of(plan).values():
        numbers = [number for number, _ in wanted]
        assert len(set(numbers)) == len(numbers)


def planned(**fields: Any) -> Plan:
    return make_plan(parse_cluster(npu_cluster(**fields)))


def test_an_environment_names_one_interface_and_every_timeout() -> None:
    environment = planned(timeouts={"hccl_connect_s": 900}).replicas[0].nodes[0].environment
    assert (
        environment["HCCL_SOCKET_IFNAME"]
        == environment["GLOO_SOCKET_IFNAME"]
        == environment["TP_SOCKET_IFNAME"]
        == "eth0"
    )
    assert environment["HCCL_IF_IP"] == "10.0.0.1"
    assert environment["HCCL_CONNECT_TIMEOUT"] == "900"
    assert environment["RUNG_DEPLOYMENT"] == "chat/replica-0"
    assert "RANK_TABLE_FILE" not in environment


def test_a_cpu_gets_no_npu_variables() -> None:
    plan = planned(device="cpu", hosts=[{"name": "here", "address": "127.0.0.1", "transport": "local"}], replicas=2)
    assert [set(replica.nodes[0].environment) for replica in plan.replicas] == [{"RUNG_DEPLOYMENT"}] * 2
    assert [replica.port for replica in plan.replicas] == [30000, 30001]


def test_replicas_over_two_hosts_are_planned_and_not_started() -> None:
    """Tensor parallel comes later; ranks, table and rendezvous are there already."""
    plan = planned(parallel={"tensor": 16, "nnodes": 2})
    (replica,) = plan.replicas
    assert replica.rendezvous == "10.0.0.1:25000"
    assert replica.table is not None
    assert replica.table["server_count"] == "2"
    assert replica.nodes[1].environment["RANK_TABLE_FILE"] == "~/.cache/rung/deploy/chat/replica-0.rank_table.json"
    assert [one.what for one in check_plan(plan) if one.severity is Severity.FAIL] == [
        "parallel.tensor is more than 1, and this version of rung serve computes on one device"
    ]


def test_plans_that_cannot_work_say_so() -> None:
    def wrong(plan: Plan) -> str:
        return " | ".join(one.what for one in check_plan(plan))

    assert wrong(planned()) == ""
    assert "port 30000 is wanted by replica-0 and router" in wrong(planned(router={}, ports={"router": 30000}))
    assert "no port" in wrong(planned(replicas=3, ports={"server": 65534}))
    assert "Mooncake" in wrong(planned(ports={"server": 20100}))
    assert "ASCEND_LAUNCH_BLOCKING" in wrong(planned(environment={"ASCEND_LAUNCH_BLOCKING": "1"}))
    assert "differ" in wrong(planned(environment={"GLOO_SOCKET_IFNAME": "eth1"}))
    assert "is empty" in wrong(planned(environment={"ASCEND_RT_VISIBLE_DEVICES": ""}))
    pods = [npu_host(0, super_pod="0", super_device_ids=[str(n) for n in range(8)]), npu_host(1)]
    assert "is in no super pod" in wrong(planned(hosts=pods, parallel={"tensor": 16, "nnodes": 2}))


def test_flags_of_the_server() -> None:
    cluster = parse_cluster(npu_cluster(serve={"page_size": 128, "disable-radix-cache": True, "enable_x": False}))
    words = serve_arguments(cluster, "10.0.0.1", 30001)
    assert words[:3] == ["serve", "--model", "/models/qwen"]
    assert words[words.index("--port") + 1] == "30001"
    assert words[-3:] == ["--page-size", "128", "--disable-radix-cache"]


def test_preflight_takes_its_needs_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(npu_cluster(replicas=2, parallel={"tensor": 8, "nnodes": 2})))
    needs = needs_of_host(file, "node-1")
    assert needs.devices == tuple(range(8))
    assert needs.num_hosts == 2
    assert needs.peers == tuple(sorted(f"10.20.0.{device}" for device in range(8)))
    assert needs.ports == ()
    assert needs_of_host(file, "node-0").ports[0] == (30000, "replica-0")
    with pytest.raises(ClusterError, match="node-0, node-1"):
        needs_of_host(file, "node")
