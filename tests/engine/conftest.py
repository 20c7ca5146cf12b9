"""Tiny models on disk, written once a session."""

from pathlib import Path
from typing import Any

import pytest
from harness import Target
from tiny_models import save_tiny_llama, save_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "windowed": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "moe": ("qwen3moe", {"num_experts": 8, "mlp_only_layers": [0]}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with windows of 40 tokens in two of three layers, and one with experts."""
    architecture, overrides = VARIANTS[request.param]
    path = tmp_path_factory.mktemp(f"tiny-{request.param}")
    save_tiny_model(path, architecture, seed=4, **overrides)
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """A test's own device is the target, before its fixtures make engines: none inherits its neighbour's."""
    uses_device = "on_device" in item.fixturenames
    Target.name = item.callspec.params["device_name"] if uses_device else "cpu"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    Target.name = "cpu"


@pytest.fixture(scope="session")
def on_device(device_name: str) -> str:
    """Engines of the test, and of fixtures that ask for this one, are made on `device_name`."""
    return device_name


def fitting(device_name: str) -> dict[str, Any]:
    """What a tiny model must be like for a device: attention on others than the CPU wants wider heads."""
    return {} if device_name == "cpu" else {"head_dim": 16}


@pytest.fixture(scope="session")
def model_path(device_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_path`, for a device."""
    path = tmp_path_factory.mktemp(f"tiny-llama-{device_name}")
    save_tiny_llama(path, **fitting(device_name))
    return path


@pytest.fixture(scope="module", params=VARIANTS)
def variant_model_path(
    request: pytest.FixtureRequest, device_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`variant_path`, for a device."""
    architecture, overrides = VARIANTS[request.param]
    path = tmp_path_factory.mktemp(f"tiny-{request.param}-{device_name}")
    save_tiny_model(path, architecture, seed=4, **(overrides | fitting(device_name)))
    return path


@pytest.fixture(scope="session")
def some_windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with windows alone."""
    architecture, overrides = VARIANTS["windowed"]
    path = tmp_path_factory.mktemp("tiny-window-family")
    save_tiny_model(path, architecture, seed=4, **overrides)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; `scripts/test` fetches it first."""
    from engine.weights.catalog import cache_dir, list_entries

    path = cache_dir() / list_entries()[0].filename
    if not path.exists():
        pytest.skip(f"{path} is not here; run: rung model fetch {list_entries()[0].name}")
    return path
