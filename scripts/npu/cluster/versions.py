"""Versions of driver, CANN, torch and torch_npu, and which of them the vendor documents as a pair.

`TORCH_NPU_FOR_CANN` is the vendor's published table of TorchNPU releases. A pair that is not in it is a warning and no
failure: it may be newer than this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TORCH_NPU_FOR_CANN: Mapping[str, tuple[str, ...]] = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3"),
}

VERSION_PARTS = 6
"""More parts than any version has: what is missing counts as zero."""
DRIVER_FILE = "/usr/local/Ascend/driver/version.info"
CANN_FILES = (
    "/usr/local/Ascend/cann/{arch}-linux/ascend_toolkit_install.info",
    "/usr/local/Ascend/ascend-toolkit/latest/{arch}-linux/ascend_toolkit_install.info",
    "/usr/local/Ascend/ascend-toolkit/latest/version.cfg",
)


def parse_key_values(text: str) -> dict[str, str]:
    """Lines `key=value`; the keys in lower case, as files differ in it."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip().lower(): value.strip() for key, value in pairs}


def parse_driver_version(text: str) -> str | None:
    """Of the driver's `version.info`: the package's version, or the older files' `Version`."""
    values = parse_key_values(text)
    return values.get("package_version") or values.get("version") or None


def parse_cann_version(text: str) -> str | None:
    """Of `ascend_toolkit_install.info`, or of `version.cfg` (`toolkit_installed_version=[7.7.0.1.246:8.2.RC2]`)."""
    values = parse_key_values(text)
    if version := values.get("version"):
        return version
    for key in ("toolkit_installed_version", "toolkit_running_version"):
        if found := re.search(r":([^\]\s]+)\]", values.get(key, "")):
            return found[1]
    return None


def version_key(version: str) -> tuple[tuple[int, int, int], ...]:
    """An order for the vendor's versions: 25.2.0 < 25.3.rc1 < 25.3.0; rc below a release, post above it."""
    key = []
    for part in re.split(r"[.\-+]", version.lower()):
        if found := re.fullmatch(r"(rc|post|b|t)?(\d+)(?:rc(\d+))?", part):
            rank = {"rc": -1, "b": -2, "t": -2, "post": 1}.get(found[1] or "", 0)
            key.append((rank, int(found[2]), int(found[3]) if found[3] else 0))
    return tuple(key + [(0, 0, 0)] * (VERSION_PARTS - len(key)))


def documented_cann(torch_npu: str) -> tuple[str, ...]:
    """The CANN versions that the vendor's table pairs with this torch_npu, newest first."""
    return tuple(cann for cann, releases in TORCH_NPU_FOR_CANN.items() if torch_npu in releases)


def minor_of(version: str) -> str:
    """The first two numbers: 2.13 of 2.13.0+cpu."""
    return ".".join(re.findall(r"\d+", version)[:2])
