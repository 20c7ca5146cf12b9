"""Opens a device by name, lazily, and never falls back in silence.

A candidate's module is imported only when it is tried. One that cannot open raises `DeviceUnavailable` with the
reason; `auto` tries the candidates in order and keeps every reason, a device asked for by name that cannot open is
an error. An emulator is never a candidate of `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from devices.base import Device, KernelChoice

AUTO_ORDER = ("npu", "cuda", "cpu")
"""What `auto` tries, best first."""

_MODULES = {"npu": "devices.npu", "npu-sim": "devices.npu", "cuda": "devices.cuda", "cpu": "devices.cpu"}

DEVICE_NAMES = tuple(_MODULES)

NOT_DETERMINISTIC = "its matrix products depend on the size of the batch; --deterministic works with --device cpu"
"""Why a device refuses kernels that are "deterministic"."""


class DeviceUnavailable(Exception):
    """A device cannot open here.

    Attributes:
        reason: one line: what is missing and, where there is one, the way out.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Choice:
    """An opened device, and why each better candidate was refused."""

    device: Device
    refusals: tuple[tuple[str, str], ...] = ()

    def explain(self) -> str:
        """The candidates, one line each, for the log."""
        lines = [f"  {name:<5} refused: {reason}" for name, reason in self.refusals]
        return "\n".join([*lines, f"  {self.device.name:<5} chosen:  {self.device.description}"])


def open_device(name: str = "auto", kernels: KernelChoice = "auto") -> Choice:
    """Open a device.

    Args:
        name: "auto", or one of `DEVICE_NAMES`.
        kernels: see `KernelChoice`.
    Raises:
        DeviceUnavailable: the device (or, for "auto", every candidate) cannot open; the text has every reason.
    """
    if name == "auto":
        return _open_first(AUTO_ORDER, kernels)
    if name not in _MODULES:
        raise DeviceUnavailable(f"device {name!r} is unknown; the devices are: auto, {', '.join(DEVICE_NAMES)}")
    try:
        return Choice(_open(name, kernels))
    except DeviceUnavailable as error:
        raise DeviceUnavailable(f"device {name!r} was asked for and cannot open: {error.reason}") from error


def try_open(name: str, kernels: KernelChoice = "auto") -> Device | str:
    """The device, or the reason why it cannot open; for tables that list every device."""
    try:
        return _open(name, kernels)
    except DeviceUnavailable as error:
        return error.reason


def _open_first(names: tuple[str, ...], kernels: KernelChoice) -> Choice:
    refusals: list[tuple[str, str]] = []
    for name in names:
        opened = try_open(name, kernels)
        if not isinstance(opened, str):
            return Choice(opened, tuple(refusals))
        refusals.append((name, opened))
    reasons = "\n".join(f"  {name:<5} refused: {reason}" for name, reason in refusals)
    raise DeviceUnavailable(f'no device for "auto":\n{reasons}')


def _open(name: str, kernels: KernelChoice) -> Device:
    factory: Callable[[str, KernelChoice], Device] = import_module(_MODULES[name]).open_device
    return factory(name, kernels)
