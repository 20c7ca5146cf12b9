"""Parts that the attention kernels share. Scores are in log2 units: times log2(e), so that exp2 is the exponential."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """`CAP * tanh(scores / CAP)`, the soft cap of Gemma 2 (arXiv:2408.00118), of scores in log2 units."""
    if CAP > 0:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is right at both infinities.
        scores = CAP * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP))))
    return scores


@triton.jit
def online_softmax(scores, largest, total):
    """One step of a softmax over tiles of keys (arXiv:1805.02867); rows that have seen no key yet stay at -inf.

    Returns: weights of this tile, factor for what was summed before, new maximum, new sum of weights.
    """
    larger = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf is NaN
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(largest - finite)
    return weights, decay, larger, total * decay + tl.sum(weights, 1)


@triton.jit
def load_tile(tokens, token, dim, is_token, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the contiguous [tokens, DIM], as [token, BLOCK_DIM]; what is masked is zero and is not read."""
    at = tokens + token[:, None] * DIM + dim[None, :]
    if MASKED and BLOCK_DIM > DIM:
        tile = tl.load(at, mask=is_token[:, None] & (dim < DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(at, mask=is_token[:, None], other=0.0)
    elif BLOCK_DIM > DIM:
        tile = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def split_span(num_keys, split_tokens, num_splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Keys in one split of a row: `split_tokens` when it is given, else such that `num_splits` hold the row."""
    tiles = tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N)
    return tl.where(split_tokens > 0, split_tokens, tl.maximum(tiles * BLOCK_N, LEAST))


@triton.jit
def oldest_tile(num_keys, num_queries, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key that some query of the row attends to, rounded down to a tile."""
    oldest = num_keys * 0
    if WINDOW > 0:
        oldest = tl.maximum(num_keys - num_queries - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return oldest


@triton.jit
def add_sink(summed, total, largest, sink, is_row):
    """A logit that takes weight and gives nothing: rescales both sums to the larger maximum, adds to the weights."""
    sink = tl.load(sink, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2E
    larger = tl.maximum(largest, sink)
    decay = tl.exp2(largest - larger)
    return summed * decay[:, None], total * decay + tl.exp2(sink - larger)
