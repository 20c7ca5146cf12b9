"""Finds an NPU, or the one thing that is missing: every way in which a machine has none ends in one line.

`torch_npu` is imported here and nowhere else, when a device is opened. Installed without CANN it breaks `import torch`
itself, because torch loads installed backends: `TORCH_DEVICE_BACKEND_AUTOLOAD=0` keeps torch from doing so, and then
this module says what is missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from devices.npu.chips import CHIPS, Chip, chip_of
from devices.registry import DeviceUnavailable

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
DRIVER = Path("/dev/davinci_manager")
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


@dataclass(frozen=True, slots=True)
class Found:
    """A usable NPU.

    Attributes:
        operators: what has torch_npu's functions: the module, or the emulator's stand-in for it.
        runtime: what has those of `torch.npu`.
        versions: for people.
    """

    operators: Any
    runtime: Any
    chip: Chip
    name: str
    versions: str
    is_emulated: bool


def find_npu() -> Found:
    """The NPU of this process. Raises DeviceUnavailable with one line."""
    if find_spec("torch_npu") is None:
        raise DeviceUnavailable("torch_npu is not installed (pip install 'rung[npu]' on a machine with CANN)")
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None and not visible.strip():
        raise DeviceUnavailable(f"{VISIBLE_DEVICES} is empty, which hides every NPU; unset it or name some, like 0,1")
    torch_npu = _import_torch_npu()
    import torch

    runtime = torch_npu.npu
    if not runtime.is_available() or runtime.device_count() == 0:
        raise DeviceUnavailable(_why_none(visible))
    name = str(runtime.get_device_name())
    versions = f"torch {torch.__version__}, torch_npu {getattr(torch_npu, '__version__', '?')}"
    return Found(torch_npu, runtime, _known(name), name, versions, False)


def find_emulated() -> Found:
    """The emulated NPU. Raises DeviceUnavailable in a process that has a real one."""
    from devices.npu import emulator

    try:
        operators = emulator.operators()
    except emulator.EmulatorUnavailable as error:
        raise DeviceUnavailable(str(error)) from error
    import torch

    name = str(operators.npu.get_device_name())
    return Found(operators, operators.npu, _known(name), name, f"torch {torch.__version__}", True)


def _import_torch_npu() -> Any:
    try:
        import torch_npu
    except ImportError as error:
        line = _first_line(error)
        raise DeviceUnavailable(f"torch_npu is installed and CANN is not usable: {line} ({SET_ENV})") from error
    except Exception as error:
        raise DeviceUnavailable(f"torch_npu is installed and cannot be imported: {_first_line(error)}") from error
    return torch_npu


def _why_none(visible: str | None) -> str:
    if not DRIVER.exists():
        return f"CANN is here and no Ascend driver is: {DRIVER} does not exist (in a container, pass it with --device)"
    if visible is not None:
        return (
            f"no NPU is visible: {VISIBLE_DEVICES}={visible} must name NPUs that npu-smi info lists, each once and in "
            "ascending order, like 0,1"
        )
    return "no NPU is visible: npu-smi info must list one, and a container needs --device /dev/davinciN"


def _known(name: str) -> Chip:
    chip = chip_of(name)
    if chip is None:
        families = ", ".join(chip.family for chip in CHIPS)
        raise DeviceUnavailable(f"{name} is not a chip that Rung knows; it knows {families} (devices/npu/chips.py)")
    return chip


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
