"""Requests on shuffled pages for the attention kernels; whatever no request owns is NaN, and reads of it show."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def int32(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


@dataclass
class Paged:
    """A batch: `lengths` readable tokens of each request, the last `new` of which are this step's.

    Attributes:
        fused: queries are a view into a wider row, as they are when one product gives q, k and v.
    """

    lengths: list[int]
    new: list[int]
    page_size: int = 16
    num_kv_heads: int = 2
    group: int = 4
    dim: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    seed: int = 0
    fused: bool = False
    spread: float = 1.0
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        kv_dtype = self.kv_dtype or self.dtype
        counts = [-(-length // self.page_size) for length in self.lengths]
        shape = (sum(counts) + 2, self.num_kv_heads, self.page_size, self.dim)
        owned = torch.zeros(shape[0], self.page_size, dtype=torch.bool)
        ids = torch.randperm(sum(counts), generator=draw).int() + 1
        self.page_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        for row, pages in enumerate(ids.split(counts)):
            self.page_table[row, : len(pages)] = pages
            for index, page in enumerate(pages):
                owned[page, : self.lengths[row] - index * self.page_size] = True
        self.owned = owned
        self.k, self.v = (torch.randn(shape, generator=draw) * self.spread for _ in "kv")
        for pages in (self.k, self.v):
            pages.masked_fill_(~owned[:, None, :, None], float("nan"))
        self.k, self.v = self.k.to(kv_dtype), self.v.to(kv_dtype)
        if kv_dtype == torch.float8_e4m3fn:
            self.scales = {name: torch.rand(self.num_kv_heads, generator=draw) + 0.5 for name in ("k_scale", "v_scale")}
        heads = self.num_kv_heads * self.group
        q = torch.randn(sum(self.new) + 1, heads * (3 if self.fused else 1), self.dim, generator=draw).to(self.dtype)
        self.q = q[:, :heads] if self.fused else q
        self.query_starts = int32([0, *np.cumsum(self.new)])
        self.seq_lens = int32(self.lengths)

    def fresh_out(self) -> torch.Tensor:
        return torch.full((len(self.q), self.q.shape[1], self.dim), 7.0, dtype=self.dtype)

    @property
    def ideal_read_bytes(self) -> int:
        """Keys, values and queries, each once for a KV head; index tensors not counted."""
        kv = sum(self.lengths) * self.num_kv_heads * self.dim * (self.k.itemsize + self.v.itemsize)
        return kv + sum(self.new) * self.q.shape[1] * self.dim * self.q.itemsize


def assert_close(got: torch.Tensor, want: torch.Tensor, spread: float = 1.0) -> None:
    """By absolute and relative error of the dtype, for values of this spread; NaN anywhere is an error."""
    assert torch.isfinite(got.float()).all()
    tolerance = TOLERANCE[got.dtype] * spread**2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)
