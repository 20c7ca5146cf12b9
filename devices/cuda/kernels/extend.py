"""Attention of many new tokens (prefill, chunks) over paged keys and values: the prefix and the new tokens alike.

The step's ragged batch is cut into tiles of queries by the host, longest first: a compact list, so that no program is
idle because another request is longer. One program serves one tile and one KV head; the query heads that share it are
rows of the same product. New tokens are read back from their pages, where they were just written: what a token attends
to is the same number whether it came in this step or in one before, so chunks change nothing.

Tiles of keys that every row of the program sees come first, without a mask; the diagonal and the window's edge follow
with one. Keys that no row sees are not read. The layout of KV is said in `devices.cuda.kernels.decode`.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from devices.cuda.arguments import attention_shape, check_int32
from devices.cuda.configurations import architecture, extend_tiles
from devices.cuda.kernels.softmax import LOG2E, add_sink, cap_scores, load_tile, online_softmax
from devices.pages import IntArray


@triton.jit
def _attend(
    queries,
    k_pages,
    v_pages,
    table,
    head,
    num_kv_heads,
    low,
    high,
    oldest,
    newest,
    position,
    scale,
    largest,
    total,
    summed,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys `[low, high)`, both on a tile's border; with a mask, those in `[oldest, newest)` are read."""
    dim = tl.arange(0, BLOCK_DIM)
    key = tl.arange(0, BLOCK_N)
    next_page = tl.load(table + low // PAGE, mask=low < high, other=0)
    for start in range(low, high, BLOCK_N):
        page = next_page.to(tl.int64)
        next_page = tl.load(table + tl.minimum(start + BLOCK_N, high - 1) // PAGE)
        piece = (page * num_kv_heads + head) * (PAGE * DIM)
        in_page = start % PAGE + key
        is_key = start + key < newest
        if WINDOW > 0:
            is_key = is_key & (start + key >= oldest)
        keys = load_tile(k_pages + piece, in_page, dim, is_key, DIM, BLOCK_DIM, MASKED)
        values = load_tile(v_pages + piece, in_page, dim, is_key, DIM, BLOCK_DIM, MASKED)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * scale
        scores = cap_scores(scores, CAP)
        if MASKED:
            visible = is_key[None, :] & ((start + key)[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & ((start + key)[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        weights, decay, largest, total = online_softmax(scores, largest, total)
        weights = weights.to(queries.dtype)
        summed = tl.dot(weights, values.to(queries.dtype), summed * decay[:, None], input_precision="ieee")
    return largest, total, summed


@triton.jit
def extend_kernel(
    q,
    k_pages,
    v_pages,
    out,
    sinks,
    k_scale,
    v_scale,
    page_table,
    tile_request,
    tile_query,
    query_starts,
    seq_lens,
    q_stride,
    table_stride,
    num_kv_heads,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(tile_request + tile)
    if request < 0:
        return
    first = tl.load(tile_query + tile)  # of the tile, counted from the request's first new token
    first_query = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_query
    num_keys = tl.load(seq_lens + request)
    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP
    head_row = head * GROUP + row % GROUP
    is_row = (query < num_queries) & (row < QUERIES * GROUP)
    past = num_keys - num_queries
    position = past + query
    newest = tl.minimum(past + first + QUERIES, num_keys)
    dim = tl.arange(0, BLOCK_DIM)
    is_value = is_row[:, None] & (dim < DIM)[None, :]
    q_rows = q + (first_query + first).to(tl.int64) * q_stride
    at = (row // GROUP * q_stride + head_row * DIM)[:, None] + dim[None, :]
    queries = tl.load(q_rows + at, mask=is_value, other=0.0)
    if HAS_SCALES:
        scale *= tl.load(k_scale + head)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    table = page_table + request.to(tl.int64) * table_stride
    oldest = newest * 0
    low = newest * 0
    if WINDOW > 0:
        oldest = tl.maximum(past + first - WINDOW + 1, 0)
        low = oldest // BLOCK_N * BLOCK_N
    else:
        # Every row sees all keys up to the first row's own.
        full = (past + first + 1) // BLOCK_N * BLOCK_N
        largest, total, summed = _attend(
            queries, k_pages, v_pages, table, head, num_kv_heads, low, full, oldest, newest, position, scale,
            largest, total, summed, DIM, BLOCK_DIM, PAGE, BLOCK_N, WINDOW, CAP, False,
        )  # fmt: skip
        low = full
    largest, total, summed = _attend(
        queries, k_pages, v_pages, table, head, num_kv_heads, low, newest, oldest, newest, position, scale,
        largest, total, summed, DIM, BLOCK_DIM, PAGE, BLOCK_N, WINDOW, CAP, True,
    )  # fmt: skip
    if HAS_SCALES:
        summed *= tl.load(v_scale + head)
    if HAS_SINKS:
        summed, total = add_sink(summed, total, largest, sinks + head_row, is_row)
    out_rows = out + (first_query + first).to(tl.int64) * (num_kv_heads * GROUP * DIM)
    at = (row // GROUP * (num_kv_heads * GROUP * DIM) + head_row * DIM)[:, None] + dim[None, :]
    tl.store(out_rows + at, (summed / total[:, None]).to(out.dtype.element_ty), mask=is_value)


def plan_tiles(
    query_lens: IntArray, seq_lens: IntArray, requests: IntArray, tile_queries: int
) -> npt.NDArray[np.int32]:
    """The work of a step's prefills as tiles of `tile_queries` tokens, those with most keys first.

    Args:
        query_lens, seq_lens: int32 [batch], host; requests: those to serve.
        tile_queries: `block_m // group` of `devices.cuda.configurations.extend_tiles`.
    Returns:
        int32 [2, tiles]: the request of each tile, and its first token counted from the request's first new one.
    """
    num_tiles = -(-query_lens[requests] // tile_queries)
    request = np.repeat(requests, num_tiles)
    ends = np.cumsum(num_tiles)
    index = np.arange(len(request)) - np.repeat(ends - num_tiles, num_tiles)
    first = index * tile_queries
    keys = seq_lens[request] - query_lens[request] + first
    order = np.argsort(-keys, kind="stable")
    return np.stack([request[order], first[order]]).astype(np.int32)


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
    """Causal attention of requests with many new tokens, whose keys and values are in their pages already.

    Args:
        tile_request, tile_query: int32 [tiles], from `plan_tiles`; request -1 is padding.
        The others are those of `devices.cuda.kernels.decode.decode_attention`.
    """
    shape = attention_shape(q, k_pages, v_pages, out, sinks, k_scale, v_scale)
    check_int32(tile_request, tile_query, query_starts, seq_lens)
    tiles = extend_tiles(architecture(q), shape, q.element_size())
    nothing = seq_lens  # stands where a pointer is not used
    extend_kernel[(shape.num_kv_heads, len(tile_request))](
        q,
        k_pages,
        v_pages,
        out,
        nothing if sinks is None else sinks,
        nothing if k_scale is None else k_scale,
        nothing if v_scale is None else v_scale,
        page_table,
        tile_request,
        tile_query,
        query_starts,
        seq_lens,
        q.stride(0),
        page_table.stride(0),
        shape.num_kv_heads,
        scale * LOG2E.value,
        GROUP=shape.group,
        DIM=shape.dim,
        BLOCK_DIM=shape.block_dim,
        PAGE=shape.page_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        WINDOW=window or 0,
        CAP=soft_cap or 0.0,
        HAS_SCALES=k_scale is not None,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
