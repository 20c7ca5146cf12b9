"""Reads what `hccn_tool -i N ... -g` prints: one function an option, from text to a value, or None without one.

The tool must not run twice at once, so whoever calls it does so one device after another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = r"(\d{1,3}(?:\.\d{1,3}){3})"


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.IGNORECASE)
    return found[1].strip() if found else None


def parse_link(text: str) -> str | None:
    """`-link -g`: UP or DOWN."""
    return _first(r"(?<!vnic )link status:\s*(\S+)", text)


def parse_net_health(text: str) -> str | None:
    """`-net_health -g`: Success, or what the check of the detection address says ("Receive timeout", "Init", ...)."""
    return _first(r"net health status:\s*([^\n]+)", text)


def parse_ip(text: str) -> str | None:
    """`-ip -g`: the address of the device's RoCE port."""
    return _first(rf"(?<!vnic )ipaddr:\s*{_ADDRESS}", text)


def parse_netdetect(text: str) -> str | None:
    """`-netdetect -g`: the address that the health check pings."""
    return _first(rf"netdetect address:\s*{_ADDRESS}", text)


def parse_gateway(text: str) -> str | None:
    """`-gateway -g`."""
    return _first(rf"gateway:\s*{_ADDRESS}", text)


def parse_lldp(text: str) -> str | None:
    """`-lldp -g`: the switch's port at the other end."""
    return _first(r"Ifname:\s*(\S+)", text)


def parse_tls(text: str) -> bool | None:
    """`-tls -g`: whether the device's links are encrypted; all of a cluster must agree."""
    switch = _first(r"tls switch\[(\d)\]", text)
    return None if switch is None else switch == "1"


@dataclass(frozen=True)
class Vnic:
    """`-vnic -g` (A3): the port inside the super pod."""

    link: str
    address: str


def parse_vnic(text: str) -> Vnic | None:
    link, address = _first(r"vnic link status:\s*(\S+)", text), _first(rf"vnic ipaddr:\s*{_ADDRESS}", text)
    return Vnic(link, address) if link and address else None


@dataclass(frozen=True)
class Ping:
    """`-ping` and `-hccs_ping`: how many came back."""

    sent: int
    received: int

    @property
    def all_came_back(self) -> bool:
        return self.sent > 0 and self.received == self.sent


def parse_ping(text: str) -> Ping | None:
    found = re.search(r"(\d+) packets transmitted,\s*(\d+) received", text)
    return Ping(int(found[1]), int(found[2])) if found else None


def parse_hccn_conf(text: str) -> dict[int, str]:
    """`/etc/hccn.conf`: the address of each device (`address_0=10.0.0.1`)."""
    return {
        int(number): address for number, address in re.findall(rf"^address_(\d+)\s*=\s*{_ADDRESS}", text, re.MULTILINE)
    }
