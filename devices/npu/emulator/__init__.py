"""A whole NPU on the CPU: memory, operators, streams and graphs, strict where hardware is, for tests and study.

Everything that runs here is *emulated*: results come from reference kernels, times from nowhere or from a model, and
nothing says that a real NPU would compute the same. What it proves is that the calls are legal: schemas, layouts, host
lists, masks, bounds, captures. `install` makes the device exist (`device="npu"`) for the rest of the process;
`operators` is what `import torch_npu` would give. Read `storage.py` (how the memory is shared), `fallback.py` (aten),
`library.py` and `kernels/` (the vendor's operators), `rules.py` (what is refused), `graph.py`.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

from devices.npu.emulator.clock import LatencyModel, simulated_time
from devices.npu.emulator.counters import Counts, NpuCall, counters, counting, recorded_calls
from devices.npu.emulator.poison import poison
from devices.npu.emulator.rules import ContractViolation, Strictness, relaxed, strictness

__all__ = [
    "BANNER",
    "ContractViolation",
    "Counts",
    "EmulatorUnavailable",
    "LatencyModel",
    "NpuCall",
    "Strictness",
    "counters",
    "counting",
    "install",
    "operators",
    "poison",
    "recorded_calls",
    "relaxed",
    "simulated_time",
    "strictness",
]

BANNER = "emulated NPU on host memory: results and times say nothing about hardware"
"""For whatever prints a line about the device."""

_lock = threading.Lock()


class EmulatorUnavailable(RuntimeError):
    """The process cannot have an emulated device; the text says why in one line."""


class _Installed:
    def __init__(self) -> None:
        self.done = False


_installed = _Installed()


def install() -> None:
    """Make the device `npu` exist, for the whole process and for good; a second call does nothing.

    Raises:
        EmulatorUnavailable: the real torch_npu, or another device of that kind, is already there.
    """
    with _lock:
        if _installed.done:
            return
        import torch
        from torch.utils import backend_registration

        setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
        if setup is None:
            raise EmulatorUnavailable(
                f"torch {torch.__version__} cannot have a device in Python; it needs 2.10 or later"
            )
        if torch._C._get_privateuse1_backend_name() != "privateuseone":
            taken = torch._C._get_privateuse1_backend_name()
            raise EmulatorUnavailable(f"this process already has a device {taken!r} (torch_npu was imported?)")
        from devices.npu.emulator import backend, fallback, library, pinned

        setup("npu", backend_module=backend.Backend())
        fallback.install()
        pinned.install()
        library.install()
        _installed.done = True


def operators() -> SimpleNamespace:
    """The emulated torch_npu: its functions by name, and `npu`. Installs the device."""
    install()
    from devices.npu.emulator import library

    return library.namespace()
