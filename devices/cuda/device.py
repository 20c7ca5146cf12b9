"""A CUDA GPU as a device: memory, KV layout, capabilities and graphs. It resumes at the token.

KV of a layer is `[pages, num_kv_heads, page_size, head_dim]` (`devices.cuda.kernels.decode` says why), which is what
the torch forms read too. Steps are launched on the current stream, so what is asked later happens later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from devices.base import (
    AttentionBackend,
    AttentionMetadata,
    Capabilities,
    CapturedGraph,
    KernelChoice,
    KvLayer,
    MemoryInfo,
    NoRoomForGraph,
    Operators,
)
from devices.cuda.arguments import PAGE_SIZES
from devices.cuda.attention import TritonAttention
from devices.cuda.runtime import Runtime
from devices.cuda.upload import Uploader
from devices.sampling import Sampler
from devices.torch_forms.attention import PagedAttention
from devices.torch_forms.operators import TorchOperators
from devices.torch_forms.transfer import placed

DEFAULT_PAGE_SIZE = 64
"""Tokens; a tile of keys is as large, and a smaller page would make smaller tiles."""

GRAPH_BUCKETS = (1, 2, 4, 8, *range(16, 257, 16))
"""Numbers of rows that get a graph. A bucket has at most 15 rows of padding, which is less than a page."""

DTYPES = ("bfloat16", "float16", "float32")

_TORCH_PAGE_SIZES = (1, *PAGE_SIZES)
_MAX_SLOTS = 2**31 - 1


class TooManySlots(ValueError):
    """More slots than the kernels can count."""


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """See `devices.base.CapturedGraph`: all that it reads is tensors, which plans have written by now."""

    launch: Callable[[], None]

    def replay(self, step: AttentionMetadata) -> None:
        self.launch()


class CudaDevice:
    """See `devices.base.Device`."""

    def __init__(self, runtime: Runtime, kernels: KernelChoice = "auto") -> None:
        """`kernels`: "torch" computes everything in plain torch; "auto" with the Triton kernels."""
        self._runtime = runtime
        self._uploader = Uploader(runtime)
        self._has_kernels = kernels == "auto"
        self.name = "cuda"
        self.torch_device = runtime.torch_device
        self.capabilities = Capabilities(
            page_sizes=PAGE_SIZES if self._has_kernels else _TORCH_PAGE_SIZES,
            default_page_size=DEFAULT_PAGE_SIZE,
            resume_unit="token",
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            slot_dtype="int32",
            table_dtype="int32",
            masks=frozenset({"causal", "window"}),
            # The torch forms plan tensors of other sizes for other lengths.
            graph_capture=self._has_kernels,
            graph_buckets=GRAPH_BUCKETS if self._has_kernels else (),
            overlap=True,
            collectives="nccl",
        )
        self.pack = None
        self.operators: Operators
        self.sampler: Sampler | None
        if self._has_kernels:
            from devices.cuda.operators import TritonOperators
            from devices.cuda.sampler import TritonSampler

            self.operators, self.sampler = TritonOperators(), TritonSampler(self._uploader)
        else:
            self.operators, self.sampler = TorchOperators(), None
        about = "kernels: Triton" if self._has_kernels else "kernels: plain torch, as asked"
        self.description = f"{runtime.description}, page {DEFAULT_PAGE_SIZE}, resumes at the token, {about}"

    def memory(self) -> MemoryInfo:
        return self._runtime.memory()

    def stage(self, array: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        # The torch forms read page tables on the host while they plan.
        return self._uploader.stage(array, into) if self._has_kernels else placed(array, self.torch_device, into)

    def send(self) -> None:
        self._uploader.send()

    def kv_layer(
        self, index: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayer:
        """Raises TooManySlots, a ValueError."""
        if num_pages * page_size > _MAX_SLOTS:
            raise TooManySlots(
                f"{num_pages} pages of {page_size} are more than the 2**31 - 1 slots that the kernels count; "
                f"use --max-total-tokens {_MAX_SLOTS - 2 * page_size} or less"
            )
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k, v = (torch.zeros(shape, dtype=dtype, device=self.torch_device) for _ in "kv")
        return KvLayer(k, v, index)

    def attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
    ) -> AttentionBackend:
        """Raises BadKernelArgument, a ValueError: heads that the kernels do not take."""
        if not self._has_kernels:
            return PagedAttention(num_heads, num_kv_heads, head_dim, window)
        return TritonAttention(self._uploader, self._runtime.num_sms, num_heads, num_kv_heads, head_dim, window)

    def copy_page(self, layers: Sequence[KvLayer], source: int, target: int) -> None:
        if not self._has_kernels:
            for layer in layers:
                layer.k[target].copy_(layer.k[source])
                layer.v[target].copy_(layer.v[source])
            return
        from devices.cuda.kernels.kv_cache import copy_pages

        from_page, to_page = (self._uploader.stage(np.array([page], dtype=np.int32)) for page in (source, target))

        def copy() -> None:
            for layer in layers:
                copy_pages(layer.k, layer.v, from_page, to_page)

        self._uploader.afterwards(copy)

    def capture(self, run: Callable[[], None], backends: Sequence[AttentionBackend], num_rows: int) -> CapturedGraph:
        for backend in backends:
            if isinstance(backend, TritonAttention):
                backend.freeze()
        try:
            return CudaGraph(self._runtime.record(run))
        except torch.OutOfMemoryError as error:
            raise NoRoomForGraph(str(error)) from error

    def download(self, results: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = self._runtime.host_buffer(-(-results.nbytes // 4)).view(results.dtype)[: results.numel()]
        host.copy_(results.reshape(-1), non_blocking=True)
        wait = self._runtime.mark()

        def waited() -> torch.Tensor:
            wait()
            return host.view(results.shape)

        return waited

    def synchronize(self) -> None:
        self._runtime.synchronize()
