"""The CPU as a device: memory, KV layout and capabilities. It resumes at the token and computes fp32 and bf16."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from devices.base import (
    AttentionBackend,
    Capabilities,
    CapturedGraph,
    GraphsUnsupported,
    KernelChoice,
    KvLayer,
    MemoryInfo,
    Operators,
    Pack,
    PackedWeight,
)
from devices.cpu.kernels.attention import KernelAttention
from devices.cpu.kernels.bf16 import Bf16Weight, takes
from devices.cpu.kernels.build import KernelsUnavailable, load_kernels
from devices.cpu.kernels.memory import ResultMemory
from devices.cpu.kernels.operators import KernelOperators
from devices.cpu.kernels.packed import KernelPackedWeight
from devices.quantized import QuantizedWeight
from devices.registry import DeviceUnavailable
from devices.torch_forms.attention import PagedAttention
from devices.torch_forms.operators import TorchOperators
from devices.torch_forms.transfer import placed

PAGE_SIZES = (1, 16, 32, 64, 128)


class CpuDevice:
    """KV of a layer is `[pages, num_kv_heads, page_size, head_dim]`: a head's page is contiguous, so a row of pages
    gathers into `[num_kv_heads, tokens, head_dim]`, which is what a batched matrix product wants."""

    def __init__(self, kernels: KernelChoice = "auto") -> None:
        """`kernels`: "torch" computes everything in plain torch; "auto" does so where the kernels cannot be built.

        Raises DeviceUnavailable for "deterministic" where they cannot be built.
        """
        self._has_fast_bf16 = fast_bf16 = _has_fast_bf16()
        dtypes = ("bfloat16", "float32") if fast_bf16 else ("float32", "bfloat16")
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.capabilities = Capabilities(
            page_sizes=PAGE_SIZES,
            default_page_size=16,
            resume_unit="token",
            dtypes=dtypes,
            kv_dtypes=dtypes,
            slot_dtype="int64",
            table_dtype="int32",
            masks=frozenset({"causal", "window"}),
            collectives="gloo" if torch.distributed.is_available() else None,
        )
        self._library, reason = None, "kernels: plain torch, as asked"
        if kernels != "torch":
            try:
                self._library, reason = load_kernels(), "kernels: own"
            except KernelsUnavailable as error:
                if kernels == "deterministic":
                    raise DeviceUnavailable(f"--deterministic needs the CPU's own kernels, and {error}") from error
                reason = f"kernels: plain torch, slower, because {error}"
        self.operators: Operators = TorchOperators()
        self.sampler = None
        self.pack: Pack | None = None
        if self._library is not None:
            is_deterministic, memory = kernels == "deterministic", ResultMemory()
            self.operators = KernelOperators(self._library, fast_bf16, deterministic=is_deterministic, memory=memory)
            self.pack = partial(_pack, self._library, fast_bf16, memory)
        self.description = (
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, prefers {dtypes[0]}, "
            f"page {self.capabilities.default_page_size}, resumes at the token, {reason}"
        )

    def memory(self) -> MemoryInfo:
        """Physical memory, and what the system says could be given out without swapping."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MemoryInfo(total, min(total, _available_bytes(total)))

    def stage(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        return placed(array, self.torch_device, into)

    def send(self) -> None:
        """Everything is there when `stage` returns."""

    def kv_layer(
        self, index: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayer:
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        return KvLayer(_zeros(shape, dtype), _zeros(shape, dtype), index)

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> AttentionBackend:
        if self._library is None:
            return PagedAttention(num_heads, num_kv_heads, head_dim, window)
        return KernelAttention(self._library, self._has_fast_bf16, num_heads, num_kv_heads, head_dim, window)

    def copy_page(self, layers: Sequence[KvLayer], source: int, target: int) -> None:
        for layer in layers:
            layer.k[target].copy_(layer.k[source])
            layer.v[target].copy_(layer.v[source])

    def capture(self, run: Callable[[], None], backends: Sequence[AttentionBackend], num_rows: int) -> CapturedGraph:
        raise GraphsUnsupported(self.name)

    def download(self, results: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: results

    def synchronize(self) -> None:
        """CPU work is done when its call returns."""


def _pack(
    library: ctypes.CDLL,
    fast_bf16: bool,
    memory: ResultMemory,
    weight: QuantizedWeight | torch.Tensor,
    dtype: torch.dtype,
) -> PackedWeight | None:
    if isinstance(weight, QuantizedWeight):
        return KernelPackedWeight(library, weight, dtype, memory)
    return Bf16Weight(library, weight, memory) if fast_bf16 and takes(weight) else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written: a pool is sized for the worst day, most days use little."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _has_fast_bf16() -> bool:
    """Whether bf16 products run on bf16 hardware; without it they are slower than fp32."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def _available_bytes(total: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return values.get("MemAvailable", total)
