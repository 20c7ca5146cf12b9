"""The torch forms of attention over paged KV: one request after another, dense, in fp32.

They read what the kernels read and nothing else: hidden keys are cut off, or filled and their weights zero, never
multiplied. Numbers that only shape how a kernel cuts its work (splits) are accepted and have no effect.
"""

from __future__ import annotations

import torch


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_queries: int,
    scale: float,
    num_splits: int,
    split_tokens: int = 0,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `devices.cuda.kernels.decode.decode_attention`."""
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    for request in requests.tolist():
        if request >= 0:
            new = slice(starts[request], starts[request + 1])
            keys = _tokens(k_pages, page_table[request], lengths[request], k_scale)
            values = _tokens(v_pages, page_table[request], lengths[request], v_scale)
            out[new] = attend(q[new], keys, values, scale, window, soft_cap, sinks).to(out.dtype)


def extend_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    out: torch.Tensor,
    page_table: torch.Tensor,
    tile_request: torch.Tensor,
    tile_query: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `devices.cuda.kernels.extend.extend_attention`; requests are served whole, whatever their tiles."""
    first_tiles = tile_request[tile_query == 0]
    decode_attention(
        q,
        k_pages,
        v_pages,
        out,
        page_table,
        first_tiles,
        query_starts,
        seq_lens,
        max_queries=0,
        scale=scale,
        num_splits=1,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def decode_latent_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_queries: int,
    scale: float,
    num_splits: int,
    split_tokens: int = 0,
) -> None:
    """See `devices.cuda.kernels.latent.decode_latent_attention`."""
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    for request in requests.tolist():
        if request >= 0:
            new = slice(starts[request], starts[request + 1])
            keys = _tokens(pages, page_table[request], lengths[request], None)
            out[new] = attend(q[new], keys, keys[:, :, : out.shape[2]], scale).to(out.dtype)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of a request over all of it, fp32.

    Args:
        q: [new, num_heads, dim].
        keys, values: fp32 [tokens, num_kv_heads, dim]; the numbers of a value may be fewer.
    """
    num_new, num_heads, _ = q.shape
    num_tokens, num_kv_heads, _ = keys.shape
    position = torch.arange(num_tokens - num_new, num_tokens, device=q.device)[:, None]
    key = torch.arange(num_tokens, device=q.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
        first = max(0, num_tokens - num_new - window + 1)  # what no query sees may hold anything, NaN included
        keys, values, hidden = keys[first:], values[first:], hidden[:, first:]
    grouped = q.float().reshape(num_new, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)


def _tokens(pages: torch.Tensor, table: torch.Tensor, length: int, scale: torch.Tensor | None) -> torch.Tensor:
    """A request's tokens in order, fp32 [length, num_kv_heads, dim]."""
    page_size = pages.shape[2]
    used = table[: -(-length // page_size)].long()
    tokens = pages[used].transpose(1, 2).flatten(0, 1)[:length].float()
    return tokens if scale is None else tokens * scale[:, None]
