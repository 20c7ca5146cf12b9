"""Tiny models on disk, written once a session."""

from pathlib import Path

import pytest
from tiny_models import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; `scripts/test` fetches it first."""
    from engine.weights.catalog import cache_dir, list_entries

    path = cache_dir() / list_entries()[0].filename
    if not path.exists():
        pytest.skip(f"{path} is not here; run: rung model fetch {list_entries()[0].name}")
    return path
