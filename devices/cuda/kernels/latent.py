"""Decode attention over latent keys and values (MLA, arXiv:2405.04434): one vector a token for all heads.

A token's page entry is `[latent | rotary]`: the whole is its key, the latent part alone its value. The tile is loaded
once, row by row as it lies in memory, and multiplied from both sides: transposed for the scores, as it is for the sum.
All heads are rows of the products, in blocks. Splits, partial results, masks and `requests` are those of
`devices.cuda.kernels.decode`, whose `merge_kernel` joins the spans here too.
"""

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import BadKernelArgument, check_int32, check_queries, latent_shape
from devices.cuda.configurations import LEAST_SPAN, MERGE_BLOCK, architecture, latent_tiles
from devices.cuda.kernels.decode import merge_kernel
from devices.cuda.kernels.softmax import LOG2E, online_softmax, split_span


@triton.jit
def split_latent_kernel(
    q,
    pages,
    partial_out,
    partial_lse,
    page_table,
    requests,
    query_starts,
    seq_lens,
    q_stride,
    table_stride,
    split_tokens,
    scale,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
):
    DIM: tl.constexpr = LATENT + ROTARY
    split = tl.program_id(1)
    entry = tl.program_id(2)
    num_splits = tl.num_programs(1)
    request = tl.load(requests + entry)
    if request < 0:
        return
    num_keys = tl.load(seq_lens + request)
    first_query = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_query
    span = split_span(num_keys, split_tokens, num_splits, BLOCK_N, LEAST)
    low = split * span
    # The last program takes what is left: too few spans of a fixed size must not lose keys.
    high = tl.where(split + 1 == num_splits, num_keys, tl.minimum(low + span, num_keys))
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_queries * HEADS
    at = entry.to(tl.int64) * (ROWS * num_splits) + split
    if low < high:
        position = num_keys - num_queries + row // HEADS
        latent = tl.arange(0, LATENT)
        rotary = LATENT + tl.arange(0, ROTARY)
        key = tl.arange(0, BLOCK_N)
        q_rows = q + first_query.to(tl.int64) * q_stride + (row // HEADS * q_stride + row % HEADS * DIM)[:, None]
        queries = tl.load(q_rows + latent[None, :], mask=is_row[:, None], other=0.0)
        rotary_queries = tl.load(q_rows + rotary[None, :], mask=is_row[:, None], other=0.0)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        summed = tl.zeros([BLOCK_M, LATENT], tl.float32)
        table = page_table + request.to(tl.int64) * table_stride
        next_page = tl.load(table + low // PAGE)
        for start in range(low, high, BLOCK_N):
            tokens = pages + next_page.to(tl.int64) * (PAGE * DIM) + (start % PAGE + key)[:, None] * DIM
            next_page = tl.load(table + tl.minimum(start + BLOCK_N, high - 1) // PAGE)
            is_key = start + key < high
            tile = tl.load(tokens + latent[None, :], mask=is_key[:, None], other=0.0)
            rotary_tile = tl.load(tokens + rotary[None, :], mask=is_key[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(tile), input_precision="ieee")
            scores = tl.dot(rotary_queries, tl.trans(rotary_tile), scores, input_precision="ieee") * scale
            visible = is_key[None, :] & is_row[:, None]
            if ROWS > HEADS:
                visible = visible & ((start + key)[None, :] <= position[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            weights, decay, largest, total = online_softmax(scores, largest, total)
            summed = tl.dot(weights.to(tile.dtype), tile, summed * decay[:, None], input_precision="ieee")
        result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        rows = partial_out + at * LATENT + (row * num_splits * LATENT)[:, None]
        tl.store(rows + latent[None, :], result, mask=is_row[:, None])
        tl.store(partial_lse + at + row * num_splits, largest + tl.log2(total), mask=is_row)
    else:
        nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tl.store(partial_lse + at + row * num_splits, nothing, mask=is_row)


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
    """Causal latent attention of requests with few new tokens, whose latents are in their pages already.

    Args:
        q: [tokens, num_heads, latent + rotary], already multiplied into the latent space; tokens may lie apart.
        pages: [pages, 1, page_size, latent + rotary], of the dtype of `q`.
        out: [tokens, num_heads, latent], contiguous; rows of other tokens are left alone.
        The others are those of `devices.cuda.kernels.decode.decode_attention`.
    """
    shape = latent_shape(q, pages, out)
    check_int32(requests, query_starts, seq_lens)
    check_queries(max_queries)
    rows = max_queries * shape.num_heads
    tiles = latent_tiles(architecture(q), shape, q.element_size())
    if split_tokens % tiles.block_n:
        raise BadKernelArgument(f"split_tokens={split_tokens} must be a multiple of {tiles.block_n}")
    partial_out = q.new_empty((len(requests), rows, num_splits, shape.latent), dtype=torch.float32)
    partial_lse = q.new_empty((len(requests), rows, num_splits), dtype=torch.float32)
    split_latent_kernel[(triton.cdiv(rows, tiles.block_m), num_splits, len(requests))](
        q,
        pages,
        partial_out,
        partial_lse,
        page_table,
        requests,
        query_starts,
        seq_lens,
        q.stride(0),
        page_table.stride(0),
        split_tokens,
        scale * LOG2E.value,
        HEADS=shape.num_heads,
        ROWS=rows,
        LATENT=shape.latent,
        ROTARY=shape.rotary,
        PAGE=shape.page_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        LEAST=LEAST_SPAN,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    merge_kernel[(rows, 1, len(requests))](
        out,
        partial_out,
        partial_lse,
        seq_lens,
        requests,
        query_starts,
        seq_lens,
        1,
        split_tokens,
        num_splits,
        GROUP=shape.num_heads,
        ROWS=rows,
        DIM=shape.latent,
        BLOCK_DIM=shape.latent,
        BLOCK_N=tiles.block_n,
        BLOCK_S=MERGE_BLOCK,
        WINDOW=0,
        LEAST=LEAST_SPAN,
        HAS_SINKS=False,
        num_warps=4,
    )
