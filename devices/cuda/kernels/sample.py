"""Chooses a token of each row of logits: temperature, top-k, top-p, min-p, one uniform number. No sort.

The choice is the one that `engine.sampling.sampler` defines: the inverse of a cumulative sum at the row's own number,
over the whole vocabulary in its order, or, where top-k or top-p cut, over the best tokens, best first (equal ones by
their ids). Best first, all three cuts keep a beginning of one order, so each is a *search in that order*: for the k-th
token, for the token where a share of the mass is reached, and at last for the one that is drawn.

    best                                                            worst
    |  mass of the tokens before  | searched token |  ...           a digit of its key is found in each pass

A search goes digit by digit over the bits of `best - logit`, whose order is that of the tokens. So that it does not
read the vocabulary eight times, the tokens that can be kept are first copied together, if they are few enough.
One program serves one row, whatever the others are: a row's choice does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Tokens that a program looks at together."""

CAPACITY = 16384
"""Most tokens of a row that are copied together; a row that may keep more is searched where it lies, more slowly."""

NUM_WARPS = 8
MAX_REGISTERS = 128
"""Of a thread: two programs fit on a multiprocessor. Left to itself, ptxas spills a few to make room for a third."""


@triton.jit
def scaled_weights(source, first, count, best, temperature, BLOCK: tl.constexpr):
    """`(logit - best) / temperature` of a block, and its exponential: at most 1, 0 beyond the end."""
    place = first + tl.arange(0, BLOCK)
    logit = tl.load(source + place, mask=place < count, other=float("-inf"))
    scaled = tl.math.div_rn(logit - best, temperature)
    return scaled, tl.exp(scaled)


@triton.jit
def key_of(scaled):
    """Integers that grow from the best token (0) to the worst: the bits of a number that is not positive."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def search(source, count, best, temperature, by_rank, rank, mass, BLOCK: tl.constexpr):
    """The token before which, best first, tokens of `mass` stand; or `rank` tokens, where `by_rank`.

    Returns its key, how many of the tokens with this key stand before it, and the mass up to it, itself included.
    """
    digits = tl.arange(0, 16)
    prefix = tl.full([], 0, tl.int32)
    tokens_before = tl.full([], 0, tl.int32)
    mass_before = tl.full([], 0.0, tl.float64)
    num_equal = tl.full([], 1, tl.int32)
    for level in range(8):
        shift = 28 - 4 * level
        num_tokens = tl.zeros([16], tl.int32)
        sums = tl.zeros([16], tl.float64)
        for first in range(0, count, BLOCK):
            scaled, weight = scaled_weights(source, first, count, best, temperature, BLOCK)
            until_digit = key_of(scaled) >> shift
            is_open = ((until_digit >> 4) == prefix) & (first + tl.arange(0, BLOCK) < count)
            has_digit = is_open[:, None] & ((until_digit & 15)[:, None] == digits[None, :])
            num_tokens += tl.sum(has_digit.to(tl.int32), 0)
            sums += tl.sum(tl.where(has_digit, weight[:, None], 0.0), 0).to(tl.float64)
        tokens_until, mass_until = tokens_before + tl.cumsum(num_tokens, 0), mass_before + tl.cumsum(sums, 0)
        is_behind = tl.where(by_rank, tokens_until > rank, mass_until > mass) & (num_tokens > 0)
        digit = tl.min(tl.where(is_behind, digits, 16), 0)
        # Rounding may put the target behind the last token: then it is the last.
        digit = tl.where(digit == 16, tl.max(tl.where(num_tokens > 0, digits, 0), 0), digit)
        tokens_before += tl.sum(tl.where(digits < digit, num_tokens, 0), 0)
        mass_before += tl.sum(tl.where(digits < digit, sums, 0.0), 0)
        num_equal = tl.sum(tl.where(digits == digit, num_tokens, 0), 0)
        prefix = prefix * 16 + digit
    weight = tl.exp(-prefix.to(tl.float32, bitcast=True)).to(tl.float64)
    by_mass = (mass - mass_before) / tl.where(weight > 0, weight, 1.0)
    by_mass = tl.minimum(tl.maximum(by_mass, 0.0), num_equal.to(tl.float64)).to(tl.int32)
    equal_before = tl.minimum(tl.where(by_rank, rank - tokens_before, by_mass), num_equal - 1)
    return prefix, equal_before, mass_before + (equal_before + 1).to(tl.float64) * weight


@triton.jit
def best_token(logits, vocab_size, BLOCK: tl.constexpr):
    """The largest logit, the first token that has it, and whether all are numbers and one is finite."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], 0, tl.int32)
    num_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        logit = tl.load(logits + first + lane, mask=first + lane < vocab_size, other=float("-inf"))
        num_nan += (logit != logit).to(tl.int32)  # noqa: PLR0124
        token = tl.where(logit > best, first + lane, token)
        best = tl.where(logit > best, logit, best)
    top = tl.max(best, 0)
    is_finite = (tl.sum(num_nan, 0) == 0) & (top > float("-inf")) & (top < float("inf"))
    return top, tl.min(tl.where(best == top, token, vocab_size - 1), 0), is_finite


@triton.jit
def draw_in_order(logits, vocab_size, best, temperature, min_p, uniform, BLOCK: tl.constexpr):
    """The token at the share `uniform` of all mass, in the vocabulary's order."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab_size, BLOCK):
        _scaled, weight = scaled_weights(logits, first, vocab_size, best, temperature, BLOCK)
        total += tl.sum(tl.where(weight >= min_p, weight, 0.0).to(tl.float64), 0)
    target = uniform * total
    # The block that is hit; the last one with any mass, where rounding puts the target behind everything.
    sum_before = tl.full([], 0.0, tl.float64)
    hit_before = tl.full([], 0.0, tl.float64)
    hit = 0
    is_open = total > 0
    for first in range(0, vocab_size, BLOCK):
        _scaled, weight = scaled_weights(logits, first, vocab_size, best, temperature, BLOCK)
        mass = tl.sum(tl.where(weight >= min_p, weight, 0.0).to(tl.float64), 0)
        is_hit = is_open & (mass > 0)
        hit = tl.where(is_hit, first, hit)
        hit_before = tl.where(is_hit, sum_before, hit_before)
        sum_before += mass
        is_open = is_open & (sum_before <= target)
    _scaled, weight = scaled_weights(logits, hit, vocab_size, best, temperature, BLOCK)
    weight = tl.where(weight >= min_p, weight, 0.0)
    lane = tl.arange(0, BLOCK)
    is_above = hit_before + tl.cumsum(weight.to(tl.float64), 0) > target
    inside = tl.min(tl.where(is_above & (weight > 0), lane, BLOCK), 0)
    return hit + tl.where(inside == BLOCK, tl.max(tl.where(weight > 0, lane, 0), 0), inside)


@triton.jit
def gather_kept(logits, values, ids, vocab_size, best, temperature, top_k, top_p, min_p,
                BLOCK: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """Copy the tokens that can be kept to `values` and `ids`, in their order.

    Returns how many there are, or 0 where they are too many; the mass of all tokens; that of those min-p keeps.
    """
    lane = tl.arange(0, BLOCK)
    step = tl.arange(0, 8) + 1
    depth = 0.375 * (step * step).to(tl.float32)  # how far below the best: 0.4, 1.5, 3.4, 6, ... 24
    tokens = tl.zeros([8], tl.int32)
    mass = tl.zeros([8], tl.float64)
    total = tl.full([], 0.0, tl.float64)
    probable = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab_size, BLOCK):
        scaled, weight = scaled_weights(logits, first, vocab_size, best, temperature, BLOCK)
        is_above = -scaled[:, None] <= depth[None, :]
        tokens += tl.sum(is_above.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_above, weight[:, None], 0.0), 0).to(tl.float64)
        total += tl.sum(weight, 0).to(tl.float64)
        probable += tl.sum(tl.where(weight >= min_p, weight, 0.0), 0).to(tl.float64)
    # A top-k needs its k tokens; without one the nucleus alone decides. The margin is for sums that round otherwise.
    holds_all = (tokens >= top_k) | ((top_k >= vocab_size) & (mass >= total * top_p * 1.00001))
    enough = tl.min(tl.where(holds_all & (tokens <= CAPACITY), depth, float("inf")), 0)
    count = 0
    if enough < float("inf"):
        for first in range(0, vocab_size, BLOCK):
            scaled, _weight = scaled_weights(logits, first, vocab_size, best, temperature, BLOCK)
            is_kept = -scaled <= enough
            at = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            logit = tl.load(logits + first + lane, mask=first + lane < vocab_size, other=float("-inf"))
            tl.store(values + at, logit, mask=is_kept)
            tl.store(ids + at, first + lane, mask=is_kept)
            count += tl.sum(is_kept.to(tl.int32), 0)
        tl.debug_barrier()  # the copies are read below by other threads than those that wrote them
    return count, total, probable


@triton.jit
def token_at(source, ids, is_copy, count, best, temperature, key, equal_before, BLOCK: tl.constexpr):
    """The token of this key that has `equal_before` others of the key before it."""
    token = 0
    seen = 0
    for first in range(0, count, BLOCK):
        scaled, _weight = scaled_weights(source, first, count, best, temperature, BLOCK)
        place = first + tl.arange(0, BLOCK)
        is_equal = (key_of(scaled) == key) & (place < count)
        is_it = is_equal & (seen + tl.cumsum(is_equal.to(tl.int32), 0) - 1 == equal_before)
        copied = tl.load(ids + place, mask=is_it & is_copy, other=0)
        token += tl.sum(tl.where(is_it, tl.where(is_copy, copied, place), 0), 0)
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return token


@triton.jit
def draw_best_first(source, ids, is_copy, count, vocab_size, best, temperature, top_k, top_p, uniform, total, probable,
                    BLOCK: tl.constexpr):  # fmt: skip
    """The token at the share `uniform` of the mass that the cuts leave, best first."""
    kept = total
    key = 0
    equal_before = 0
    for stage in range(3):  # the k-th token, the end of the nucleus, the draw
        is_draw = stage == 2
        if is_draw | ((stage == 0) & (top_k < vocab_size)) | ((stage == 1) & (top_p < 1.0)):
            kept = tl.where(is_draw, tl.minimum(kept, probable), kept)
            mass = kept * tl.where(is_draw, uniform, top_p)
            key, equal_before, until = search(source, count, best, temperature, stage == 0, top_k - 1, mass, BLOCK)
            kept = tl.minimum(kept, until)
    return token_at(source, ids, is_copy, count, best, temperature, key, equal_before, BLOCK)


@triton.jit
def sample_kernel(
    logits, row_stride, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, is_finite, values, ids, vocab_size,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64), tl.load(min_ps + row)
    uniform = tl.load(uniforms + row)
    best, token, has_choice = best_token(source, vocab_size, BLOCK)
    tl.store(is_finite + row, has_choice.to(tl.int8))
    if has_choice & (temperature > 0) & (top_k != 1):
        if (top_k == -1) & (top_p >= 1.0):
            token = draw_in_order(source, vocab_size, best, temperature, min_p, uniform, BLOCK)
        else:
            limit = tl.where(top_k == -1, vocab_size, tl.minimum(top_k, vocab_size))
            own_values, own_ids = values + row.to(tl.int64) * CAPACITY, ids + row.to(tl.int64) * CAPACITY
            count, total, probable = gather_kept(
                source, own_values, own_ids, vocab_size, best, temperature, limit, top_p, min_p, BLOCK, CAPACITY
            )
            is_copy = count > 0
            kept_tokens = source
            if is_copy:
                kept_tokens = own_values
            else:
                count = vocab_size
            token = draw_best_first(
                kept_tokens, own_ids, is_copy, count, vocab_size, best, temperature, limit, top_p, uniform, total,
                probable, BLOCK,
            )  # fmt: skip
    tl.store(tokens + row, token)


@triton.jit
def normaliser_kernel(logits, row_stride, out, vocab_size, BLOCK: tl.constexpr):
    """The logarithm of the sum of a row's exponentials; NaN where the row is not numbers."""
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    best, _token, has_choice = best_token(source, vocab_size, BLOCK)
    total = tl.full([], 0.0, tl.float64)
    if has_choice:
        for first in range(0, vocab_size, BLOCK):
            _scaled, weight = scaled_weights(source, first, vocab_size, best, 1.0, BLOCK)
            total += tl.sum(weight, 0).to(tl.float64)
    value = best + tl.log(total.to(tl.float32))
    tl.store(out + row, tl.where(has_choice, value, float("nan")))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    capacity: int = CAPACITY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, int64 [rows], and whether the row's logits were numbers, bool [rows].

    Args:
        logits: float32 [rows, vocab_size], rows contiguous.
        temperature, top_p, min_p: float32 [rows]; top_k: int32 [rows], -1 is all; uniform: float64 [rows], in [0, 1).
        capacity: see `CAPACITY`.
    """
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    is_finite = torch.empty(rows, dtype=torch.int8, device=logits.device)
    values = torch.empty(rows, capacity, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, capacity, dtype=torch.int32, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, logits.stride(0), temperature, top_k, top_p, min_p, uniform, tokens, is_finite, values, ids,
            vocab_size, BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)), CAPACITY=capacity, num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return tokens.long(), is_finite.bool()


def log_normaliser(logits: torch.Tensor) -> torch.Tensor:
    """`logsumexp` of each row of `logits`, float32 [rows, vocab_size] -> [rows]: what a logprob is a logit less of."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        normaliser_kernel[(rows,)](logits, logits.stride(0), out, vocab_size, BLOCK=block, num_warps=NUM_WARPS)
    return out
