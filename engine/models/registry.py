"""Which architectures there are, by the name that model files use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.errors import ModelLoadError
from engine.models.decoder import Decoder
from engine.weights.loader import LoadReport, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.models.config import ModelConfig
    from engine.weights.source import WeightSource

ARCHITECTURES: dict[str, type[Decoder]] = {"LlamaForCausalLM": Decoder}


def load_model(
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Decoder, LoadReport]:
    """Build the model of a source and fill every weight of it.

    Raises:
        ModelLoadError: the architecture is unknown (the known ones are listed), or the tensors are not exactly its.
    """
    model = _model_class(source.config)(source.config, dtype, device)
    report = load_weights(model.destinations(), source, optional=model.optional_names(), progress=progress)
    return model, report


def _model_class(config: ModelConfig) -> type[Decoder]:
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture {config.architecture!r} is unknown; the known ones are: {known}")
    return ARCHITECTURES[config.architecture]
