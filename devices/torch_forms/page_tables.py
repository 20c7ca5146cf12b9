"""The torch form of the page-table kernel."""

from __future__ import annotations

import torch


def update_tables(
    tables: torch.Tensor,
    rows: torch.Tensor,
    change_starts: torch.Tensor,
    change_at: torch.Tensor,
    change_page: torch.Tensor,
    starts: torch.Tensor,
    token_starts: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
) -> None:
    """See `devices.cuda.kernels.page_tables.update_tables`."""
    num_changes = change_starts.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), num_changes)
    change = torch.arange(len(owner), device=rows.device) + change_starts[0]
    place = (change_at - change_starts[:-1])[owner] + change
    tables[rows.long()[owner], place] = change_page[change]
    num_new = token_starts.diff().long()
    entry = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), num_new)
    token = torch.arange(len(entry), device=rows.device) + token_starts[0]
    position = (starts - token_starts[:-1])[entry] + token
    page = tables[rows.long()[entry], (position // page_size).long()]
    slots[token.long()] = (page * page_size + position % page_size).to(slots.dtype)
