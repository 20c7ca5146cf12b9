"""How the slots of a step's new tokens are computed on an NPU: by a kernel of ours, or in plain torch.

A step with prompts writes thousands of tokens, whose slots follow from page tables that are on the device anyway, and
from two numbers a row. The kernel is written in Triton-Ascend's dialect (`devices/npu/kernels/slots.py`), so it needs
that package, and real hardware. Which form is used is chosen once, when the device opens, and said in its description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from devices.base import AttentionMetadata, KernelChoice
from devices.npu.kernels.slots import kernels, slots_reference

TRITON = "triton-ascend"
"""The package; it provides the module `triton`, and so does another, which knows no NPU."""

NUM_PROGRAMS = 40
"""At most: vector cores of the smallest A2. Any number is right."""


@dataclass(frozen=True, slots=True)
class SlotForm:
    """Attributes:
    about: which form it is and why, for people.
    kernel: Triton's, launched as `kernel[grid](...)`; None is plain torch.
    """

    about: str
    kernel: Any = None

    def of(self, step: AttentionMetadata) -> torch.Tensor:
        """Slots of the step's new tokens, int32 [tokens], on the device; nothing waits for it."""
        table, page_size = step.page_tables.contiguous(), step.page_size
        batch, num_tokens = len(step.query_lens), int(step.query_lens.sum())
        firsts = np.cumsum(step.query_lens) - step.query_lens
        columns = np.stack([np.arange(batch), step.seq_lens - step.query_lens, step.query_lens, firsts])
        rows, starts, lens, places = torch.from_numpy(columns.astype(np.int32)).to(table.device).unbind()
        if self.kernel is None or page_size & (page_size - 1):  # the kernel shifts
            return slots_reference(table, rows, starts, lens, page_size, num_tokens)
        out = torch.empty(num_tokens, dtype=torch.int32, device=table.device)
        shift = page_size.bit_length() - 1
        self.kernel[(min(batch, NUM_PROGRAMS),)](
            table, rows, starts, lens, places, out, batch, table.shape[1], shift=shift, page_size=page_size
        )
        return out


def choose_slots(
    choice: KernelChoice, is_emulated: bool, find_version: Callable[[str], str] = version, load: Any = kernels
) -> SlotForm:
    """The kernel on an NPU that has Triton-Ascend; otherwise torch, with the reason.

    Args:
        find_version: gives the version of an installed package; load: compiles our kernels' source (`kernels`).
    """
    if choice == "torch":
        return SlotForm("slots in torch, as asked")
    if is_emulated:
        return SlotForm("slots in torch, since it is emulated")
    try:
        found = find_version(TRITON)
    except PackageNotFoundError:
        return SlotForm(f"slots in torch, since {TRITON} is not installed")
    try:
        return SlotForm(f"slots by {TRITON} {found}", load()["slots_kernel"])
    except ImportError as error:
        return SlotForm(f"slots in torch, since {TRITON} {found} cannot be imported: {error}")
