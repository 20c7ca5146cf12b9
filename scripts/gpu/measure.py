"""Times launches by replaying a CUDA graph of them, and finds what the GPU does at best."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from report import Ceilings

REPLAYS = 15


def graph_seconds(run: Callable[[int], object], num_sets: int, per_graph: int = 8) -> float:
    """Of one launch: a graph of several, on sets of tensors in turn, replayed; the median."""
    for i in range(num_sets):
        run(i)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(per_graph):
            run(i % num_sets)
    seconds = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3 / per_graph)
    return median(seconds)


def ceilings() -> Ceilings:
    """A copy of 1 GiB, read and written, and a bf16 product of 8192 x 8192 x 8192; the better of two measurements."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    num_bytes = 2 * source.nbytes
    copy_s = min(graph_seconds(lambda _: target.copy_(source), 1) for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
    out = torch.empty_like(a)
    product_s = min(graph_seconds(lambda _: torch.mm(a, b, out=out), 1) for _ in range(2))
    return Ceilings(num_bytes / copy_s, 2 * 8192**3 / product_s)


def peers() -> dict[str, str]:
    """The same attention by others: torch's SDPA and `varlen_attn`, FlashInfer where it is installed. Microseconds."""
    found: dict[str, str] = {}
    for name, measure in (("sdpa", _sdpa), ("varlen_attn", _varlen), ("flashinfer", _flashinfer)):
        try:
            found |= {what: f"{seconds * 1e6:.1f} us" for what, seconds in measure().items()}
        except Exception as error:  # a peer that is not there, or has changed, is no reason to stop
            found[name] = f"not measured: {type(error).__name__}: {str(error)[:120]}"
    return found


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _sdpa() -> dict[str, float]:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = _bf16(2, 32, 8192, 128), _bf16(2, 8, 8192, 128), _bf16(2, 8, 8192, 128)
    prefill = graph_seconds(lambda _: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 1)
    q, k, v = _bf16(64, 32, 1, 128), _bf16(64, 8, 4096, 128), _bf16(64, 8, 4096, 128)
    decode = graph_seconds(lambda _: scaled_dot_product_attention(q, k, v, enable_gqa=True), 1)
    return {"sdpa, extend 2 x 8192 new": prefill, "sdpa, decode 64 x 4096 (not paged)": decode}


def _varlen() -> dict[str, float]:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = _bf16(16384, 32, 128), _bf16(16384, 32, 128), _bf16(16384, 32, 128)
    starts = torch.tensor([0, 8192, 16384], dtype=torch.int32, device="cuda")
    arguments = (q, k, v, starts, starts, 8192, 8192)
    try:
        varlen_attn(*arguments, window_size=(-1, 0))
        seconds = graph_seconds(lambda _: varlen_attn(*arguments, window_size=(-1, 0)), 1)
    except TypeError:
        seconds = graph_seconds(lambda _: varlen_attn(*arguments, is_causal=True), 1)
    return {"varlen_attn, 2 x 8192 new (32 KV heads)": seconds}


def _flashinfer() -> dict[str, float]:
    import flashinfer

    pages, page_size = 64 * 64, 64
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    starts = torch.arange(0, pages + 1, 64, dtype=torch.int32, device="cuda")
    ids = torch.randperm(pages, device="cuda").int()
    last = torch.full((64,), page_size, dtype=torch.int32, device="cuda")
    wrapper.plan(starts, ids, last, 32, 8, 128, page_size, data_type=torch.bfloat16, q_data_type=torch.bfloat16)
    q, kv = _bf16(64, 32, 128), _bf16(pages, 2, 8, page_size, 128)
    wrapper.run(q, kv)
    return {"flashinfer, decode 64 x 4096": graph_seconds(lambda _: wrapper.run(q, kv), 1)}
