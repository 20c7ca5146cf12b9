"""How the slots of a step's new tokens are computed on an NPU: by a kernel of ours, or in plain torch.

A step with prompts writes thousands of tokens, whose slots follow from page tables that are on the device anyway, and
from two numbers a row. The kernel is the one that CUDA has (`devices/cuda/kernels/page_tables.py`), which lowers for
Ascend too, so it needs Triton-Ascend and real hardware. Which form is used is chosen once, when the device opens, and
said in its description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from devices.base import AttentionMetadata, KernelChoice
from devices.torch_forms.page_tables import token_slots

TRITON = "triton-ascend"
"""The package; it provides the module `triton`, and so does another, which knows no NPU."""

NUM_PROGRAMS = 40
"""At most: vector cores of the smallest A2. Any number is right."""

BLOCK = 1024
"""Tokens that a program places at once; a multiple of the page."""


def load_kernel() -> Any:
    """Triton's kernel. Raises ImportError."""
    return import_module("devices.cuda.kernels.page_tables").update_tables_kernel


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
        token_starts = np.concatenate([[0], np.cumsum(step.query_lens)])
        columns = [np.arange(batch), step.seq_lens - step.query_lens, token_starts, np.zeros(batch + 1)]
        numbers = torch.from_numpy(np.concatenate(columns).astype(np.int32)).to(table.device)
        rows, starts, places, no_changes = torch.split(numbers, [batch, batch, batch + 1, batch + 1])
        if self.kernel is None or BLOCK % page_size:
            return token_slots(table, rows, starts, places, page_size, num_tokens)
        out = torch.empty(num_tokens, dtype=torch.int32, device=table.device)
        self.kernel[(min(batch, NUM_PROGRAMS),)](
            table, rows, no_changes, no_changes, no_changes, starts, places, out, batch, table.shape[1],
            PAGE=page_size, BLOCK=BLOCK,
        )  # fmt: skip
        return out


def choose_slots(
    choice: KernelChoice,
    is_emulated: bool,
    find_version: Callable[[str], str] = version,
    load: Callable[[], Any] = load_kernel,
) -> SlotForm:
    """The kernel on an NPU that has Triton-Ascend; otherwise torch, with the reason.

    Args:
        find_version: gives the version of an installed package; load: imports our kernel (`load_kernel`).
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
        return SlotForm(f"slots by {TRITON} {found}", load())
    except ImportError as error:
        return SlotForm(f"slots in torch, since {TRITON} {found} cannot be imported: {error}")
