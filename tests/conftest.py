"""One thread for every test: on a busy machine a thread pool that waits for a lost core costs more than it computes.

`pytest --device NAME` (repeatable) runs every test that is parametrised by `device_name` on those devices, real or
emulated: `--device npu` is how a machine with an NPU is tested. On a device that does not open they are skipped, with
the doctor's reason. Without the option a test runs on the devices that its marker `devices` names, else on the CPU.
"""

import pytest
import torch

from devices.registry import DEVICE_NAMES, try_open

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", action="append", choices=DEVICE_NAMES, help="run device tests on this device")
    folder = "~/.cache/rung/ascend-lowering"
    parser.addoption("--ascend-lowering", default=folder, help="where scripts/npu/lowering_env put the compilers")
    folder = "~/.cache/rung/torch-npu-meta"
    parser.addoption("--torch-npu-meta", default=folder, help="where scripts/npu/meta_env put torch_npu and its stubs")
    parser.addoption("--families-states", type=int, default=1500, help="states of tests/property/test_families.py")


def chosen_devices(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    """The devices that a test runs on."""
    asked = metafunc.config.getoption("--device")
    if asked:
        return tuple(dict.fromkeys(asked))
    marker = metafunc.definition.get_closest_marker("devices")
    return marker.args if marker is not None and marker.args else ("cpu",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_name" in metafunc.fixturenames:
        metafunc.parametrize("device_name", chosen_devices(metafunc), indirect=True, scope="session")


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """The device of a parametrised test; skips where it does not open."""
    name: str = request.param
    opened = try_open(name)
    if isinstance(opened, str):
        pytest.skip(f"{name}: {opened}")
    return name


@pytest.fixture
def families_states(request: pytest.FixtureRequest) -> int:
    """How many states the walks through page families visit, all geometries together."""
    number: int = request.config.getoption("--families-states")
    return number
