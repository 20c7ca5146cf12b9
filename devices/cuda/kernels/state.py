"""Recurrent layers' parts: a causal convolution, the gated delta rule and Mamba2's scan over states in slots.

Layouts put what threads read side by side next to each other: a convolution's state is `[slot, width - 1, channels]`
and its weight `[width, channels]`, since neighbouring threads serve neighbouring channels; states of the other two are
row-major matrices `[slot, head, key or dim, value or size]` in fp32. A negative slot is padding: the program ends.
The torch forms, with the same signatures and the formulas, are `devices.torch_forms.state`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CONV_BLOCK = 512
"""Channels of a program."""

TOKEN_BLOCK = 32
"""Tokens of a program in a convolution's prefill."""

VALUE_BLOCK = 32
"""Columns of a state that a program keeps in registers."""


@triton.jit
def conv_decode_kernel(
    x, weight, bias, state, slots, out, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    own = tl.load(x + row * channels + channel, mask=inside, other=0.0)
    total = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total += own.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + channel, mask=inside, other=0.0)
    before = state + slot.to(tl.int64) * (WIDTH - 1) * channels + channel
    for step in tl.static_range(WIDTH - 1):
        earlier = tl.load(before + step * channels, mask=inside, other=0.0)
        total += earlier.to(tl.float32) * tl.load(weight + step * channels + channel, mask=inside, other=0.0)
        if step > 0:
            tl.store(before + (step - 1) * channels, earlier, mask=inside)
    tl.store(before + (WIDTH - 2) * channels, own.to(state.dtype.element_ty), mask=inside)
    tl.store(out + row * channels + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def conv_prefill_kernel(
    x, weight, bias, state, slots, starts, is_continued, out, channels,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a row. Inputs before the row's first token are the state's, or 0. The state is only read."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    token = start + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    if (slot < 0) | (start + tl.program_id(1) * TOKENS >= end):
        return
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (token < end) & (channel < channels)
    has_state = tl.load(is_continued + row) != 0
    total = tl.zeros([TOKENS, BLOCK], tl.float32) + tl.load(bias + channel, mask=channel < channels, other=0.0)
    for step in tl.static_range(WIDTH):
        at = token + (step - (WIDTH - 1))
        old = state + (slot.to(tl.int64) * (WIDTH - 1) + (at - start + WIDTH - 1)) * channels + channel
        value = tl.load(x + at.to(tl.int64) * channels + channel, mask=inside & (at >= start), other=0.0)
        before = tl.load(old, mask=inside & (at < start) & has_state, other=0.0)
        factor = tl.load(weight + step * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        total += (value.to(tl.float32) + before.to(tl.float32)) * factor
    result = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * channels + channel, result, mask=inside)


@triton.jit
def conv_state_kernel(
    x, state, slots, starts, is_continued, channels, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The state of a row's last WIDTH - 1 inputs, some of which may be of the state before."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    if (slot < 0) | (start == end):
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    has_state = tl.load(is_continued + row) != 0
    own = state + slot.to(tl.int64) * (WIDTH - 1) * channels + channel
    for step in tl.static_range(WIDTH - 1):
        at = end - (WIDTH - 1) + step
        value = tl.load(x + at.to(tl.int64) * channels + channel, mask=inside & (at >= start), other=0.0)
        # An older input of the state stands further on in it, so it is read before it is written over.
        before = tl.load(own + (at - start + WIDTH - 1) * channels, mask=inside & (at < start) & has_state, other=0.0)
        tl.store(
            own + step * channels,
            (value.to(tl.float32) + before.to(tl.float32)).to(state.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def gated_delta_kernel(
    q, k, v, decay, beta, state, slots, out, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one head's state."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    line = tl.arange(0, KEY_DIM)
    key_head = row * KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
    key = tl.load(k + key_head * KEY_DIM + line).to(tl.float32)
    query = tl.load(q + key_head * KEY_DIM + line).to(tl.float32)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
    place = row * VALUE_HEADS + head
    value = tl.load(v + place * VALUE_DIM + column).to(tl.float32)
    own = state + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    at = own + line[:, None] * VALUE_DIM + column[None, :]
    matrix = tl.load(at) * tl.exp(tl.load(decay + place).to(tl.float32))
    error = (value - tl.sum(matrix * key[:, None], 0)) * tl.load(beta + place).to(tl.float32)
    matrix += key[:, None] * error[None, :]
    tl.store(at, matrix)
    result = tl.sum(matrix * query[:, None], 0)
    tl.store(out + place * VALUE_DIM + column, result.to(out.dtype.element_ty))


@triton.jit
def mamba2_kernel(
    x, dt, a, b, c, d, dt_bias, state, slots, out,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK lines of one head's state."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    line = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, SIZE)
    place = row * HEADS + head
    step = tl.load(dt + place).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    group = (row * GROUPS + head // (HEADS // GROUPS)) * SIZE + column
    into, read = tl.load(b + group).to(tl.float32), tl.load(c + group).to(tl.float32)
    value = tl.load(x + place * DIM + line).to(tl.float32)
    at = state + (slot.to(tl.int64) * HEADS + head) * (DIM * SIZE) + line[:, None] * SIZE + column[None, :]
    matrix = tl.load(at) * tl.exp(tl.load(a + head).to(tl.float32) * step)
    matrix += (value * step)[:, None] * into[None, :]
    tl.store(at, matrix)
    result = tl.sum(matrix * read[None, :], 1) + value * tl.load(d + head).to(tl.float32)
    tl.store(out + place * DIM + line, result.to(out.dtype.element_ty))


def conv_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """See `devices.torch_forms.state.conv_decode`."""
    rows, channels = x.shape
    out = torch.zeros_like(x)
    if rows:
        block = min(CONV_BLOCK, triton.next_power_of_2(channels))
        conv_decode_kernel[(rows, triton.cdiv(channels, block))](
            x, weight, bias, state, slots, out, channels, WIDTH=weight.shape[0], BLOCK=block, num_warps=2
        )
    return out


def conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    is_continued: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """See `devices.torch_forms.state.conv_prefill`; `longest`: most tokens of a row."""
    channels, width = x.shape[1], weight.shape[0]
    out = torch.zeros_like(x)
    if len(slots):
        block = min(64, triton.next_power_of_2(channels))
        grid = (len(slots), triton.cdiv(longest, TOKEN_BLOCK), triton.cdiv(channels, block))
        conv_prefill_kernel[grid](
            x, weight, bias, state, slots, starts, is_continued, out, channels,
            WIDTH=width, TOKENS=TOKEN_BLOCK, BLOCK=block, num_warps=4,
        )  # fmt: skip
        block = min(CONV_BLOCK, triton.next_power_of_2(channels))
        conv_state_kernel[(len(slots), triton.cdiv(channels, block))](
            x, state, slots, starts, is_continued, channels, WIDTH=width, BLOCK=block, num_warps=2
        )
    return out


def gated_delta_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `devices.torch_forms.state.gated_delta_decode`; dimensions are powers of two."""
    rows, heads, value_dim = v.shape
    out = torch.zeros_like(v)
    if rows:
        block = min(VALUE_BLOCK, value_dim)
        gated_delta_kernel[(rows, heads, value_dim // block)](
            q, k, v, decay, beta, state, slots, out, scale, KEY_HEADS=q.shape[1], VALUE_HEADS=heads,
            KEY_DIM=q.shape[2], VALUE_DIM=value_dim, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def mamba2_decode(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `devices.torch_forms.state.mamba2_decode`; dimensions are powers of two."""
    rows, heads, dim = x.shape
    out = torch.zeros_like(x)
    if rows:
        block = min(VALUE_BLOCK, dim)
        mamba2_kernel[(rows, heads, dim // block)](
            x, dt, a, b, c, d, dt_bias, state, slots, out, HEADS=heads, GROUPS=b.shape[1], DIM=dim, SIZE=b.shape[2],
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
