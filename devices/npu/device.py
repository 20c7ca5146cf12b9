"""An Ascend NPU as a device: memory, KV layout and capabilities. It resumes at page borders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch

from devices.base import AttentionBackend, CapturedGraph, KernelChoice, KvLayer, MemoryInfo, Operators
from devices.npu.arguments.attention import MASK_SIZE, AttentionShape
from devices.npu.arguments.contract import INT32_MAX
from devices.npu.attention import NpuAttention
from devices.npu.chips import npu_capabilities
from devices.npu.graphs import capture
from devices.npu.operators import NpuOperators
from devices.npu.probe import Found
from devices.npu.sampler import NpuSampler
from devices.npu.slots import choose_slots
from devices.sampling import Sampler
from devices.torch_forms.operators import TorchOperators
from devices.torch_forms.transfer import placed

TRANSFER_ALIGNMENT = 2 << 20
"""Bytes: transfer libraries register memory in pieces of 2 MiB."""

EMULATED_BUCKETS = (1, 2, 4, 8)
"""The emulator gains nothing from a graph; it has a few, so that what runs on hardware runs here."""


class NpuDevice:
    """KV of a layer is `[pages, page_size, num_kv_heads, head_dim]`, keys and values apart: the form that the write of
    new tokens wants, and that attention reads without a copy."""

    def __init__(self, name: str, found: Found, kernels: KernelChoice = "auto") -> None:
        self.name = name
        self._npu, self._runtime = found.operators, found.runtime
        self.torch_device = torch.device("npu", self._runtime.current_device())
        self._triangle: torch.Tensor | None = None
        self._graph_pool: Any = None
        total = self.memory().total_bytes
        self.capabilities = npu_capabilities(total, graph_buckets=EMULATED_BUCKETS if found.is_emulated else None)
        self.operators: Operators
        self.sampler: Sampler | None
        if kernels == "auto":
            self.operators, self.sampler = NpuOperators(self._npu), NpuSampler(self._npu)
        else:
            self.operators, self.sampler = TorchOperators(), None
        self._slots = choose_slots(kernels, found.is_emulated)
        self.pack = None
        self.description = ", ".join(self._about(found, kernels))

    def _about(self, found: Found, kernels: KernelChoice) -> list[str]:
        about = [f"{found.name} ({found.chip.family})", found.versions, f"page {self.capabilities.default_page_size}"]
        about += ["resumes at the page", self._slots.about]
        if kernels == "torch":
            about.append("operators: plain torch, as asked")
        if not found.chip.is_documented:
            about.append("the operators' documentation does not name this chip")
        if found.is_emulated:
            about.insert(0, "emulated on the CPU")
        return about

    def memory(self) -> MemoryInfo:
        free, total = self._runtime.mem_get_info()
        return MemoryInfo(total, free)

    def stage(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        return placed(array, self.torch_device, into)

    def send(self) -> None:
        """Everything is there when `stage` returns."""

    def kv_layer(
        self, index: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayer:
        """Raises ValueError: more elements than attention can address."""
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        if math.prod(shape) > INT32_MAX:
            most = INT32_MAX // math.prod(shape[1:]) * page_size
            raise ValueError(
                f"a layer's keys may have 2**31 - 1 elements on an NPU and {num_pages} pages have {math.prod(shape)}; "
                f"use --max-total-tokens {most - page_size}"
            )
        return KvLayer(self._aligned_zeros(shape, dtype), self._aligned_zeros(shape, dtype), index)

    def _aligned_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros that begin at a multiple of `TRANSFER_ALIGNMENT`."""
        size = math.prod(shape) * dtype.itemsize
        memory = torch.zeros(size + TRANSFER_ALIGNMENT, dtype=torch.int8, device=self.torch_device)
        start = -memory.data_ptr() % TRANSFER_ALIGNMENT
        return memory[start : start + size].view(dtype).view(shape)

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> AttentionBackend:
        """Raises ContractViolation: heads that the operator does not take."""
        shape = AttentionShape(num_heads, num_kv_heads, head_dim)
        return NpuAttention(self._npu, self.torch_device, shape, self._causal_triangle, window, self._slots)

    def _causal_triangle(self) -> torch.Tensor:
        if self._triangle is None:
            ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=self.torch_device)
            self._triangle = torch.triu(ones, diagonal=1)
        return self._triangle

    def copy_page(self, layers: Sequence[KvLayer], source: int, target: int) -> None:
        for layer in layers:
            layer.k[target].copy_(layer.k[source])
            layer.v[target].copy_(layer.v[source])

    def capture(self, run: Callable[[], None], backends: Sequence[AttentionBackend], num_rows: int) -> CapturedGraph:
        own = [backend for backend in backends if isinstance(backend, NpuAttention)]
        if self._graph_pool is None:
            self._graph_pool = self._runtime.graph_pool_handle()
        return capture(self._runtime, run, own, self._graph_pool)

    def download(self, results: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Into pinned memory, for only such a copy lets the host go on."""
        on_host = torch.empty(results.shape, dtype=results.dtype).pin_memory()
        on_host.copy_(results, non_blocking=True)
        done = self._runtime.Event()
        done.record()

        def wait() -> torch.Tensor:
            done.synchronize()
            return on_host

        return wait

    def synchronize(self) -> None:
        self._runtime.synchronize()
