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
from report import relative_error

BF16_TOLERANCE = 1e-2
LLAMA_8B = (32, 8, 128)


@dataclass
class Case:
    """One kernel at one shape.

    Attributes:
        run: launches it on set `i`; error: of the last launch on set 0.
    """

    name: str
    run: Callable[[int], object]
    error: Callable[[], float]
    num_bytes: float
    flops: float = 0.0
    target: float | None = None
    tolerance: float = BF16_TOLERANCE
    num_sets: int = 4


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
    yield at("decode 64 x 4096", decode, [4096] * 64, LLAMA_8B, 64, 0.80, small=([20, 33], (4, 2, 32), 16, None))
    yield at("decode 8 x 32768", decode, [32768] * 8, LLAMA_8B, 64, 0.70, small=([300], (4, 2, 32), 16, None))
    yield at("decode 1 x 32768", decode, [32768], LLAMA_8B, 64, 0.60, small=([600], (4, 2, 32), 16, None))
    yield at(
        "extend 2 x 8192 new", extend, [(0, 8192)] * 2, LLAMA_8B, 64, 0.50, small=([(0, 20)], (4, 2, 32), 16, None)
    )
    yield at(
        "extend 2048 on 30720", extend, [(30720, 2048)], LLAMA_8B, 64, 0.50, small=([(20, 12)], (4, 2, 32), 16, None)
    )
    yield at("sample 64 x 152064, top-p", sample, 64, 152064, 0.9, small=(2, 90, 0.9))
    yield at("sample 64 x 152064, greedy", sample, 64, 152064, None, small=(2, 90, None))
    yield at("gated delta 256 x 32 x 128x128", gated_delta, 256, 32, 128, small=(2, 2, 16))
    yield at("mamba2 256 x 128 x 64x128", mamba2, 256, 128, 64, 128, small=(2, 2, 16, 16))


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


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


def write(name: str, device: torch.device, tokens: int, heads: int, dim: int, page_size: int) -> Case:
    from devices.cuda.kernels.kv_cache import write_kv

    num_pages = tokens // page_size + 2
    k, v = (randn(device, tokens, heads, dim) for _ in "kv")
    pools = [
        [torch.zeros(num_pages, heads, page_size, dim, dtype=k.dtype, device=device) for _ in "kv"] for _ in range(4)
    ]
    slots = (torch.randperm(tokens, device=device) + page_size).int()

    def run(i: int) -> None:
        write_kv(k, v, *pools[i], slots)

    def error() -> float:
        page, offset = slots.long() // page_size, slots.long() % page_size
        return relative_error(pools[0][0][page, :, offset], k) + relative_error(pools[0][1][page, :, offset], v)

    return Case(name, run, error, tokens * heads * dim * 2 * 4 + 4 * tokens, target=0.75, tolerance=0.0)


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


def int32(device: torch.device, values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


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


def sample(name: str, device: torch.device, rows: int, vocab_size: int, top_p: float | None) -> Case:
    from report import share_wrong

    from devices.cuda.kernels.sample import sample as choose
    from engine.sampling import sampler
    from engine.step import SamplingColumns

    logits = [randn(device, rows, vocab_size, dtype=torch.float32) * 2 for _ in range(4)]
    columns = SamplingColumns(
        temperature=np.full(rows, 0.0 if top_p is None else 0.7, dtype=np.float32),
        top_k=np.full(rows, -1, dtype=np.int32),
        top_p=np.full(rows, top_p or 1.0, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.arange(rows, dtype=np.int64),
    )
    uniform = sampler.uniforms(columns.seed, columns.position)
    on_device = [
        torch.from_numpy(x).to(device)
        for x in (columns.temperature, columns.top_k, columns.top_p, columns.min_p, uniform)
    ]
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [choose(logits[i], *on_device)[0]]

    def error() -> float:
        return share_wrong(last[0].tolist(), sampler.sample(logits[0].cpu(), columns).token_ids.tolist())

    # Sums round differently on the two: one row in fifty may be drawn on the border of two tokens.
    return Case(name, run, error, 4 * rows * vocab_size, target=0.6 if top_p is None else None, tolerance=0.02)


def gated_delta(name: str, device: torch.device, rows: int, heads: int, dim: int) -> Case:
    from devices.cuda.kernels.state import gated_delta_decode as kernel
    from devices.torch_forms.state import gated_delta_decode as torch_form

    q, k, v = (randn(device, rows, heads, dim) for _ in "qkv")
    decay, beta = -randn(device, rows, heads, dtype=torch.float32).abs(), torch.rand(rows, heads, device=device)
    states = [randn(device, rows, heads, dim, dim, dtype=torch.float32) for _ in range(2)]
    slots, kept = int32(device, range(rows)), states[0].clone()
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [kernel(q, k, v, decay, beta, states[i], slots, dim**-0.5)]

    def error() -> float:
        states[0].copy_(kept)
        run(0)
        want = torch_form(q, k, v, decay, beta, kept.clone(), slots, dim**-0.5)
        return relative_error(last[0], want)

    num_bytes = 2 * rows * heads * dim * dim * 4 + 2 * rows * heads * (4 * dim + 2)
    return Case(name, run, error, num_bytes, 6 * rows * heads * dim * dim, 0.80, num_sets=2)


def mamba2(name: str, device: torch.device, rows: int, heads: int, dim: int, size: int) -> Case:
    from devices.cuda.kernels.state import mamba2_decode as kernel
    from devices.torch_forms.state import mamba2_decode as torch_form

    x, dt = randn(device, rows, heads, dim), randn(device, rows, heads)
    a, d, bias = (randn(device, heads, dtype=torch.float32) for _ in "adb")
    b, c = (randn(device, rows, 1, size) for _ in "bc")
    states = [randn(device, rows, heads, dim, size, dtype=torch.float32) for _ in range(2)]
    slots, kept = int32(device, range(rows)), states[0].clone()
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [kernel(x, dt, -a.abs(), b, c, d, bias, states[i], slots)]

    def error() -> float:
        states[0].copy_(kept)
        run(0)
        return relative_error(last[0], torch_form(x, dt, -a.abs(), b, c, d, bias, kept.clone(), slots))

    num_bytes = 2 * rows * heads * dim * size * 4 + 4 * rows * heads * dim * 2
    return Case(name, run, error, num_bytes, 5 * rows * heads * dim * size, 0.80, num_sets=2)
