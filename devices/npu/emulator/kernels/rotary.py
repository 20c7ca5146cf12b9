"""Rotary position embedding: the general operator, and the fused one that turns query and key in place."""

from __future__ import annotations

import torch

from devices.npu.emulator.kernels.norm import check_floats
from devices.npu.emulator.rules import DOCS, require, strictness


def rotary_mul(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str, rotate: torch.Tensor | None
) -> torch.Tensor:
    """`r1 * input + r2 * turned(input)`; r1 = cos, r2 = sin, 4 dimensions that broadcast."""
    operator = "npu_rotary_mul"
    check_floats(operator, input, r1, r2)
    if strictness().shapes:
        _check_rotary_mul(operator, input, r1, r2, rotary_mode)
    wide = input.float()
    turned = wide @ rotate.float() if rotate is not None else _turn(wide, rotary_mode)
    return (r1.float() * wide + r2.float() * turned).to(input.dtype)


def _check_rotary_mul(operator: str, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, mode: str) -> None:
    require(mode in ("half", "interleave"), "rotary-mode", operator, f"rotary_mode={mode!r} ({DOCS})")
    require(
        x.dim() == r1.dim() == r2.dim() == 4, "shapes", operator, f"operands need 4 dimensions, not {x.dim()} ({DOCS})"
    )
    require(
        x.shape[3] % 2 == 0 and x.shape[3] < 896,
        "head-size",
        operator,
        f"head size {x.shape[3]}: it must be even and below 896 ({DOCS})",
    )
    require(
        r1.shape == r2.shape and all(mine in (1, whole) for mine, whole in zip(r1.shape, x.shape, strict=True)),
        "shapes",
        operator,
        f"r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} do not broadcast over {tuple(x.shape)} ({DOCS})",
    )
    # Of B, S, N in any layout, the two that are not the sequence stay below 1000; the longest may be the sequence.
    require(
        sorted(x.shape[:3])[1] < 1000,
        "shapes",
        operator,
        f"{tuple(x.shape)}: batch and heads must be below 1000 each; give the tokens as the sequence ({DOCS})",
    )


def apply_rotary_pos_emb(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, rotary_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn query and key **in place** (the schema does not say so, the operator's documentation does) and return them.

    BSND or TND, one cos/sin for all heads; A2 and A3 have mode "half" and head sizes 64 and 128 only.
    """
    operator = "npu_apply_rotary_pos_emb"
    check_floats(operator, query, key, cos, sin)
    if strictness().shapes:
        dims = {"BSND": 4, "TND": 3}.get(layout)
        require(dims is not None, "layout", operator, f"layout={layout!r}; A2 and A3 have BSND and TND ({DOCS})")
        require(
            rotary_mode == "half",
            "rotary-mode",
            operator,
            f"rotary_mode={rotary_mode!r}; A2 and A3 have 'half' ({DOCS})",
        )
        for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
            require(
                tensor.dim() == dims,
                "shapes",
                operator,
                f"{name} has {tensor.dim()} dimensions, {layout} {dims} ({DOCS})",
            )
            require(tensor.numel() > 0, "shapes", operator, f"{name} is empty ({DOCS})")
            require(
                tensor.shape[-1] in (64, 128),
                "head-size",
                operator,
                f"{name} has head size {tensor.shape[-1]}; A2 and A3 have 64 and 128 ({DOCS})",
            )
            require(
                tensor.shape[:-2] == query.shape[:-2] and tensor.shape[-1] == query.shape[-1],
                "shapes",
                operator,
                f"{name} {tuple(tensor.shape)} does not fit query {tuple(query.shape)} ({DOCS})",
            )
        require(cos.shape[-2] == sin.shape[-2] == 1, "shapes", operator, f"cos and sin have one head ({DOCS})")
    for tensor in (query, key):
        wide = tensor.float()
        tensor.copy_(cos.float() * wide + sin.float() * _turn(wide, "half"))
    return query, key


def _turn(x: torch.Tensor, mode: str) -> torch.Tensor:
    """A quarter turn of every pair: (i, i + D/2) for "half", (2i, 2i + 1) for "interleave"."""
    if mode == "half":
        low, high = x.chunk(2, dim=-1)
        return torch.cat((-high, low), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
