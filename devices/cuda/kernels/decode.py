"""Attention of few new tokens (decode, verification of drafts) over paged keys and values, split along the keys.

One program serves one KV head of one request over one span of its keys: the query heads that share the KV head, times
the request's new tokens, are the rows of its products, so that a tile of keys is read once for all of them. With one
span the program writes the result; with more it writes a partial result with its log-sum-exp, and `merge_kernel`
joins them. Spans either share a row evenly, which fills the GPU, or have a fixed size: then the order in which a row
is summed depends on its own length alone, and a row gets the same bits in any batch.

KV of a layer is `[pages, num_kv_heads, page_size, head_dim]`: a head's page is one contiguous piece of memory. So a
tile is one run of whole cache lines (64 tokens of 128 bf16 numbers: 16 KiB) found by one scalar page id, neighbouring
tiles of a page follow each other in DRAM, and a new token costs one store of `head_dim` numbers for each head, whole
128-byte lines from 64 bf16 numbers on. It is the layout of the CPU device too, so the torch forms read the same KV.

Keys that a mask hides are not read: they may hold anything, NaN of a failed request included.
"""

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import BadKernelArgument, attention_shape, check_int32, check_queries
from devices.cuda.configurations import LEAST_SPAN, MERGE_BLOCK, architecture, decode_tiles
from devices.cuda.kernels.softmax import LOG2E, add_sink, cap_scores, load_tile, oldest_tile, online_softmax, split_span


@triton.jit
def split_kernel(
    q,
    k_pages,
    v_pages,
    out,
    partial_out,
    partial_lse,
    sinks,
    k_scale,
    v_scale,
    page_table,
    requests,
    query_starts,
    seq_lens,
    q_stride,
    table_stride,
    num_kv_heads,
    split_tokens,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    head = tl.program_id(0) // TILES
    split = tl.program_id(1)
    entry = tl.program_id(2)
    request = tl.load(requests + entry)
    if request < 0:
        return
    num_keys = tl.load(seq_lens + request)
    first_query = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_query
    oldest = oldest_tile(num_keys, num_queries, WINDOW, BLOCK_N)
    span = split_span(num_keys - oldest, split_tokens, tl.num_programs(1), BLOCK_N, LEAST)
    low = oldest + split * span
    # The last program takes what is left: too few spans of a fixed size must not lose keys.
    high = tl.where(split + 1 == tl.num_programs(1), num_keys, tl.minimum(low + span, num_keys))
    row = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_queries * GROUP
    at = (entry.to(tl.int64) * num_kv_heads + head) * (ROWS * tl.num_programs(1)) + split
    lse_rows = partial_lse + at + row * tl.num_programs(1)
    if low < high:
        query = row // GROUP
        head_row = head * GROUP + row % GROUP
        position = num_keys - num_queries + query
        dim = tl.arange(0, BLOCK_DIM)
        key = tl.arange(0, BLOCK_N)
        q_rows = q + first_query.to(tl.int64) * q_stride
        is_value = is_row[:, None] & (dim < DIM)[None, :]
        values_at = (query * q_stride + head_row * DIM)[:, None] + dim[None, :]
        queries = tl.load(q_rows + values_at, mask=is_value, other=0.0)
        if HAS_SCALES:
            scale *= tl.load(k_scale + head)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        summed = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        table = page_table + request.to(tl.int64) * table_stride
        # The page id is loaded a tile ahead: a load whose address waits for another load is not pipelined as deep.
        next_page = tl.load(table + low // PAGE)
        for start in range(low, high, BLOCK_N):
            piece = (next_page.to(tl.int64) * num_kv_heads + head) * (PAGE * DIM)
            next_page = tl.load(table + tl.minimum(start + BLOCK_N, high - 1) // PAGE)
            in_page = start % PAGE + key
            is_key = start + key < high
            visible = is_key[None, :] & is_row[:, None]
            if ROWS > GROUP:
                visible = visible & ((start + key)[None, :] <= position[:, None])
            if WINDOW > 0:
                is_key = is_key & (start + key > num_keys - num_queries - WINDOW)
                visible = visible & ((start + key)[None, :] > position[:, None] - WINDOW)
            keys = load_tile(k_pages + piece, in_page, dim, is_key, DIM, BLOCK_DIM, True).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(visible, cap_scores(scores, CAP), float("-inf"))
            weights, decay, largest, total = online_softmax(scores, largest, total)
            values = load_tile(v_pages + piece, in_page, dim, is_key, DIM, BLOCK_DIM, True).to(queries.dtype)
            summed = tl.dot(weights.to(queries.dtype), values, summed * decay[:, None], input_precision="ieee")
        if HAS_SCALES:
            summed *= tl.load(v_scale + head)
        if SINGLE:
            if HAS_SINKS:
                summed, total = add_sink(summed, total, largest, sinks + head_row, is_row)
            out_rows = out + first_query.to(tl.int64) * (num_kv_heads * GROUP * DIM)
            values_at = (query * (num_kv_heads * GROUP * DIM) + head_row * DIM)[:, None] + dim[None, :]
            tl.store(out_rows + values_at, (summed / total[:, None]).to(out.dtype.element_ty), mask=is_value)
        else:  # nothing seen: the log-sum-exp is -inf, and the merge does not look at the result
            values_at = (row * tl.num_programs(1) * DIM)[:, None] + dim[None, :]
            result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(partial_out + at * DIM + values_at, result, mask=is_value)
            tl.store(lse_rows, largest + tl.log2(total), mask=is_row)
    elif not SINGLE:
        tl.store(lse_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)


@triton.jit
def merge_kernel(
    out,
    partial_out,
    partial_lse,
    sinks,
    requests,
    query_starts,
    seq_lens,
    num_kv_heads,
    split_tokens,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.program_id(2)
    request = tl.load(requests + entry)
    if request < 0:
        return
    num_keys = tl.load(seq_lens + request)
    first_query = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_query
    if row < num_queries * GROUP:
        oldest = oldest_tile(num_keys, num_queries, WINDOW, BLOCK_N)
        span = split_span(num_keys - oldest, split_tokens, num_splits, BLOCK_N, LEAST)
        used = tl.minimum(tl.cdiv(num_keys - oldest, span), num_splits)
        head_row = head * GROUP + row % GROUP
        dim = tl.arange(0, BLOCK_DIM)
        at = ((entry.to(tl.int64) * num_kv_heads + head) * ROWS + row) * num_splits
        summed = tl.zeros([BLOCK_DIM], tl.float32)
        if HAS_SINKS:
            largest = tl.load(sinks + head_row).to(tl.float32) * LOG2E
            total = largest * 0.0 + 1.0
        else:
            largest = float("-inf")
            total = 0.0
        for first in range(0, used, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            lse = tl.load(partial_lse + at + split, mask=split < used, other=float("-inf"))
            larger = tl.maximum(largest, tl.max(lse, 0))
            finite = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf is NaN
            decay = tl.exp2(largest - finite)
            weight = tl.exp2(lse - finite)
            # A span in which the row sees no key has written nothing.
            is_value = (lse > float("-inf"))[:, None] & (dim < DIM)[None, :]
            partial = tl.load(partial_out + at * DIM + split[:, None] * DIM + dim[None, :], mask=is_value, other=0.0)
            summed = summed * decay + tl.sum(partial * weight[:, None], 0)
            total = total * decay + tl.sum(weight, 0)
            largest = larger
        result = summed / total
        token = (first_query + row // GROUP).to(tl.int64)
        at_out = token * (num_kv_heads * GROUP * DIM) + head_row * DIM
        tl.store(out + at_out + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


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
    """Causal attention of requests with few new tokens, whose keys and values are in their pages already.

    Args:
        q: [tokens, num_heads, head_dim]; tokens may lie apart. out: the same shape, contiguous; rows of other tokens
            are left alone.
        k_pages, v_pages: [pages, num_kv_heads, page_size, head_dim]; fp8 keys and values need scales.
        page_table: int32 [batch, width], page ids of each request.
        requests: int32 [entries], indices of the requests to serve; -1 is padding and touches nothing.
        query_starts: int32 [batch + 1]; request `b` has the new tokens `[query_starts[b], query_starts[b + 1])`.
        seq_lens: int32 [batch], readable tokens, the new ones included.
        max_queries: new tokens of any entry, at most 8.
        scale: of the products, before soft cap and softmax.
        num_splits: programs along the keys of each row and head.
        split_tokens: keys in a program when positive (fixed spans; `num_splits` times it must reach the longest row for
            a row to get the same bits in any batch); 0 shares a row evenly.
        window: a token attends to itself and the `window - 1` before it.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: [num_heads], a logit for each head that takes weight and gives nothing (arXiv:2309.17453).
        k_scale, v_scale: fp32 [num_kv_heads], what stored keys and values are multiplied by.
    """
    shape = attention_shape(q, k_pages, v_pages, out, sinks, k_scale, v_scale)
    check_int32(requests, query_starts, seq_lens)
    check_queries(max_queries)
    tiles = decode_tiles(architecture(q), shape, max_queries)
    if split_tokens % tiles.block_n:
        raise BadKernelArgument(f"split_tokens={split_tokens} must be a multiple of {tiles.block_n}")
    rows = max_queries * shape.group
    # Even one span is merged when spans are fixed: how a row is summed must not depend on the longest row of the batch.
    single = num_splits == 1 and not split_tokens
    entries = 0 if single else len(requests)
    partial_out = q.new_empty((entries, shape.num_kv_heads, rows, num_splits, shape.dim), dtype=torch.float32)
    partial_lse = q.new_empty((entries, shape.num_kv_heads, rows, num_splits), dtype=torch.float32)
    shared = {"GROUP": shape.group, "ROWS": rows, "DIM": shape.dim, "BLOCK_DIM": shape.block_dim}
    shared |= {"BLOCK_N": tiles.block_n, "WINDOW": window or 0, "LEAST": LEAST_SPAN, "HAS_SINKS": sinks is not None}
    nothing = seq_lens  # stands where a pointer is not used
    split_kernel[(shape.num_kv_heads * triton.cdiv(rows, tiles.block_m), num_splits, len(requests))](
        q,
        k_pages,
        v_pages,
        out,
        partial_out,
        partial_lse,
        nothing if sinks is None else sinks,
        nothing if k_scale is None else k_scale,
        nothing if v_scale is None else v_scale,
        page_table,
        requests,
        query_starts,
        seq_lens,
        q.stride(0),
        page_table.stride(0),
        shape.num_kv_heads,
        split_tokens,
        scale * LOG2E.value,
        PAGE=shape.page_size,
        BLOCK_M=tiles.block_m,
        CAP=soft_cap or 0.0,
        HAS_SCALES=k_scale is not None,
        SINGLE=single,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **shared,
    )
    if not single:
        merge_kernel[(rows, shape.num_kv_heads, len(requests))](
            out,
            partial_out,
            partial_lse,
            nothing if sinks is None else sinks,
            requests,
            query_starts,
            seq_lens,
            shape.num_kv_heads,
            split_tokens,
            num_splits,
            BLOCK_S=MERGE_BLOCK,
            num_warps=4,
            **shared,
        )
