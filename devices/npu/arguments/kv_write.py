"""Arguments of `npu_scatter_pa_kv_cache`: new keys and values into their slots, both in one launch.

Why this one of three: its documentation names exactly our cache, [pages, page size, heads, head size], on A2 and A3,
with int32 slots. `_npu_reshape_and_cache` does the same but belongs to ATB, which is a package of its own and has no
documentation in the wheel; `npu_scatter_nd_update_` needs a launch each for keys and values, and slots as a column.
Slots are not checked by the operator and a repeated one has an undefined result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from devices.npu.arguments.contract import (
    HALF_DTYPES,
    INT32_MAX,
    Call,
    ContractViolation,
    check_contiguous,
    check_dtype,
    check_one_device,
    check_same_dtype,
)

OPERATOR = "npu_scatter_pa_kv_cache"


@dataclass(frozen=True, slots=True)
class KvWrite:
    """A step's slots, checked once for all layers.

    Attributes:
        slots: int32 [tokens], on the device.
        highest: the largest of them.
    """

    slots: torch.Tensor
    highest: int

    def of(self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> Call:
        """The call for one layer.

        Args:
            key, value: [tokens, heads, head_dim]; key_cache, value_cache: [pages, page_size, heads, head_dim].
        """
        check_dtype(OPERATOR, "key", key, HALF_DTYPES)
        check_same_dtype(OPERATOR, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        check_contiguous(OPERATOR, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
        check_one_device(OPERATOR, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slots=self.slots)
        if key.dim() != 3 or key.shape != value.shape or len(key) != len(self.slots):
            rule = f"key and value are [{len(self.slots)} tokens, heads, head size], one token for each slot"
            raise ContractViolation(OPERATOR, rule, f"shapes {tuple(key.shape)} and {tuple(value.shape)}")
        if key_cache.dim() != 4 or key_cache.shape[2:] != key.shape[1:] or key_cache.shape != value_cache.shape:
            rule = f"the caches are [pages, page size, {key.shape[1]}, {key.shape[2]}]"
            raise ContractViolation(OPERATOR, rule, f"shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}")
        num_slots = key_cache.shape[0] * key_cache.shape[1]
        if self.highest >= num_slots:
            raise ContractViolation(OPERATOR, f"slots are below pages * page size = {num_slots}", self.highest)
        return Call((key, value, key_cache, value_cache, self.slots), {"cache_mode": "Norm"})


def host_slots(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """A step's slots as the operator takes them. Raises ContractViolation: negative, repeated, beyond int32, none."""
    if slots.ndim != 1 or not len(slots):
        raise ContractViolation(OPERATOR, "slot_mapping is [tokens] with at least one", f"shape {slots.shape}")
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high > INT32_MAX:
        raise ContractViolation(OPERATOR, "slots are from 0 to 2**31 - 1", f"{low} to {high}")
    if len(np.unique(slots)) != len(slots):
        raise ContractViolation(OPERATOR, "no slot is written twice", f"{len(slots) - len(np.unique(slots))} repeated")
    return slots.astype(np.int32)
