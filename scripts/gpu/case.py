"""One kernel at one shape, and what makers of such cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

BF16_TOLERANCE = 1e-2


@dataclass
class Case:
    """One kernel at one shape.

    Attributes:
        run: launches it on set `i`; error: of the last launch on set 0.
        target: share of the floor's speed to reach.
        most_s: the time to stay under, where it is the launch that takes time and not the bytes.
    """

    name: str
    run: Callable[[int], object]
    error: Callable[[], float]
    num_bytes: float
    flops: float = 0.0
    target: float | None = None
    tolerance: float = BF16_TOLERANCE
    num_sets: int = 4
    most_s: float | None = None


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def int32(device: torch.device, values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
