"""Reads the table of `npu-smi info`: chips, their health and memory, and the processes on them.

Two shapes are documented. With one chip a card (A2) the second row of a chip has its chip number and the card's number
is the device id; with two chips a card (A3) it has the physical id (`Phy-ID`) too, and that is the device id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.errors import ClusterError

_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_INIT_FAILED = re.compile(r"dcmi .*ret is (-?\d+)")

DCMI_REASONS = {
    -8005: "the driver is not loaded or waits for a reboot, or this container or user may not open the devices",
    -8020: "the devices are taken: a device may belong to one container only",
}


@dataclass(frozen=True)
class Chip:
    """A chip as `npu-smi info` shows it. Memory is HBM where the table has it, in MB."""

    card: int
    chip: int
    device: int
    name: str
    health: str
    used_mb: int
    total_mb: int

    @property
    def free_mb(self) -> int:
        return self.total_mb - self.used_mb


@dataclass(frozen=True)
class Process:
    """A process that holds memory on a device."""

    device: int
    pid: int
    name: str
    memory_mb: int


@dataclass(frozen=True)
class NpuSmi:
    """Everything that is read of the table."""

    version: str
    chips: tuple[Chip, ...]
    processes: tuple[Process, ...]


def parse_npu_smi(text: str) -> NpuSmi:
    """Read the table.

    Raises:
        ClusterError: the tool refused, with its code's meaning, or this is not its table.
    """
    if refused := _INIT_FAILED.search(text):
        code = int(refused[1])
        raise ClusterError(f"npu-smi cannot reach the driver (code {code}): {DCMI_REASONS.get(code, 'see its manual')}")
    version = re.search(r"npu-smi\s+(\S+)", text)
    tables = re.split(r"\|\s*NPU\s+Chip\s*\|\s*Process id", text, maxsplit=1)
    chips = _chips([_cells(line) for line in tables[0].splitlines() if line.lstrip().startswith("|")])
    if not chips:
        raise ClusterError("npu-smi info shows no chip: is the driver of this NPU generation installed?")
    device_of = {(chip.card, chip.chip): chip.device for chip in chips}
    processes = _processes(tables[1], device_of) if len(tables) > 1 else ()
    return NpuSmi(version[1] if version else "unknown", chips, processes)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _chips(rows: list[list[str]]) -> tuple[Chip, ...]:
    """A chip is two rows: (card, name | health | power ...) and (chip [physical id] | bus | usages)."""
    chips: list[Chip] = []
    upper: tuple[int, str, str] | None = None
    for row in rows:
        words = row[0].split()
        if len(row) != 3 or not words or not words[0].isdigit():
            continue
        if upper is None:
            upper = (int(words[0]), " ".join(words[1:]), row[1])
            continue
        card, name, health = upper
        physical = int(words[1]) if len(words) > 1 and words[1].isdigit() else card
        usages = _USAGE.findall(row[2])
        used, total = map(int, usages[-1]) if usages else (0, 0)
        chips.append(Chip(card, int(words[0]), physical, name, health, used, total))
        upper = None
    if upper is not None:
        raise ClusterError("npu-smi info ends in the middle of a chip: was its output cut?")
    return tuple(chips)


def _processes(text: str, device_of: dict[tuple[int, int], int]) -> tuple[Process, ...]:
    found = []
    for line in text.splitlines():
        row = _cells(line)
        words = row[0].split() if row else []
        if len(row) != 4 or len(words) != 2 or not row[1].isdigit():
            continue
        card, chip = int(words[0]), int(words[1])
        device = device_of.get((card, chip), card)
        found.append(Process(device, int(row[1]), row[2], int(row[3]) if row[3].isdigit() else 0))
    return tuple(found)
