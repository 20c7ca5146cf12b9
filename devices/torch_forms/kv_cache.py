"""The torch forms of the kernels that write and copy KV."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `devices.cuda.kernels.kv_cache.write_kv`."""
    page_size = k_pages.shape[2]
    is_token = slots >= 0
    kept = slots[is_token].long()
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        stored = new[is_token]
        if scale is not None:
            stored = (stored.float() * (1.0 / scale)[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        pages[kept // page_size, :, kept % page_size] = stored.to(pages.dtype)


def copy_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `devices.cuda.kernels.kv_cache.copy_pages`."""
    for pages in (k_pages, v_pages):
        pages[targets.long()] = pages[sources.long()]
