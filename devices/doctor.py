"""`rung doctor` / `python -m devices`: one line a device - does it open, what can it do, does it compute right.

The self-test writes keys and values through the device's own attention and compares the result with a dense
reference, for every page size that the device declares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from devices.base import AttentionMetadata, Device
from devices.pages import IntArray, page_count, ragged_slots
from devices.registry import DEVICE_NAMES, try_open

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error of a result of about 1, by dtype, the most exact first."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One device: `opens`, and either what it is and can do or the reason why not."""

    name: str
    opens: bool
    text: str
    self_test: str = ""


def diagnose() -> list[Diagnosis]:
    """Every device of the registry, in its order."""
    return [_diagnose(name) for name in DEVICE_NAMES]


def report(rows: list[Diagnosis]) -> str:
    """The table as text, one line a device."""
    return "\n".join(f"{row.name:<8} {'yes' if row.opens else 'no':<4} {row.self_test:<6} {row.text}" for row in rows)


def _diagnose(name: str) -> Diagnosis:
    device = try_open(name)
    if isinstance(device, str):
        return Diagnosis(name, False, device)
    dtype = _test_dtype(device)
    worst = max(_self_test_error(device, page_size, dtype) for page_size in device.capabilities.page_sizes)
    verdict = "PASS" if worst < TOLERANCES[dtype] else "FAIL"
    sizes = ",".join(map(str, device.capabilities.page_sizes))
    text = f"{device.description}; pages {sizes}; kv {','.join(device.capabilities.kv_dtypes)}; max error {worst:.1e}"
    return Diagnosis(name, True, text, verdict)


def _test_dtype(device: Device) -> torch.dtype:
    """The most exact dtype of the device's."""
    return next(dtype for dtype in TOLERANCES if str(dtype).removeprefix("torch.") in device.capabilities.kv_dtypes)


def _self_test_error(device: Device, page_size: int, dtype: torch.dtype) -> float:
    """Largest difference between paged and dense attention for a mixed step (a prefill and two decodes).

    The dense one is computed in fp32 from the same rounded inputs.
    """
    num_heads, num_kv_heads, head_dim = 4, 2, 16
    seq_lens = np.array([37, 5, 130], dtype=np.int32)
    query_lens = np.array([37, 1, 1], dtype=np.int32)
    generator = torch.Generator().manual_seed(0)
    pages = [page_count(int(n), page_size) for n in seq_lens]
    tables = np.zeros((3, max(pages)), dtype=np.int32)
    ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32) + 1
    for i, part in enumerate(np.split(ids, np.cumsum(pages)[:-1])):
        tables[i, : len(part)] = part
    layer = device.kv_layer(0, sum(pages) + 1, page_size, num_kv_heads, head_dim, dtype)
    backend = device.attention(num_heads, num_kv_heads, head_dim)
    page_tables = torch.from_numpy(tables).to(device.torch_device)

    def run(starts: IntArray, lengths: IntArray, qkv: torch.Tensor) -> torch.Tensor:
        slots = ragged_slots(tables, starts, lengths, page_size)
        backend.plan(AttentionMetadata(lengths, starts + lengths, page_tables, slots, page_size))
        q, k, v = qkv.to(device.torch_device)
        return backend.forward(q, k[:, :num_kv_heads], v[:, :num_kv_heads], layer).cpu()

    full = [torch.randn(3, int(n), num_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
    past = seq_lens - query_lens
    for row in np.flatnonzero(past):
        only_row = np.where(np.arange(3) == row, past, 0).astype(np.int32)
        run(np.zeros(3, dtype=np.int32), only_row, full[row][:, : past[row]])
    got = run(past, query_lens, torch.cat([x[:, past[i] :] for i, x in enumerate(full)], dim=1)).float()
    want = torch.cat([_dense(x.float(), num_kv_heads)[past[i] :] for i, x in enumerate(full)])
    return float((got - want).abs().max())


def _dense(qkv: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Causal attention without pages; qkv [3, tokens, num_heads, head_dim], the first kv heads are used."""
    q, k, v = qkv.transpose(1, 2)
    group = q.shape[0] // num_kv_heads
    k, v = (x[:num_kv_heads].repeat_interleave(group, 0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
