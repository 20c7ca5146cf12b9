"""The emulated device, for every test of this folder. It stays for the rest of the process: `test_isolation.py` shows
that tests on the CPU do not notice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from devices.npu import emulator


@pytest.fixture(scope="session", autouse=True)
def npu() -> SimpleNamespace:
    """The emulated torch_npu."""
    return emulator.operators()
