"""Changes logits before a token is chosen: penalties, biases, and the tokens that a grammar forbids. One launch.

    program   (row, span of the vocabulary)
    |  copy the span, what a grammar forbids as -inf  |  penalties, token by token  |  biases, token by token  |

The order of the result is penalties, biases, grammar (`engine.sampling.logits`); the grammar may come first here, since
no penalty and no bias brings a token back from -inf. A forbidden logit that is NaN or +inf becomes NaN, so that its row
is still seen as one whose logits are not numbers. A program touches its own span only: there is nothing to race for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from devices.cuda.arguments import BadKernelArgument, check_int32

BLOCK = 1024
"""Tokens that a program looks at together."""

SPAN = 16384
"""Tokens of a program: a vocabulary of 152k is ten of them, so few rows still fill a GPU."""


@triton.jit
def edit_kernel(
    logits, row_stride, out, out_stride, vocab_size, seen_starts, seen_tokens, counts, repetitions, presences,
    frequencies, bias_starts, bias_tokens, biases, mask_rows, words, num_words,
    PENALISES: tl.constexpr, BIASES: tl.constexpr, MASKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    low = tl.program_id(1) * SPAN
    high = tl.minimum(low + SPAN, vocab_size)
    source, target = logits + row.to(tl.int64) * row_stride, out + row.to(tl.int64) * out_stride
    lane = tl.arange(0, BLOCK)
    mask_row = tl.full([], -1, tl.int32)
    if MASKS:
        mask_row = tl.load(mask_rows + row)
    for first in range(low, high, BLOCK):
        token = first + lane
        logit = tl.load(source + token, mask=token < high, other=0.0)
        if MASKS:
            is_masked = (token < high) & (mask_row >= 0)
            word = tl.load(words + mask_row.to(tl.int64) * num_words + (token >> 5), mask=is_masked, other=-1)
            is_number = logit < float("inf")  # NaN is not
            forbidden = tl.where(is_number, float("-inf"), float("nan"))
            logit = tl.where(((word >> (token & 31)) & 1) == 1, logit, forbidden)
        tl.store(target + token, logit, mask=token < high)
    if PENALISES:
        tl.debug_barrier()  # single tokens are changed by other threads than those that copied them
        start, end = tl.load(seen_starts + row), tl.load(seen_starts + row + 1)
        repetition, presence, frequency = (
            tl.load(repetitions + row), tl.load(presences + row), tl.load(frequencies + row)
        )  # fmt: skip
        for first in range(start, end, BLOCK):
            token = tl.load(seen_tokens + first + lane, mask=first + lane < end, other=-1)
            count = tl.load(counts + first + lane, mask=first + lane < end, other=0)
            is_own = (token >= low) & (token < high)
            logit = tl.load(target + token, mask=is_own, other=0.0)
            logit = tl.where(logit > 0, tl.math.div_rn(logit, repetition), logit * repetition)
            logit = logit - tl.where(count > 0, presence, 0.0) - frequency * count.to(tl.float32)
            tl.store(target + token, logit, mask=is_own)
    if BIASES:
        tl.debug_barrier()
        start, end = tl.load(bias_starts + row), tl.load(bias_starts + row + 1)
        for first in range(start, end, BLOCK):
            token = tl.load(bias_tokens + first + lane, mask=first + lane < end, other=-1)
            bias = tl.load(biases + first + lane, mask=first + lane < end, other=0.0)
            is_own = (token >= low) & (token < high)
            logit = tl.load(target + token, mask=is_own, other=0.0)
            tl.store(target + token, logit + bias, mask=is_own)


class Penalties(NamedTuple):
    """Tokens that were there before, those of row `i` in `[starts[i], starts[i + 1])`, none twice in a row.

    starts: int32 [rows + 1]; token_ids, counts: int32 [seen]; the others: float32 [rows].
    """

    starts: torch.Tensor
    token_ids: torch.Tensor
    counts: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class Biases(NamedTuple):
    """Numbers to add, those of row `i` in `[starts[i], starts[i + 1])`, no token twice in a row; -inf forbids it.

    starts: int32 [rows + 1]; token_ids: int32 [biases]; values: float32 [biases].
    """

    starts: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


class Masks(NamedTuple):
    """Allowed tokens: bit `i % 32` of word `i // 32`.

    rows: of each row its place in `words` or -1, int32 [rows]; words: int32 [masked, words].
    """

    rows: torch.Tensor
    words: torch.Tensor


def edit_logits(
    logits: torch.Tensor, penalties: Penalties | None, biases: Biases | None, masks: Masks | None, span: int = SPAN
) -> torch.Tensor:
    """A changed copy of `logits`, float32 [rows, vocab_size]; rows contiguous, they start at multiples of 64 bytes.

    Raises BadKernelArgument: indices that are not int32, a mask of too few words.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, vocab_size + -vocab_size % 16, dtype=torch.float32, device=logits.device)[:, :vocab_size]
    seen_starts, seen, counts, repetition, presence, frequency = penalties or (logits,) * 6
    bias_starts, biased, values = biases or (logits,) * 3
    mask_rows, words = masks or (logits, logits)
    if penalties is not None:
        check_int32(seen_starts, seen, counts)
    if biases is not None:
        check_int32(bias_starts, biased)
    if masks is not None:
        check_int32(mask_rows, words)
        if 32 * words.shape[1] < vocab_size:
            raise BadKernelArgument(f"{words.shape[1]} words of 32 tokens do not cover a vocabulary of {vocab_size}")
    if rows:
        edit_kernel[(rows, triton.cdiv(vocab_size, span))](
            logits, logits.stride(0), out, out.stride(0), vocab_size, seen_starts, seen, counts, repetition, presence,
            frequency, bias_starts, biased, values, mask_rows, words, 0 if masks is None else words.shape[1],
            PENALISES=penalties is not None, BIASES=biases is not None, MASKS=masks is not None,
            SPAN=span, BLOCK=min(BLOCK, span), num_warps=4,
            enable_fp_fusion=False,  # each operation is rounded, as in the plain form: a draw may hang on it
        )  # fmt: skip
    return out
