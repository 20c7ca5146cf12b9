"""How many pages and rows a memory budget buys, and how wide a row is. Pure arithmetic, done once at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from devices.pages import ceil_page, floor_page, page_count

DEFAULT_MAX_RUNNING = 256
"""Rows when nobody says; more would cost host time for work that no CPU or single device finishes."""


class DoesNotFit(ValueError):
    """The budget does not hold one useful request; the text says what to change."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Sizes of the pools, fixed for the life of the engine.

    Attributes:
        num_pages: pages that can be handed out (the padding page comes on top).
        num_rows: requests that can hold KV at once.
        row_width: tokens a row can hold, whole pages.
        page_bytes: bytes of one page over all layers.
    """

    num_pages: int
    num_rows: int
    row_width: int
    page_bytes: int


def row_width(context_len: int, max_reserve: int, page_size: int) -> int:
    """Tokens a row must hold: the context and whatever a step may reserve behind it, whole pages."""
    return ceil_page(context_len + max_reserve, page_size)


def attention_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, kv_itemsize: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * kv_itemsize


def size_pools(
    *,
    budget_bytes: int,
    token_bytes: int,
    page_size: int,
    context_len: int,
    max_reserve: int = 0,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
) -> PoolSize:
    """Divide a budget.

    Args:
        budget_bytes: memory for KV.
        max_total_tokens: upper bound of tokens; whole pages of it are used.
    Raises:
        DoesNotFit: not even one page, or no row, fits.
    """
    tokens = floor_page(budget_bytes // token_bytes, page_size) - page_size  # the padding page costs memory as well
    if max_total_tokens is not None:
        tokens = min(tokens, floor_page(max_total_tokens, page_size))
    width = row_width(context_len, max_reserve, page_size)
    num_pages = page_count(tokens, page_size)
    if num_pages < 1:
        raise DoesNotFit(
            f"{budget_bytes} bytes and max_total_tokens={max_total_tokens} buy {max(0, tokens)} tokens of KV at "
            f"{token_bytes} bytes each beside the padding page, less than one page of {page_size}; raise "
            f"--mem-fraction-static or --max-total-tokens, or use a smaller --page-size"
        )
    num_rows = min(max_running_requests or DEFAULT_MAX_RUNNING, num_pages)
    return PoolSize(num_pages, num_rows, width, token_bytes * page_size)
