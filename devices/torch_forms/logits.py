"""What happens to logits before a token is chosen: penalties, biases, then what a grammar allows."""

from __future__ import annotations

import numpy as np
import torch

from devices.sampling import AllowedTokens, LogitEdits


def changed(logits: torch.Tensor, edits: LogitEdits | None, allowed: AllowedTokens | None) -> torch.Tensor:
    """Both of them; the very `logits` when there is neither."""
    logits = logits if edits is None else edited(logits, edits)
    return logits if allowed is None else masked(logits, allowed)


def edited(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Penalties, then biases; a new tensor like `logits`, float32 [rows, vocab_size].

    repetition: divides the logit of a token seen in prompt or output, multiplies it when it is negative
    (CTRL, arXiv:1909.05858). presence, frequency: subtracted once, or for each time, for tokens of the output.
    """
    logits = logits.clone()
    device = logits.device
    if len(edits.row):
        row, token_id = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (edits.row, edits.token_id))
        count = torch.from_numpy(edits.count).to(device)
        repetition, presence, frequency = (
            torch.from_numpy(column).to(device)[row] for column in (edits.repetition, edits.presence, edits.frequency)
        )
        seen = logits[row, token_id]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        logits[row, token_id] = seen - presence * (count > 0) - frequency * count
    if len(edits.bias):
        at = [torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (edits.bias_row, edits.bias_token_id)]
        logits.index_put_(tuple(at), torch.from_numpy(edits.bias).to(device), accumulate=True)
    return logits


def masked(logits: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """-inf for every token that a row may not have; a new tensor like `logits`, float32 [rows, vocab_size].

    A row whose logits are not numbers stays so, also where a forbidden token is the only bad one.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    row = torch.from_numpy(allowed.row.astype(np.int64)).to(device)
    words = torch.from_numpy(allowed.words).to(device)
    bit = torch.arange(32, dtype=torch.int32, device=device)
    is_allowed = ((words[:, :, None] >> bit) & 1).flatten(1)[:, :vocab_size] == 1
    own = logits[row]
    is_number = torch.isfinite(own.amax(-1, keepdim=True))
    kept = torch.where(is_allowed, own, -torch.inf)
    logits = logits.clone()
    logits[row] = torch.where(is_number, kept, torch.nan)
    return logits
