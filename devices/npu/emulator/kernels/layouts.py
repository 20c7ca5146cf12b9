"""The layouts of fused attention: how a query's axes are named, and back and forth to [batch, tokens, heads, dim]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devices.npu.emulator.rules import DOCS, ContractViolation

QUERY_DIMS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3}
_ALIASES = {"BNSD_BSND": ("BNSD", "BSND"), "TND_NTD": ("TND", "NTD"), "NTD_TND": ("NTD", "TND")}
PACKED = ("TND", "NTD")
"""Layouts without a batch axis: rows lie one behind the other, and the list of lengths is cumulative."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a call: `query` and `output`, each one of `QUERY_DIMS`."""

    query: str
    output: str

    @property
    def packed(self) -> bool:
        return self.query in PACKED


def read_layout(operator: str, name: str, query: torch.Tensor) -> Layout:
    """The layout of an `input_layout`; ContractViolation for an unknown one, or one that the query does not fit."""
    layout = Layout(*_ALIASES.get(name, (name, name)))
    if layout.query not in QUERY_DIMS:
        raise ContractViolation("layout", operator, f"input_layout={name!r} is unknown to the emulator ({DOCS})")
    if query.dim() != QUERY_DIMS[layout.query]:
        raise ContractViolation(
            "layout",
            operator,
            f"input_layout={name!r} wants a query of {QUERY_DIMS[layout.query]} dimensions, not {tuple(query.shape)} "
            f"({DOCS})",
        )
    return layout


def split_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """A view of [..., heads * dim] as [..., heads, dim]."""
    return tensor.view(*tensor.shape[:-1], num_heads, -1)


def to_bsnd(tensor: torch.Tensor, layout: str, num_heads: int) -> torch.Tensor:
    """A view [batch, tokens, heads, dim]; a packed layout is one row."""
    if layout == "BSH":
        return split_heads(tensor, num_heads)
    if layout == "BNSD":
        return tensor.transpose(1, 2)
    if layout == "TND":
        return tensor.unsqueeze(0)
    if layout == "NTD":
        return tensor.transpose(0, 1).unsqueeze(0)
    return tensor


def from_bsnd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The contiguous tensor of a layout."""
    if layout == "BSH":
        return tensor.flatten(-2).contiguous()
    if layout == "BNSD":
        return tensor.transpose(1, 2).contiguous()
    if layout == "TND":
        return tensor.squeeze(0).contiguous()
    if layout == "NTD":
        return tensor.squeeze(0).transpose(0, 1).contiguous()
    return tensor.contiguous()
