"""A step's arrays on a device that copies each at once: `devices.base.Device.stage` where waiting gains nothing."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def placed(array: npt.NDArray[Any], device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """The array's values on the device; on the CPU the array itself, unless `into` takes them."""
    on_host = torch.from_numpy(array)
    if into is not None:
        return into.copy_(on_host)
    return on_host if device.type == "cpu" else on_host.to(device)
