"""One thread for every test: on a busy machine a thread pool that waits for a lost core costs more than it computes."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    folder = "~/.cache/rung/ascend-lowering"
    parser.addoption("--ascend-lowering", default=folder, help="where scripts/npu/lowering_env put the compilers")
    parser.addoption("--families-states", type=int, default=1500, help="states of tests/property/test_families.py")


@pytest.fixture
def families_states(request: pytest.FixtureRequest) -> int:
    """How many states the walks through page families visit, all geometries together."""
    number: int = request.config.getoption("--families-states")
    return number
