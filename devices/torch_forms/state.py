"""Recurrent layers' parts in plain torch: a causal convolution, the gated delta rule, Mamba2's scan, a token at a time.

A request's state lies in a slot; a negative slot is padding: nothing is read or written, and its result is 0. States
are changed in place. Layouts are those of `devices.cuda.kernels.state`, which says why.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def conv_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """One token a row through `silu(conv(x))`.

    Args:
        x: [rows, channels]; weight: [width, channels], the last line for the token itself; bias: [channels].
        state: [slots, width - 1, channels], the inputs before, oldest first. slots: int32 [rows].
    """
    out = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            window = torch.cat([state[slot].to(x.dtype), x[row : row + 1]])
            total = (window.float() * weight.float()).sum(0) + bias.float()
            out[row] = F.silu(total).to(x.dtype)
            state[slot] = window[1:].to(state.dtype)
    return out


def conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    is_continued: torch.Tensor,
) -> torch.Tensor:
    """Tokens `[starts[i], starts[i + 1])` of `x` [tokens, channels] belong to row `i`.

    Args:
        starts: int32 [rows + 1]; is_continued: int8 [rows], whether the row's state is that of the tokens before.
            Otherwise there are none before, whatever the state holds.
    """
    out = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            if not is_continued[row]:
                state[slot] = 0
            for token in range(int(starts[row]), int(starts[row + 1])):
                out[token] = conv_decode(x[token : token + 1], weight, bias, state, slots[row : row + 1])[0]
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
    """The gated delta rule (arXiv:2412.06464): `S <- exp(decay) S`, `S <- S + k (beta (v - S^T k))^T`, `out = S^T q`.

    Args:
        q, k: [rows, key_heads, key_dim], each made a unit vector first; v: [rows, value_heads, value_dim].
        decay, beta: [rows, value_heads]. state: float32 [slots, value_heads, key_dim, value_dim]. slots: int32 [rows].
        scale: of the unit queries.
    Returns:
        [rows, value_heads, value_dim].
    """
    group = v.shape[1] // q.shape[1]
    out = torch.zeros_like(v)
    unit_q, unit_k = (x.float() * torch.rsqrt((x.float() ** 2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            keys, queries = (x[row].repeat_interleave(group, 0) for x in (unit_k, unit_q * scale))
            faded = state[slot] * torch.exp(decay[row].float())[:, None, None]
            error = (v[row].float() - torch.einsum("hkv,hk->hv", faded, keys)) * beta[row].float()[:, None]
            state[slot] = faded + keys[:, :, None] * error[:, None, :]
            out[row] = torch.einsum("hkv,hk->hv", state[slot], queries).to(v.dtype)
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
    """A step of Mamba2 (arXiv:2405.21060): `h <- exp(a t) h + t x b^T`, `out = h c + d x`, `t = softplus(dt + bias)`.

    Args:
        x: [rows, heads, dim]; dt: [rows, heads]; a, d, dt_bias: [heads]; b, c: [rows, groups, size].
        state: float32 [slots, heads, dim, size]. slots: int32 [rows].
    """
    per_group = x.shape[1] // b.shape[1]
    out = torch.zeros_like(x)
    step = F.softplus(dt.float() + dt_bias.float())
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            into, read = (y[row].float().repeat_interleave(per_group, 0) for y in (b, c))
            faded = state[slot] * torch.exp(a.float() * step[row])[:, None, None]
            state[slot] = faded + (x[row].float() * step[row][:, None])[:, :, None] * into[:, None, :]
            result = torch.einsum("hpn,hn->hp", state[slot], read) + x[row].float() * d.float()[:, None]
            out[row] = result.to(x.dtype)
    return out
