"""Rotary position embedding: pairs of a head's elements are turned by an angle of the token (arXiv:2104.09864).

halves        0 1 2 3 | 4 5 6 7 | rest      pairs (0, 4) (1, 5) ...: Llama, Qwen
interleaved   0 1 | 2 3 | 4 5 | 6 7 | rest  pairs (0, 1) (2, 3) ...: GPT-J, GLM
              |<-   rotated     ->|<- copied ->|
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x, cos, sin, out, x_token, x_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, HEAD_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One token and HEAD_BLOCK of its heads. cos, sin: float32 [tokens, PAIRS]; x: heads of WIDTH elements."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    is_head = head < HEADS
    source, target = x + token * x_token + head * x_head, out + (token * HEADS + head) * WIDTH
    pair = tl.arange(0, PAIR_BLOCK)
    is_pair = pair < PAIRS
    c = tl.load(cos + token * PAIRS + pair, mask=is_pair, other=1.0)[None, :]
    s = tl.load(sin + token * PAIRS + pair, mask=is_pair, other=0.0)[None, :]
    if INTERLEAVED:
        element = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
        inside = is_head & (element < 2 * PAIRS)
        both = tl.load(source + element, mask=inside, other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(both, [HEAD_BLOCK, PAIR_BLOCK, 2]))
        turned = tl.reshape(tl.join(low * c - high * s, high * c + low * s), [HEAD_BLOCK, 2 * PAIR_BLOCK])
        tl.store(target + element, turned.to(out.dtype.element_ty), mask=inside)
    else:
        inside = is_head & is_pair[None, :]
        low = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + PAIRS + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair[None, :], (low * c - high * s).to(out.dtype.element_ty), mask=inside)
        tl.store(target + PAIRS + pair[None, :], (high * c + low * s).to(out.dtype.element_ty), mask=inside)
    if REST_BLOCK > 0:
        rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        inside = is_head & (rest < WIDTH)
        tl.store(target + rest, tl.load(source + rest, mask=inside), mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """The turned heads of `x` [tokens, heads, width]; elements behind the rotated ones are copied.

    Args:
        cos, sin: float32 [tokens, pairs], `2 * pairs <= width`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, width = x.shape
    pairs = cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        pair_block = triton.next_power_of_2(pairs)
        head_block = max(1, min(triton.next_power_of_2(heads), 2048 // pair_block))
        rotate_kernel[(tokens, triton.cdiv(heads, head_block))](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1),
            HEADS=heads, WIDTH=width, PAIRS=pairs, HEAD_BLOCK=head_block, PAIR_BLOCK=pair_block,
            REST_BLOCK=triton.next_power_of_2(width - 2 * pairs) if width > 2 * pairs else 0, INTERLEAVED=interleaved,
            num_warps=max(1, min(8, head_block * pair_block // 256)),
        )  # fmt: skip
    return out
