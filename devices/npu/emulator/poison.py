"""Poison: what a freed page holds, so that whoever still reads it computes nonsense that a test cannot miss."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def poison(rows: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Fill freed rows (a view, or several): NaN for floating types, the smallest value for integers, True for bool.

    Only *read* garbage must never reach a result; a page's new owner writes before it reads.
    """
    for tensor in [rows] if isinstance(rows, torch.Tensor) else rows:
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
