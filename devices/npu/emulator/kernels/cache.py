"""Writes into paged KV and other tables, and the gather out of it.

Hardware checks no slot, block id or index: a wrong one writes into somebody else's memory and nobody says a word.
Here it is refused.
"""

from __future__ import annotations

import torch

from devices.npu.emulator.rules import DOCS, require, strictness

ATB_DOCS = "torch_npu 2.13 ATB docs"
SCATTER_DTYPES = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
KV_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
SILENT = "hardware checks nothing and silently corrupts memory"


def check_unique(operator: str, slots: torch.Tensor, what: str, source: str) -> None:
    """No value twice."""
    if strictness().duplicates and slots.numel() > 1:
        ordered = slots.flatten().sort().values
        require(
            bool((ordered[1:] != ordered[:-1]).all()),
            "duplicates",
            operator,
            f"{what} holds a value twice; which write wins is not defined ({source})",
        )


def check_range(operator: str, values: torch.Tensor, bound: int, what: str, source: str, rule: str = "slots") -> None:
    """Every value in [0, bound)."""
    if strictness().bounds and values.numel():
        low, high = int(values.min()), int(values.max())
        require(
            low >= 0 and high < bound,
            rule,
            operator,
            f"{what} spans [{low}, {high}], allowed is [0, {bound}); {SILENT} ({source})",
        )


def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """`input[indices[i]] = updates[i]`; the last dimension of `indices` indexes the first dimensions of `input`."""
    operator = "npu_scatter_nd_update_"
    switches = strictness()
    if switches.dtypes:
        require(
            input.dtype in SCATTER_DTYPES,
            "scatter-dtype",
            operator,
            f"data is {input.dtype}; A2, A3 have float32, float16, bool, bfloat16, int64, int8 ({DOCS}): keep tables "
            "that it writes in int64",
        )
        require(
            updates.dtype is input.dtype,
            "dtypes",
            operator,
            f"updates are {updates.dtype}, data {input.dtype} ({DOCS})",
        )
        require(
            indices.dtype in (torch.int32, torch.int64), "dtypes", operator, f"indices are {indices.dtype} ({DOCS})"
        )
    depth = indices.shape[-1]
    if switches.shapes:
        wanted = (*indices.shape[:-1], *input.shape[depth:])
        require(
            indices.dim() >= 2 and depth <= input.dim() and tuple(updates.shape) == wanted,
            "shapes",
            operator,
            f"updates are {tuple(updates.shape)}; indices {tuple(indices.shape)} (2 dimensions or more) into "
            f"{tuple(input.shape)} want {wanted} ({DOCS})",
        )
    index = indices.long()
    columns = [index[..., level] for level in range(depth)]
    for level, column in enumerate(columns):
        check_range(operator, column, input.shape[level], f"index {level}", DOCS, "indices")
    if switches.duplicates:
        flat = columns[0]
        for level, column in enumerate(columns[1:], 1):
            flat = flat * input.shape[level] + column
        check_unique(operator, flat, "indices", DOCS)
    input.index_put_(tuple(columns), updates)
    return input


def scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """The same, into a copy."""
    return scatter_nd_update_(input.clone(), indices, updates)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Write tokens [tokens, heads, dim] into [blocks, block_size, heads, dim] at int32 slots (ATB)."""
    operator = "_npu_reshape_and_cache"
    if strictness().dtypes:
        require(
            slot_indices.dtype is torch.int32,
            "slot-dtype",
            operator,
            f"slots are {slot_indices.dtype}; ATB wants int32",
        )
    _write_tokens(operator, key, value, key_cache, value_cache, slot_indices, ATB_DOCS)


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_lens: torch.Tensor | None,
    compress_seq_offsets: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    cache_mode: str | None,
) -> None:
    """Write tokens [tokens, heads, dim] into [blocks, block_size, heads, dim] at int32 or int64 slots."""
    operator = "npu_scatter_pa_kv_cache"
    require(
        cache_mode in (None, "Norm"),
        "cache-mode",
        operator,
        f"cache_mode={cache_mode!r} is the NZ layout, also the default; give cache_mode='Norm' for plain memory "
        f"({DOCS})",
    )
    require(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None,
        "arguments",
        operator,
        "the emulator has no compressed form (4-dimensional key with compress_lens)",
    )
    if strictness().dtypes:
        require(
            slot_mapping.dtype in (torch.int32, torch.int64), "slot-dtype", operator, f"slots are {slot_mapping.dtype}"
        )
    _write_tokens(operator, key, value, key_cache, value_cache, slot_mapping, DOCS)


def _write_tokens(
    operator: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    source: str,
) -> None:
    switches = strictness()
    pairs = (("key", key, key_cache), ("value", value, value_cache))
    for name, tokens, cache in pairs:
        if switches.contiguity:
            require(
                tokens.is_contiguous() and cache.is_contiguous() and slots.is_contiguous(),
                "contiguity",
                operator,
                f"{name}, its cache and the slots must be contiguous ({source})",
            )
        if switches.dtypes:
            require(
                tokens.dtype is cache.dtype is key.dtype,
                "dtypes",
                operator,
                f"{name} is {tokens.dtype}, its cache {cache.dtype}, key {key.dtype}: they must be the same ({source})",
            )
        if switches.shapes:
            require(
                tokens.dim() == 3 and cache.dim() == 4 and cache.shape[2:] == tokens.shape[1:],
                "shapes",
                operator,
                f"{name} {tuple(tokens.shape)} does not fit a cache {tuple(cache.shape)}: [tokens, heads, dim] and "
                f"[blocks, block_size, heads, dim] ({source})",
            )
            require(
                slots.dim() == 1 and slots.shape[0] == tokens.shape[0],
                "shapes",
                operator,
                f"{slots.numel()} slots for {tokens.shape[0]} tokens ({source})",
            )
    check_range(operator, slots, key_cache.shape[0] * key_cache.shape[1], "slots", source)
    check_unique(operator, slots, "slots", source)
    index = slots.long()
    for _, tokens, cache in pairs:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, index, tokens)


def gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_offset: torch.Tensor | None,
    is_seq_lens_cumsum: bool,
) -> None:
    """Copy the rows' tokens out of [blocks, block_size, heads, dim], one row after the other, into key and value.

    `seq_lens` int32 [batch], or [batch + 1] from 0 when cumulative. A row starts at the block of its `seq_offset`.
    Source: aclnnGatherPaKvCache.
    """
    operator = "npu_gather_pa_kv_cache"
    switches = strictness()
    if switches.dtypes:
        require(
            key_cache.dtype in KV_DTYPES, "dtypes", operator, f"caches are {key_cache.dtype}: float16, bfloat16, int8"
        )
        for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens), ("seq_offset", seq_offset)):
            if tensor is not None:
                require(tensor.dtype is torch.int32, "dtypes", operator, f"{name} is {tensor.dtype}; it must be int32")
    block_size = key_cache.shape[1]
    lens = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).tolist()
    if switches.shapes:
        require(
            block_tables.dim() == 2
            and block_tables.shape[0] == len(lens)
            and key.shape[0] == value.shape[0] == sum(lens),
            "shapes",
            operator,
            f"{len(lens)} rows with {sum(lens)} tokens; tables {tuple(block_tables.shape)}, key {tuple(key.shape)}",
        )
    first = [0] * len(lens) if seq_offset is None else [offset // block_size for offset in seq_offset.tolist()]
    start = 0
    for row, (length, block) in enumerate(zip(lens, first, strict=True)):
        ids = block_tables[row, block : block + -(-length // block_size)]
        check_range(operator, ids, key_cache.shape[0], f"block ids of row {row}", "aclnnGatherPaKvCache", "block-ids")
        for cache, target in ((key_cache, key), (value_cache, value)):
            target[start : start + length] = cache[ids.long()].flatten(0, 1)[:length]
        start += length


def gather_pa_kv_cache_functional(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_offset: torch.Tensor | None,
    is_seq_lens_cumsum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, into copies of key and value."""
    key, value = key.clone(), value.clone()
    gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum)
    return key, value
