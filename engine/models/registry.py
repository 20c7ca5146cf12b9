"""Builds the model of a source. Which architectures there are is in `engine/models/architectures.py`.

All of them are one decoder. An architecture that it cannot express gets a class with the methods of `Decoder` and is
chosen here, by the name in the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.models.decoder import Decoder
from engine.weights.loader import LoadReport, load_weights
from engine.weights.slot import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from devices.base import Device
    from engine.weights.source import WeightSource


def load_model(
    source: WeightSource,
    dtype: torch.dtype,
    device: Device,
    context_len: int,
    progress: Callable[[int, int], None] | None = None,
    quantization: Quantization = "none",
) -> tuple[Decoder, LoadReport]:
    """Build the model of a source, fill every weight of it and make it ready to run.

    Args:
        context_len: the longest sequence that the engine takes, in tokens.
        quantization: which weights stay in few bits.
    Raises:
        ModelLoadError: the tensors are not exactly the model's.
    """
    model = Decoder(source.config, dtype, device, context_len, quantization)
    report = load_weights(model.destinations(), source, optional=model.optional_names(), progress=progress)
    model.prepare()
    return model, report
