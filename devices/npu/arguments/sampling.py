"""Arguments of `npu_top_k_top_p`: which tokens of each row of logits may be drawn; the others become -inf.

The operator sorts a row upwards. It keeps what is not below the k-th largest logit, so equal ones there all stay, and
of that what has more than `1 - p` of the mass up to itself: those that, from the best one on, have less than `p` before
them. The best stays always. `k` ends at 1,024 and cannot say "all": rows without a top-k are a call of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.npu.arguments.contract import FLOAT_DTYPES, Call, ContractViolation, check_dtype, check_one_device
from devices.pages import IntArray

OPERATOR = "npu_top_k_top_p"

MAX_TOP_K = 1024


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """The cuts of some rows, checked where they are numbers of the host.

    Attributes:
        top_k: int32 [rows], or None; top_p: float32 [rows], or None. Not both are None.
    """

    top_k: IntArray | None
    top_p: npt.NDArray[np.float32] | None

    def __post_init__(self) -> None:
        if self.top_k is None and self.top_p is None:
            raise ContractViolation(OPERATOR, "p or k is given", "neither")
        if self.top_k is not None and len(self.top_k) and not 1 <= self.top_k.min() <= self.top_k.max() <= MAX_TOP_K:
            got = f"{self.top_k.min()} to {self.top_k.max()}"
            raise ContractViolation(OPERATOR, f"k is from 1 to {MAX_TOP_K}", got)
        if self.top_p is not None and not ((self.top_p >= 0) & (self.top_p <= 1)).all():
            raise ContractViolation(OPERATOR, "p is from 0 to 1", self.top_p.tolist()[:16])

    def of(self, logits: torch.Tensor, top_p: torch.Tensor | None, top_k: torch.Tensor | None) -> Call:
        """The call.

        Args:
            logits: [rows, vocab_size]; top_p, top_k: the columns on the device, in the dtype of `logits` and int32.
        """
        check_dtype(OPERATOR, "logits", logits, FLOAT_DTYPES)
        if logits.dim() != 2:
            raise ContractViolation(OPERATOR, "logits have 2 dimensions", f"shape {tuple(logits.shape)}")
        for name, on_host, column, dtype in (
            ("p", self.top_p, top_p, logits.dtype),
            ("k", self.top_k, top_k, torch.int32),
        ):
            if (on_host is None) != (column is None):
                raise ContractViolation(OPERATOR, f"{name} on the device is that of the host", column)
            if column is None or on_host is None:
                continue
            check_dtype(OPERATOR, name, column, (dtype,))
            if column.shape != logits.shape[:1] or on_host.shape != logits.shape[:1]:
                rule = f"{name} has one number for each of {len(logits)} rows"
                raise ContractViolation(OPERATOR, rule, f"shapes {tuple(column.shape)}, {on_host.shape} on the host")
            check_one_device(OPERATOR, logits=logits, **{name: column})
        if self.top_k is not None and len(self.top_k) and self.top_k.max() > logits.shape[1]:
            raise ContractViolation(OPERATOR, f"k is at most the {logits.shape[1]} logits of a row", self.top_k.max())
        return Call((logits, top_p, top_k))
