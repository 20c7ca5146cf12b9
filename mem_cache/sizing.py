"""How many pages and rows a memory budget buys, and how wide a row is. Pure arithmetic, done once at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from devices.pages import ceil_page, floor_page, page_count

DEFAULT_MAX_RUNNING = 256
"""Rows when nobody says; more would cost host time for work that no CPU or single device finishes."""


SPARE_FRACTION = 0.05
"""Of a device's memory, what stays free whoever else uses the device: the results of a step need some of it."""


class DoesNotFit(ValueError):
    """The budget does not hold one useful request; the text says what to change."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Sizes of the pools, fixed for the life of the engine.

    Attributes:
        num_pages: pages that can be handed out (the padding page comes on top).
        num_rows: requests that can hold KV at once.
        row_width: tokens a row can hold, whole pages.
        page_bytes: bytes of one page over the layers that read all tokens (over all, when no family is windowed); 0
            when every layer has a window: then a full page holds nothing and only says where a row's tokens are.
        num_window_pages, window_page_bytes: of the window family; 0 when there is none.
    """

    num_pages: int
    num_rows: int
    row_width: int
    page_bytes: int
    num_window_pages: int = 0
    window_page_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all pages, the padding pages not counted."""
        return self.num_pages * self.page_bytes + self.num_window_pages * self.window_page_bytes


def row_width(context_len: int, max_reserve: int, page_size: int) -> int:
    """Tokens a row must hold: the context and whatever a step may reserve behind it, whole pages."""
    return ceil_page(context_len + max_reserve, page_size)


def attention_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, kv_itemsize: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * kv_itemsize


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """Layers with a sliding window, whose KV has a page family of its own.

    Attributes:
        token_bytes: of one token's keys and values over these layers.
        window: tokens that the widest of them reads.
        chunk_tokens: most prompt tokens that a step writes; None takes prompts whole.
    """

    token_bytes: int
    window: int
    chunk_tokens: int | None

    def pages_per_row(self, width: int, page_size: int) -> int:
        """Window pages that one row can ever hold or keep from eviction.

        One window in the tree and one of its own, each begun inside a page, and the tokens of two steps in flight.
        """
        whole = page_count(width, page_size)
        if self.chunk_tokens is None:
            return whole
        return min(whole, 2 * page_count(self.window, page_size) + 2 * page_count(self.chunk_tokens, page_size) + 4)


def kv_budget(total_bytes: int, available_bytes: int, fraction: float, weights_bytes: int) -> int:
    """Memory for KV, which may be negative: what the engine may take of the device, and of that what the weights left.

    Args:
        total_bytes, available_bytes: of the device, before the weights were loaded.
        fraction: of the whole device; a part of it that somebody else holds already is not there to be taken.
        weights_bytes: of the model.
    """
    unclaimed = available_bytes - int(total_bytes * SPARE_FRACTION)
    return min(int(total_bytes * fraction), unclaimed) - weights_bytes


def size_pools(
    *,
    budget_bytes: int,
    token_bytes: int,
    page_size: int,
    context_len: int,
    max_reserve: int = 0,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
    windowed: WindowLayers | None = None,
) -> PoolSize:
    """Divide a budget.

    Args:
        budget_bytes: memory for KV.
        token_bytes: of one token, over the layers that `windowed` does not count.
        max_total_tokens: upper bound of tokens; whole pages of it are used.
        windowed: layers whose pool is as small as it can be without ever being the scarcer one: no request waits,
            and none is retracted, because of it.
    Raises:
        DoesNotFit: not even one page, or no row, fits.
    """
    width = row_width(context_len, max_reserve, page_size)
    page_bytes, window_bytes = token_bytes * page_size, 0
    most_rows, most_windows = max_running_requests or DEFAULT_MAX_RUNNING, 0
    if windowed is not None:
        window_bytes = windowed.token_bytes * page_size
        most_windows = most_rows * windowed.pages_per_row(width, page_size)
    budget_bytes -= page_bytes + window_bytes  # the padding pages cost memory as well
    num_pages = budget_bytes // (page_bytes + window_bytes)
    if page_bytes and num_pages >= most_windows > 0:
        num_pages = (budget_bytes - most_windows * window_bytes) // page_bytes
    tokens = num_pages * page_size
    if max_total_tokens is not None:
        tokens = min(tokens, floor_page(max_total_tokens, page_size))
    num_pages = page_count(tokens, page_size)
    if num_pages < 1:
        each = token_bytes + (0 if windowed is None else windowed.token_bytes)
        raise DoesNotFit(
            f"{budget_bytes + page_bytes + window_bytes} bytes and max_total_tokens={max_total_tokens} buy "
            f"{max(0, tokens)} tokens of KV at {each} bytes each beside the padding page, less than one page of "
            f"{page_size}; raise --mem-fraction-static or --max-total-tokens, or use a smaller --page-size"
        )
    num_rows = min(most_rows, num_pages)
    if windowed is None:
        return PoolSize(num_pages, num_rows, width, page_bytes)
    if not page_bytes:
        # All memory is the windows'. Where no row can lack one of theirs, each may be as long as it is wide.
        num_full = max(num_pages, num_rows * page_count(width, page_size)) if num_pages >= most_windows else num_pages
        return PoolSize(num_full, num_rows, width, 0, num_pages, window_bytes)
    most_windows = num_rows * windowed.pages_per_row(width, page_size)
    return PoolSize(num_pages, num_rows, width, page_bytes, min(num_pages, most_windows), window_bytes)
