"""Top-k and top-p filtering of logits."""

from __future__ import annotations

import torch

from devices.npu.emulator.kernels.norm import check_floats
from devices.npu.emulator.rules import DOCS, require, strictness


def top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None) -> torch.Tensor:
    """Logits [batch, vocabulary] with what falls outside the k largest, or outside the smallest set of probability p,
    at -inf. Ties with the k-th largest stay; at least one token stays."""
    operator = "npu_top_k_top_p"
    check_floats(operator, logits, *([] if p is None else [p]))
    require(p is not None or k is not None, "arguments", operator, f"neither p nor k is given ({DOCS})")
    if strictness().shapes:
        _check(operator, logits, p, k)
    values, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        threshold = values.gather(1, (logits.shape[1] - k.long()).unsqueeze(1))
        values = values.masked_fill(values < threshold, -torch.inf)
    if p is not None:
        below = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - p.float().unsqueeze(1)
        below[:, -1] = False
        values = values.masked_fill(below, -torch.inf)
    return torch.empty_like(values).scatter_(1, order, values).to(logits.dtype)


def _check(operator: str, logits: torch.Tensor, p: torch.Tensor | None, k: torch.Tensor | None) -> None:
    require(logits.dim() == 2, "shapes", operator, f"logits have {logits.dim()} dimensions, not 2 ({DOCS})")
    batch, vocabulary = logits.shape
    require(
        not logits.isnan().any(), "numbers", operator, f"logits have NaN; where a sort puts it is not said ({DOCS})"
    )
    if p is not None:
        require(p.shape == (batch,), "shapes", operator, f"p is {tuple(p.shape)}, logits have {batch} rows ({DOCS})")
        require(bool(((p >= 0) & (p <= 1)).all()), "ranges", operator, f"p must lie in [0, 1] ({DOCS})")
    if k is not None:
        require(k.shape == (batch,), "shapes", operator, f"k is {tuple(k.shape)}, logits have {batch} rows ({DOCS})")
        require(k.dtype is torch.int32, "dtypes", operator, f"k is {k.dtype}; it must be int32 ({DOCS})")
        low, high = (int(k.min()), int(k.max())) if batch else (1, 1)
        require(
            low >= 1 and high <= min(1024, vocabulary),
            "ranges",
            operator,
            f"k lies in [{low}, {high}]; it must lie in [1, {min(1024, vocabulary)}]: above 1024 the operator does not "
            f"go, filter such rows otherwise ({DOCS})",
        )
