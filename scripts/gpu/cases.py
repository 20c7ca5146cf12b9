"""The kernels at shapes of common models, each with an fp32 reference; `tiny` shapes are for the interpreter.

A case makes its tensors when it is asked: several sets, which timing uses in turn so that none lies in the cache.
Formulas of bytes and flops and the targets are those of docs/cuda.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from cache_cases import copy, tables, write
from case import Case, int32, num_sms, randn
from report import relative_error
from sample_cases import edit, sample
from state_cases import conv_decode, conv_prefill, gated_delta, mamba2

LLAMA_8B = (32, 8, 128)


Named = tuple[str, Callable[[], Case]]


def make_cases(device: torch.device, tiny: bool) -> Iterator[Named]:
    """Names and makers, the cheap ones first."""

    def at(
        name: str, make: Callable[..., Case], *full: object, small: tuple[object, ...]
    ) -> tuple[str, Callable[[], Case]]:
        return name, lambda: make(name, device, *(small if tiny else full))

    yield at("rms_norm + add 8192x4096", norm, 8192, 4096, small=(6, 64))
    yield at("rotate 8192 x 40 heads", rope, 8192, 40, 128, small=(3, 4, 32))
    yield at("silu * up 8192x12288", gate, 8192, 12288, small=(3, 48))
    yield at("write kv 8192 x 8 heads", write, 8192, 8, 128, 64, small=(9, 2, 32, 16))
    yield at("copy 256 pages of 8 heads", copy, 256, 8, 128, 64, small=(3, 2, 32, 16))
    yield at("page tables 256 x 32 new", tables, 256, 32, 512, 64, 12e-6, small=(3, 20, 5, 16, 12e-6))
    yield at("page tables 256 x 1 new", tables, 256, 1, 512, 64, 6e-6, small=(3, 1, 5, 16, 6e-6))
    yield at("decode 64 x 4096", decode, [4096] * 64, LLAMA_8B, 64, 0.80, small=([20, 33], (4, 2, 32), 16, None))
    yield at("decode 8 x 32768", decode, [32768] * 8, LLAMA_8B, 64, 0.70, small=([300], (4, 2, 32), 16, None))
    yield at("decode 1 x 32768", decode, [32768], LLAMA_8B, 64, 0.60, small=([600], (4, 2, 32), 16, None))
    yield at(
        "extend 2 x 8192 new", extend, [(0, 8192)] * 2, LLAMA_8B, 64, 0.50, small=([(0, 20)], (4, 2, 32), 16, None)
    )
    yield at(
        "extend 2048 on 30720", extend, [(30720, 2048)], LLAMA_8B, 64, 0.50, small=([(20, 12)], (4, 2, 32), 16, None)
    )
    yield at(
        "latent decode 64 x 8192, 16 heads",
        latent,
        [8192] * 64,
        16,
        (512, 64),
        64,
        0.65,
        small=([20, 70], 4, (32, 16), 16, None),
    )
    yield at(
        "latent decode 8 x 4096, 128 heads",
        latent,
        [4096] * 8,
        128,
        (512, 64),
        64,
        0.35,
        small=([300], 8, (32, 16), 16, None),
    )
    yield at("edit 64 x 152064, 2000 seen", edit, 64, 152064, 2000, small=(2, 90, 9))
    yield at("sample 64 x 152064, top-p", sample, 64, 152064, 0.9, small=(2, 90, 0.9))
    yield at("sample 64 x 152064, greedy", sample, 64, 152064, None, small=(2, 90, None))
    yield at("gated delta 256 x 32 x 128x128", gated_delta, 256, 32, 128, small=(2, 2, 16))
    yield at("mamba2 256 x 128 x 64x128", mamba2, 256, 128, 64, 128, small=(2, 2, 16, 16))
    yield at("conv decode 256 x 8192", conv_decode, 256, 8192, 4, small=(3, 40, 4))
    yield at("conv prefill 8 x 1024 x 8192", conv_prefill, 8, 1024, 8192, 4, small=(2, 40, 40, 4))


def norm(name: str, device: torch.device, rows: int, size: int) -> Case:
    from devices.cuda.kernels.norm import rms_norm

    sets = [(randn(device, rows, size), randn(device, rows, size)) for _ in range(4)]
    weight = randn(device, size)
    last: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def run(i: int) -> None:
        last[:] = [rms_norm(sets[i][0], weight, 1e-6, sets[i][1])]

    def error() -> float:
        total = sets[0][0].float() + sets[0][1].float()
        return relative_error(last[0][0], F.rms_norm(total, (size,), weight.float(), 1e-6))

    return Case(name, run, error, 2 * (4 * rows * size + size), target=0.85)


def rope(name: str, device: torch.device, tokens: int, heads: int, dim: int) -> Case:
    from devices.cuda.kernels.rope import rotate
    from devices.torch_forms.operators import TorchOperators

    sets = [randn(device, tokens, heads, dim) for _ in range(4)]
    angles = randn(device, tokens, dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [rotate(sets[i], cos, sin)]

    def error() -> float:
        return relative_error(last[0], TorchOperators().rotate(sets[0].float(), cos, sin))

    return Case(name, run, error, 4 * tokens * heads * dim + 4 * tokens * dim, target=0.80)


def gate(name: str, device: torch.device, rows: int, size: int) -> Case:
    from devices.cuda.kernels.gate import gate_mul

    sets = [randn(device, rows, 2 * size) for _ in range(2)]
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [gate_mul(sets[i])]

    def error() -> float:
        left, right = sets[0].float().chunk(2, dim=-1)
        return relative_error(last[0], F.silu(left) * right)

    return Case(name, run, error, 2 * 3 * rows * size, target=0.85, num_sets=2)


@dataclass
class Paged:
    """Requests of given lengths on shuffled pages, `num_sets` times."""

    q: torch.Tensor
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls,
        device: torch.device,
        lengths: list[int],
        new: int,
        heads: tuple[int, int, int],
        page_size: int,
        num_sets: int,
    ) -> Paged:
        num_heads, num_kv_heads, dim = heads
        counts = [-(-n // page_size) for n in lengths]
        ids = torch.randperm(sum(counts), device=device).int() + 1
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=device)
        for row, part in enumerate(ids.split(counts)):
            table[row, : len(part)] = part
        shape = (sum(counts) + 1, num_kv_heads, page_size, dim)
        pools = [(randn(device, *shape), randn(device, *shape)) for _ in range(num_sets)]
        return cls(randn(device, new, num_heads, dim), pools, table, lengths)

    def expected(self, row: int, q: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last tokens `q` of a row, fp32, one head after another."""
        length, n = self.lengths[row], len(q)
        k, v = (pool[self.table[row].long()].transpose(1, 2).flatten(0, 1)[:length] for pool in self.pools[0])
        hidden = torch.arange(length, device=q.device)[None] > torch.arange(n, device=q.device)[:, None] + length - n
        group = q.shape[1] // k.shape[1]
        out = torch.empty(q.shape, device=q.device)
        for head in range(q.shape[1]):
            scores = q[:, head].float() @ k[:, head // group].float().T * q.shape[2] ** -0.5
            out[:, head] = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v[:, head // group].float()
        return out


def decode(
    name: str,
    device: torch.device,
    lengths: list[int],
    heads: tuple[int, int, int],
    page_size: int,
    target: float | None,
) -> Case:
    from devices.cuda.attention import TritonAttention
    from devices.cuda.kernels.decode import decode_attention

    num_heads, num_kv_heads, dim = heads
    num_sets = 4 if len(lengths) * max(lengths) < 1 << 17 else 2
    paged = Paged.of(device, lengths, len(lengths), heads, page_size, num_sets)
    out = torch.empty_like(paged.q)
    rows, starts = int32(device, range(len(lengths))), int32(device, range(len(lengths) + 1))
    seq_lens = int32(device, lengths)
    num_splits = TritonAttention.splits(heads, page_size, np.array(lengths, dtype=np.int32), 1, num_sms(device))

    def run(i: int) -> None:
        decode_attention(
            paged.q, *paged.pools[i], out, paged.table, rows, starts, seq_lens,
            max_queries=1, scale=dim**-0.5, num_splits=num_splits,
        )  # fmt: skip

    def error() -> float:
        run(0)
        return relative_error(out[-1:], paged.expected(len(lengths) - 1, paged.q[-1:]))

    num_bytes = sum(lengths) * num_kv_heads * 2 * dim * 2 + 4 * out.numel()
    if num_splits > 1:
        num_bytes += 2 * len(lengths) * num_heads * num_splits * (dim + 1) * 4
    flops = 4 * sum(lengths) * num_heads * dim
    return Case(name, run, error, num_bytes, flops, target, num_sets=num_sets)


def extend(
    name: str,
    device: torch.device,
    requests: list[tuple[int, int]],
    heads: tuple[int, int, int],
    page_size: int,
    target: float | None,
) -> Case:
    from devices.cuda.attention import TritonAttention
    from devices.cuda.configurations import architecture
    from devices.cuda.kernels.extend import extend_attention, plan_tiles

    num_heads, num_kv_heads, dim = heads
    lengths, new = [past + n for past, n in requests], [n for _, n in requests]
    paged = Paged.of(device, lengths, sum(new), heads, page_size, 2)
    out = torch.empty_like(paged.q)
    tile_queries = TritonAttention.tile_queries(heads, page_size, architecture(out), out.element_size())
    tiles = plan_tiles(*(np.array(x, dtype=np.int32) for x in (new, lengths, range(len(new)))), tile_queries)
    request, first = (int32(device, column) for column in tiles)
    starts, seq_lens = int32(device, np.cumsum([0, *new])), int32(device, lengths)

    def run(i: int) -> None:
        extend_attention(
            paged.q, *paged.pools[i], out, paged.table, request, first, starts, seq_lens, scale=dim**-0.5
        )  # fmt: skip

    def error() -> float:
        run(0)
        last = new[-1]
        return relative_error(out[-last:], paged.expected(len(new) - 1, paged.q[-last:]))

    flops = 4 * num_heads * dim * sum(n * past + n * (n + 1) / 2 for past, n in requests)
    num_bytes = sum(lengths) * num_kv_heads * 2 * dim * 2 + 4 * out.numel()
    return Case(name, run, error, num_bytes, flops, target, num_sets=2)


def latent(
    name: str,
    device: torch.device,
    lengths: list[int],
    num_heads: int,
    parts: tuple[int, int],
    page_size: int,
    target: float | None,
) -> Case:
    """`parts`: numbers of a token's latent and of its rotary part."""
    from devices.cuda.arguments import LatentShape
    from devices.cuda.configurations import architecture, balanced_splits, latent_tiles
    from devices.cuda.kernels.latent import decode_latent_attention

    rows, dim, scale = len(lengths), sum(parts), (parts[0] // 4 + parts[1]) ** -0.5
    counts = [-(-n // page_size) for n in lengths]
    table = torch.zeros(rows, max(counts), dtype=torch.int32, device=device)
    for row, part in enumerate((torch.randperm(sum(counts), device=device).int() + 1).split(counts)):
        table[row, : len(part)] = part
    pools = [randn(device, sum(counts) + 1, 1, page_size, dim) for _ in range(2)]
    q = randn(device, rows, num_heads, dim)
    out = torch.empty(rows, num_heads, parts[0], dtype=q.dtype, device=device)
    columns = int32(device, range(rows)), int32(device, range(rows + 1)), int32(device, lengths)
    tiles = latent_tiles(architecture(q), LatentShape(num_heads, *parts, page_size), q.element_size())
    num_programs = -(-num_heads // tiles.block_m)
    num_splits = balanced_splits(
        np.array(lengths, dtype=np.int32), num_programs, num_sms(device), tiles.ctas_per_sm
    )  # fmt: skip

    def run(i: int) -> None:
        decode_latent_attention(q, pools[i], out, table, *columns, max_queries=1, scale=scale, num_splits=num_splits)

    def error() -> float:
        run(0)
        known = pools[0][table[-1].long()].flatten(0, 2)[: lengths[-1]].float()
        weights = (q[-1].float() @ known.T * scale).softmax(-1)
        return relative_error(out[-1], weights @ known[:, : parts[0]])

    num_bytes = sum(lengths) * dim * 2 + 2 * (q.numel() + out.numel())
    num_bytes += 2 * rows * num_heads * num_splits * (parts[0] + 1) * 4
    return Case(name, run, error, num_bytes, 2 * sum(lengths) * num_heads * (dim + parts[0]), target, num_sets=2)
