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
    slots.copy_(token_slots(tables, rows, starts, token_starts, page_size, len(slots)))


def token_slots(
    tables: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    token_starts: torch.Tensor,
    page_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """The slots alone, int32 [num_tokens]; nothing waits for the device.

    Args:
        token_starts: ends with `num_tokens`.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    entry = torch.searchsorted(token_starts[1:], token, right=True)
    position = token - token_starts[entry] + starts[entry]
    number = position // page_size
    page = tables[rows[entry].long(), number.long()]
    return (page * page_size + position - number * page_size).to(torch.int32)
