"""What fused inference attention asks of its arguments, rule by rule, as its documentation says.

Source of every rule, unless another is named: `npu_fused_infer_attention_score` and `_v2` in torch_npu 2.13's operator
docs. Rules of quantised, padded and MLA forms are not here: the emulator refuses those forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from devices.npu.emulator.kernels.layouts import Layout, to_bsnd
from devices.npu.emulator.rules import DOCS, require, strictness

MASK_SIZE = 2048
MAX_INT32 = 2**31 - 1
MASK_TRAP = 512
"""Keys behind this position are not hidden by a mask [1, 1, 1, S] in sparse mode 0 (vllm-ascend #15503)."""
TND_HEAD_SIZES = {(128, 128), (192, 128), (192, 192), (256, 256)}
"""(key, value) head sizes of the packed layouts; (256, 256) is what sglang's own tests use."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of either version, in one form. See the operator's documentation for each."""

    operator: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    query_lens: Sequence[int] | None
    kv_lens: Sequence[int] | None
    block_table: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout_name: str
    sparse_mode: int
    block_size: int
    sink: torch.Tensor | None
    lens_names: tuple[str, str]

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def query_len_is_one(self) -> bool:
        axis = 2 if self.layout_name.startswith("BN") else 1
        return not self.layout_name.startswith(("T", "N")) and self.query.shape[axis] == 1

    @property
    def effective_mode(self) -> int:
        """The sparse mode that the operator uses: with one query a row the mode has no effect."""
        return 0 if self.query_len_is_one else self.sparse_mode


def check_attention(call: AttentionCall, layout: Layout) -> None:
    """ContractViolation for the first rule that the call breaks."""
    switches = strictness()
    if switches.dtypes:
        _check_dtypes(call, layout)
    if switches.contiguity:
        for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value), ("mask", call.mask)):
            _require(call, tensor is None or tensor.is_contiguous(), "contiguity", f"{name} is not contiguous")
    if switches.shapes:
        _check_heads(call, layout)
    if switches.host_lists:
        _check_lens(call, layout)
    if switches.masks:
        _check_mask(call, layout)
    if call.block_table is not None:
        _check_pages(call, layout, call.block_table)


def _require(call: AttentionCall, condition: bool, rule: str, text: str) -> None:
    require(condition, rule, call.operator, f"{text} ({DOCS})")


def _check_dtypes(call: AttentionCall, layout: Layout) -> None:
    found = {call.query.dtype, call.key.dtype, call.value.dtype}
    allowed = {torch.bfloat16} if layout.packed else {torch.bfloat16, torch.float16}
    if not strictness().attention_dtypes:
        allowed |= {torch.float16, torch.float32}
    _require(
        call,
        len(found) == 1 and found <= allowed,
        "attention-dtype",
        f"query, key and value are {', '.join(sorted(map(str, found)))}; {call.layout_name} takes one of "
        f"{', '.join(sorted(map(str, allowed)))} for all",
    )
    if call.mask is not None:
        _require(
            call,
            call.mask.dtype in (torch.bool, torch.int8, torch.uint8),
            "mask-dtype",
            f"atten_mask is {call.mask.dtype}; it must be bool, int8 or uint8, 1 where a key is hidden",
        )
    if call.block_table is not None:
        _require(
            call,
            call.block_table.dtype is torch.int32,
            "table-dtype",
            f"block_table is {call.block_table.dtype}; it must be int32",
        )
    if call.sink is not None:
        _require(call, call.sink.dtype is torch.bfloat16, "sink", f"learnable_sink is {call.sink.dtype}, not bfloat16")


def _check_heads(call: AttentionCall, layout: Layout) -> None:
    heads, kv_heads = call.num_heads, call.num_kv_heads
    _require(call, 0 < heads <= 256, "heads", f"{heads} query heads; the limit is 256")
    _require(
        call,
        heads % kv_heads == 0 and heads // kv_heads <= 64,
        "gqa-ratio",
        f"{heads} query heads over {kv_heads} KV heads; the ratio must be whole and at most 64",
    )
    if layout.query == "BSH":
        _require(call, call.query.shape[2] % heads == 0, "heads", f"H={call.query.shape[2]} is not {heads} heads")
    query = to_bsnd(call.query, layout.query, heads)
    batch, _, found, dim = query.shape
    _require(call, found == heads, "heads", f"the query has {found} heads, the arguments say {heads}")
    _require(
        call, call.layout_name != "BNSD_BSND" or query.shape[1] > 1, "layout", "BNSD_BSND wants more than one query"
    )
    _require(call, batch <= 65536, "batch", f"batch {batch}; the limit is 65536")
    _require(call, dim % 16 == 0 and dim <= 512, "head-size", f"head size {dim}; it must be a multiple of 16 up to 512")
    if layout.query in ("BSH", "BSND") and query.shape[1] > 1:
        _require(
            call, heads * dim < 65535, "heads", f"N*D={heads * dim}; {layout.query} with more queries ends at 65534"
        )
    if layout.packed:
        value_dim = (
            call.value.shape[-1] if not call.paged or call.value.dim() == 4 else call.value.shape[-1] // kv_heads
        )
        _require(
            call,
            (dim, value_dim) in TND_HEAD_SIZES,
            "tnd-head-size",
            f"head sizes {(dim, value_dim)}; {call.layout_name} has {sorted(TND_HEAD_SIZES)}: use BSND or BNSD",
        )
        _require(call, query.shape[1] <= 1 << 20, "tokens", f"{query.shape[1]} tokens; {call.layout_name} ends at 1M")
        _require(
            call, call.sparse_mode in (0, 3, 4), "sparse-mode", f"sparse_mode={call.sparse_mode} with a packed query"
        )
    if call.sink is not None:
        _require(call, layout.packed, "sink", f"learnable_sink with {call.layout_name}; only TND and NTD_TND have it")
        _require(
            call, call.sink.shape == (heads,), "sink", f"learnable_sink is {tuple(call.sink.shape)}, not ({heads},)"
        )


def _check_lens(call: AttentionCall, layout: Layout) -> None:
    """Lists are long enough, not negative, and cumulative exactly where they must be."""
    query_name, kv_name = call.lens_names
    query = to_bsnd(call.query, layout.query, call.num_heads)
    batch, tokens = query.shape[:2]
    if layout.packed:
        ends = call.query_lens
        _require(call, bool(ends), "lens-missing", f"{query_name} must be given with {call.layout_name}")
        assert ends is not None
        batch = len(ends)
        _require(call, batch <= 4096, "batch", f"{batch} rows; {call.layout_name} ends at 4096")
        _require(
            call,
            all(low <= high for low, high in zip([0, *ends], ends, strict=False)) and ends[-1] == tokens,
            "cumulative-lens",
            f"{query_name}={_short(ends)} must be cumulative and end at the {tokens} tokens of the query",
        )
    elif call.query_lens is not None and tokens > 1:
        _check_list(call, query_name, call.query_lens, batch, tokens)
    if call.paged or layout.packed:
        _require(
            call, call.kv_lens is not None, "lens-missing", f"{kv_name} must be given with pages or a packed query"
        )
    if call.kv_lens is None:
        return
    if layout.packed and not call.paged:
        lens, num_keys = call.kv_lens, to_bsnd(call.key, layout.query, call.num_kv_heads).shape[1]
        _require(
            call,
            len(lens) == batch
            and all(low <= high for low, high in zip([0, *lens], lens, strict=False))
            and lens[-1] <= num_keys,
            "cumulative-lens",
            f"{kv_name}={_short(lens)} must be cumulative, one for each row, and end within {num_keys} keys",
        )
    else:
        whole = None if call.paged else to_bsnd(call.key, layout.query, call.num_kv_heads).shape[1]
        _check_list(call, kv_name, call.kv_lens, batch, whole)
    if layout.packed and call.sparse_mode == 3:
        _check_packed_causal(call)


def _check_packed_causal(call: AttentionCall) -> None:
    """Sparse mode 3 with packed rows: each has keys before its queries."""
    ends = list(call.query_lens or ())
    lens = list(call.kv_lens or ())
    if not call.paged:
        lens = [end - start for start, end in zip([0, *lens], lens, strict=False)]
    news = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    _require(
        call,
        all(new < length for new, length in zip(news, lens, strict=False)),
        "packed-causal",
        f"sparse_mode=3 with {call.layout_name} and rows of {_short(news)} queries over {_short(lens)} keys; each has "
        "fewer queries than keys there: sparse_mode=4 with open pre_tokens has the others",
    )


def _check_list(call: AttentionCall, name: str, lens: Sequence[int], batch: int, limit: int | None) -> None:
    _require(
        call,
        len(lens) >= batch or len(lens) == 1,
        "lens-count",
        f"{name} has {len(lens)} lengths for {batch} rows; it needs one for each, or exactly one (vllm-ascend #8107)",
    )
    _require(
        call,
        all(length >= 0 and (limit is None or length <= limit) for length in lens[:batch]),
        "lens-range",
        f"{name}={_short(lens)} must lie within the memory of its rows ({limit}): per row, not cumulative",
    )


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def _check_mask(call: AttentionCall, layout: Layout) -> None:
    mask, mode = call.mask, call.sparse_mode
    _require(call, mode in (0, 1, 2, 3, 4), "sparse-mode", f"sparse_mode={mode}; without MLA it is 0, 1, 2, 3 or 4")
    if call.query_len_is_one:
        window = mode == 4 and call.pre_tokens < MAX_INT32
        _require(
            call,
            not window,
            "window-ignored",
            f"pre_tokens={call.pre_tokens} with one query a row has no effect, and every key is attended to: "
            "use a packed layout, or a mask in sparse_mode 0",
        )
        if mode in (2, 3, 4):
            # The mode has no effect, so what is given is read as a mask of the caller's own.
            if mask is not None:
                _check_own_mask(call, layout, mask)
            return
    if mode in (2, 3, 4):
        _require(
            call,
            mask is not None and mask.shape[-2:] == (MASK_SIZE, MASK_SIZE) and mask.numel() == MASK_SIZE**2,
            "mask-size",
            f"sparse_mode={mode} needs the fixed {MASK_SIZE} x {MASK_SIZE} mask, not "
            f"{None if mask is None else tuple(mask.shape)}",
        )
        assert mask is not None
        square = mask.view(MASK_SIZE, MASK_SIZE)
        _require(
            call,
            bool(square[0, 1:].all())
            and not bool(square[-1].any())
            and not bool(square.diagonal().any())
            and bool(square.diagonal(1).all()),
            "mask-content",
            f"sparse_mode={mode} needs ones above the diagonal and zeros elsewhere: torch.triu(ones, diagonal=1)",
        )
        if mode == 4:
            _require(
                call,
                call.pre_tokens + call.next_tokens >= 0,
                "band",
                f"pre_tokens={call.pre_tokens} and next_tokens={call.next_tokens} leave nothing between them",
            )
        return
    _require(call, mode == 0 or mask is not None, "mask-size", "sparse_mode=1 needs the whole mask")
    if mask is not None:
        _check_own_mask(call, layout, mask)


def _check_own_mask(call: AttentionCall, layout: Layout, mask: torch.Tensor) -> None:
    """A mask of the caller's, in sparse modes 0 and 1."""
    query = to_bsnd(call.query, layout.query, call.num_heads)
    batch, tokens = query.shape[:2]
    shape, keys = tuple(mask.shape), mask.shape[-1]
    _require(
        call, not layout.packed, "mask-size", f"{call.layout_name} in sparse_mode {call.sparse_mode} takes no mask"
    )
    require(
        not (shape[:-1] == (1, 1, 1) and max(call.kv_lens or [keys]) > MASK_TRAP),
        "mask-ignored",
        call.operator,
        f"a mask [1, 1, 1, {keys}] hides nothing past key {MASK_TRAP}, without a word (vllm-ascend #15503); a packed "
        "layout with sparse_mode 4 has windows",
    )
    require(
        len(shape) > 2 or tokens > 1,
        "mask-rank",
        call.operator,
        f"a mask {shape} for one query a row is documented, and rejected with error 561002 (vllm-ascend #15503); use "
        f"[{batch}, 1, 1, {keys}]",
    )
    rows = {(1, tokens), (batch, 1, tokens), (1, 1, tokens), (tokens,)}
    padded = len(shape) > 1 and shape[-2] >= tokens and shape[-2] - tokens < 32
    _require(
        call,
        shape[:-1] in rows or (padded and (*shape[:-2], tokens) in rows),
        "mask-size",
        f"atten_mask {shape}; with {batch} rows of {tokens} queries it is [1, Q_S, KV_S], [B, 1, Q_S, KV_S], "
        "[1, 1, Q_S, KV_S], or [Q_S, KV_S] for more queries than one",
    )
    if call.block_table is not None:
        width = call.block_table.shape[1] * call.block_size
        _require(
            call,
            keys >= width,
            "mask-width",
            f"atten_mask has {keys} keys; with pages it needs block_table.shape[1] * block_size = {width}",
        )


def _check_pages(call: AttentionCall, layout: Layout, table: torch.Tensor) -> None:
    switches = strictness()
    size = call.block_size
    if switches.pages:
        if call.query_len_is_one:
            step = 32 if call.key.dtype is torch.int8 else 16
            _require(
                call, 0 < size <= 512 and size % step == 0, "page-size",
                f"block_size={size}; with one query a row it is a multiple of {step} up to 512",
            )  # fmt: skip
        else:
            _require(
                call, 128 <= size <= 512 and size % 128 == 0, "page-size",
                f"block_size={size}; with more queries a row it is 128, 256, 384 or 512",
            )  # fmt: skip
    if switches.shapes:
        _check_cache(call, layout)
    batch = len(call.query_lens or ()) if layout.packed else call.query.shape[0]
    # numpy: for arrays this small it costs a third of what torch does, and this runs in every layer.
    lens = np.asarray(call.kv_lens or [0], dtype=np.int64)
    pages = -(-lens[:batch] // max(size, 1))
    if switches.shapes:
        widest = int(pages.max(initial=0))
        _require(
            call, table.dim() == 2 and table.shape[0] == batch and table.shape[1] >= widest, "table-shape",
            f"block_table is {tuple(table.shape)}; {batch} rows of up to {widest} pages need [{batch}, >= {widest}]",
        )  # fmt: skip
    if switches.bounds:
        ids, blocks = table[:batch].numpy(), call.key.shape[0]
        wrong = (ids < 0) | (ids >= blocks)
        if wrong.any() and (wrong := wrong & (np.arange(table.shape[1])[None] < pages[:, None])).any():
            row, place = (int(index) for index in np.argwhere(wrong)[0])
            _require(
                call, False, "block-ids",
                f"block_table[{row}, {place}] = {ids[row, place]}, the cache has {blocks} blocks; hardware does not "
                "check and silently reads other memory",
            )  # fmt: skip


def _check_cache(call: AttentionCall, layout: Layout) -> None:
    """The paged key and value: a form that the query's layout allows, and an int32 number of elements."""
    key, value = call.key, call.value
    heads_dim = to_bsnd(call.query, layout.query, call.num_heads).shape[-1]
    flat = key.dim() == value.dim() == 3
    allowed = flat or (key.dim() == value.dim() == 4 and layout.query in ("BNSD", "TND", "NTD"))
    _require(
        call, allowed, "cache-form",
        f"a paged key of {key.dim()} dimensions with {call.layout_name}; [blocks, block_size, H] always, "
        "[blocks, KV_N, block_size, D] with BNSD and TND",
    )  # fmt: skip
    block, width = (key.shape[1], key.shape[2]) if flat else (key.shape[2], key.shape[1] * key.shape[3])
    _require(
        call, block == call.block_size, "block-size", f"block_size={call.block_size}, the cache has pages of {block}"
    )
    _require(
        call, width == call.num_kv_heads * heads_dim, "cache-form",
        f"the key cache has {width} elements a token, {call.num_kv_heads} heads of {heads_dim} need "
        f"{call.num_kv_heads * heads_dim}",
    )  # fmt: skip
    _require(
        call, key.shape[:-1] == value.shape[:-1] and (layout.packed or key.shape == value.shape), "cache-form",
        f"the caches of keys and values are {tuple(key.shape)} and {tuple(value.shape)}; they must have one shape",
    )  # fmt: skip
    if flat:
        _require(call, width <= 65535, "cache-form", f"KV_N*D={width}; [blocks, block_size, H] ends at 65535")
    for name, cache in (("key", key), ("value", value)):
        _require(
            call, cache.numel() <= MAX_INT32, "int32-elements",
            f"the {name} cache has {cache.numel()} elements; a tensor given to the operator must count in int32",
        )  # fmt: skip
