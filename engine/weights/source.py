"""The seam between model files and the loader: a config, a set of names and a stream of tensors.

A source knows one file format and nothing of the model's layers; `engine/weights/loader.py` knows neither format. Names
and layouts are Hugging Face's whatever the format, so that a model states its parameters once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from devices.quantized import QuantizedWeight


class WeightSource(Protocol):
    """Checked model files. Opening one reads headers only; `tensors` may be called again for another pass.

    Attributes:
        config: the model's shape.
        path: the file or directory.
    """

    config: ModelConfig
    path: Path

    def names(self) -> frozenset[str]:
        """Hugging Face names ("model.layers.0.self_attn.q_proj.weight") of everything `tensors` yields."""
        ...

    def tensors(self, keep_packed: bool = False) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Each tensor once, one at a time, in the dtype of the file or, if quantised there, in float32.

        Args:
            keep_packed: quantised matrices come as a QuantizedWeight.
        """
        ...


def open_source(path: Path) -> WeightSource:
    """Open a GGUF file or a Hugging Face directory.

    Raises:
        ModelLoadError: the path is neither, or its contents are damaged, incomplete or of an unknown kind.
    """
    if path.is_dir() and (path / "config.json").is_file():
        from engine.weights.safetensors_dir import SafetensorsSource

        return SafetensorsSource(path)
    if path.is_file() and path.suffix not in (".safetensors", ".json", ".bin"):
        from engine.weights.gguf import GgufSource

        return GgufSource(path)
    raise ModelLoadError(
        f"{path} is {_found(path)}: needs a GGUF file, or a directory with config.json and model.safetensors"
    )


def _found(path: Path) -> str:
    if path.is_file():
        return "one file of a Hugging Face model (give the directory that holds it)"
    if not path.is_dir():
        return "not there" if not path.exists() else "neither a file nor a directory"
    entries = sorted(entry.name for entry in path.iterdir())
    listed = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "")
    return f"a directory without config.json (it holds {listed})" if entries else "an empty directory"
