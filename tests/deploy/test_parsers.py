"""The parsers of what Ascend's tools print. The texts are made from documented formats, not recorded on hardware."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import hccn
from cluster.errors import ClusterError
from cluster.npu_smi import parse_npu_smi
from cluster.versions import (
    TORCH_NPU_FOR_CANN,
    documented_cann,
    minor_of,
    parse_cann_version,
    parse_driver_version,
    version_key,
)

RECORDINGS = Path(__file__).parent / "recordings"


def text(folder: str, name: str) -> str:
    return (RECORDINGS / folder / f"cmd_{name}.txt").read_text()


def test_one_chip_a_card() -> None:
    table = parse_npu_smi(text("a2-healthy", "npu-smi_info"))
    assert table.version == "25.5.2"
    assert [chip.device for chip in table.chips] == list(range(8))
    assert {(chip.name, chip.health, chip.total_mb) for chip in table.chips} == {("910B3", "OK", 65536)}
    assert [chip.free_mb for chip in table.chips] == [65536 - 3400 - device for device in range(8)]
    assert table.processes == ()


def test_two_chips_a_card_have_their_physical_ids() -> None:
    table = parse_npu_smi(text("a3-healthy", "npu-smi_info"))
    assert [(chip.card, chip.chip, chip.device) for chip in table.chips] == [(n // 2, n % 2, n) for n in range(16)]
    assert table.chips[15].used_mb == 2888 + 15


def test_processes_are_on_devices_not_cards() -> None:
    """The process table names card and chip; on a card of two chips that is not the device."""
    with_process = re.sub(
        r"\| No running processes found in NPU 3 .*\|",
        "| 3       1                 | 3085961       | python3.11               | 47416                   |",
        text("a3-healthy", "npu-smi_info"),
    )
    (process,) = parse_npu_smi(with_process).processes
    assert (process.device, process.pid, process.name, process.memory_mb) == (7, 3085961, "python3.11", 47416)


def test_a_process_without_a_name_is_a_process() -> None:
    table = text("a2-faulty", "npu-smi_info").replace("python3.11", " " * 10)
    assert [(one.device, one.pid, one.name) for one in parse_npu_smi(table).processes] == [(1, 1333928, "")]


def test_health_and_memory_of_a_sick_host() -> None:
    table = parse_npu_smi(text("a2-faulty", "npu-smi_info"))
    assert [chip.device for chip in table.chips if chip.health != "OK"] == [3]
    assert table.chips[2].free_mb == 536


def test_cells_that_touch_their_neighbour() -> None:
    """A number that fills its column leaves no space before the slash."""
    table = text("a3-healthy", "npu-smi_info").replace("2888 / 65536", "50719/ 65536")
    assert parse_npu_smi(table).chips[0].used_mb == 50719


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("dcmi module initialize failed. ret is -8005", "not loaded"),
        ("dcmi model initialized failed, because the device is used. ret is -8020", "one container only"),
        ("", "shows no chip"),
        ("bash: npu-smi: command not found", "shows no chip"),
    ],
)
def test_a_table_that_is_none_says_why(said: str, reason: str) -> None:
    with pytest.raises(ClusterError, match=reason):
        parse_npu_smi(said)


def test_a_cut_table_is_noticed() -> None:
    lines = text("a2-healthy", "npu-smi_info").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| 7 "))
    with pytest.raises(ClusterError, match="cut"):
        parse_npu_smi("\n".join(lines[: first + 1]))


def test_device_network_texts() -> None:
    def said(option: str) -> str:
        return text("a3-healthy", f"hccn_tool_-i_1_-{option}_-g")

    assert hccn.parse_link(said("link")) == "UP"
    assert hccn.parse_net_health(said("net_health")) == "Success"
    assert hccn.parse_ip(said("ip")) == "10.20.0.31"
    assert hccn.parse_netdetect(said("netdetect")) == "10.20.0.1"
    assert hccn.parse_gateway(said("gateway")) == "10.20.0.1"
    assert hccn.parse_lldp(said("lldp")) == "400GE1/1/5:2"
    assert hccn.parse_tls(said("tls")) is False
    assert hccn.parse_vnic(said("vnic")) == hccn.Vnic("UP", "192.168.2.198")
    ping = hccn.parse_ping(text("a3-healthy", "hccn_tool_-i_1_-hccs_ping_-g_address_192.168.2.99"))
    assert ping == hccn.Ping(3, 3)
    assert ping.all_came_back


def test_device_network_texts_of_a_sick_host() -> None:
    assert hccn.parse_link(text("a2-faulty", "hccn_tool_-i_0_-link_-g")) == "DOWN"
    assert hccn.parse_net_health(text("a2-faulty", "hccn_tool_-i_1_-net_health_-g")) == "Receive timeout"
    assert hccn.parse_tls(text("a2-faulty", "hccn_tool_-i_2_-tls_-g")) is True
    assert hccn.parse_ip(text("a2-faulty", "hccn_tool_-i_3_-ip_-g")) is None
    ping = hccn.parse_ping(text("a2-faulty", "hccn_tool_-i_0_-ping_-g_address_10.20.1.30"))
    assert ping is not None
    assert not ping.all_came_back


def test_a_vnic_is_no_link_and_no_address() -> None:
    """The vnic's lines hold the words of the port's; they must not stand in for it."""
    said = text("a3-healthy", "hccn_tool_-i_0_-vnic_-g")
    assert hccn.parse_link(said) is None
    assert hccn.parse_ip(said) is None


@pytest.mark.parametrize(
    "parse",
    [
        hccn.parse_link,
        hccn.parse_net_health,
        hccn.parse_ip,
        hccn.parse_netdetect,
        hccn.parse_gateway,
        hccn.parse_lldp,
        hccn.parse_tls,
        hccn.parse_vnic,
        hccn.parse_ping,
    ],
)
def test_unknown_texts_are_none(parse: object) -> None:
    assert callable(parse)
    for said in ("", "Command failed!", "hccn_tool: error while loading shared libraries", "\x00\xff"):
        assert parse(said) is None


def test_hccn_conf() -> None:
    assert hccn.parse_hccn_conf(
        "address_0=10.0.0.1\nnetmask_0=255.0.0.0\naddress_10=10.0.0.2\n#address_3=1.1.1.1\n"
    ) == {
        0: "10.0.0.1",
        10: "10.0.0.2",
    }


def test_version_files() -> None:
    assert parse_driver_version("Version=7.35.23\npackage_version=25.3.rc1\n") == "25.3.rc1"
    assert parse_driver_version("Version=24.1.rc2.2\n") == "24.1.rc2.2"
    assert parse_driver_version("nothing") is None
    assert parse_cann_version("package_name=Ascend-cann-toolkit\nversion=8.5.0\npath=/x\n") == "8.5.0"
    assert parse_cann_version("# version: 1.0\ntoolkit_installed_version=[7.7.0.1.246:8.2.RC2]\n") == "8.2.RC2"


def test_versions_have_the_vendors_order() -> None:
    ordered = ["23.0.6", "24.1.rc2", "24.1.rc2.2", "24.1.rc3", "24.1.0", "25.2.0", "25.3.rc1", "25.5.2", "25.10.0"]
    assert sorted(sorted(ordered), key=version_key) == ordered
    assert version_key("25.2") == version_key("25.2.0")
    assert version_key("2.8.0.post2") > version_key("2.8.0")


def test_documented_pairs() -> None:
    assert documented_cann("2.10.0") == ("9.0.0",)
    assert documented_cann("2.8.0.post2") == ("8.5.0",)
    assert documented_cann("2.13.0") == ()
    releases = [release for known in TORCH_NPU_FOR_CANN.values() for release in known]
    assert len(set(releases)) == len(releases)
    assert minor_of("2.13.0+cpu") == minor_of("2.13.0.post1") == "2.13"
