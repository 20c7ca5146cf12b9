"""Each rule of a torch_npu operator that a builder guards, broken on purpose; and calls that keep them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from devices.npu.arguments.attention import BAND, CAUSAL, AttentionShape, PagedAttention
from devices.npu.arguments.contract import Call, ContractViolation
from devices.npu.arguments.graph import graph_update
from devices.npu.arguments.kv_write import KvWrite, host_slots
from devices.npu.arguments.layer import add_rms_norm, rms_norm, rotary_mul, swiglu
from devices.npu.arguments.sampling import TopKTopP
from devices.npu.arguments.several import SinkAttention, VerifyAttention
from devices.npu.chips import PAGE_SIZES

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def table(rows: int = 2, width: int = 3, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(rows, width, dtype=dtype)


def decode(**changes: Any) -> PagedAttention:
    """Two rows with one new token each, pages of 128."""
    values: dict[str, Any] = {
        "shape": SHAPE,
        "page_size": 128,
        "query_len": 1,
        "kv_lens": [300, 5],
        "block_table": table(),
    }
    return PagedAttention(**(values | changes))


def prefill(**changes: Any) -> PagedAttention:
    """One row with 40 new tokens of 300."""
    values: dict[str, Any] = {
        "shape": SHAPE,
        "page_size": 128,
        "query_len": 40,
        "kv_lens": [300],
        "block_table": table(1),
        "mask": TRIANGLE,
        "sparse_mode": CAUSAL,
    }
    return PagedAttention(**(values | changes))


def attend(call: PagedAttention, query: torch.Tensor | None = None, **changes: Any) -> Call:
    tensors: dict[str, Any] = {
        "query": half(call.batch, call.query_len, 64) if query is None else query,
        "key": half(9, 128, 32),
        "value": half(9, 128, 32),
    }
    return call.of(**(tensors | changes))


def write(slots: list[int], **changes: Any) -> Call:
    tensors: dict[str, Any] = {
        "key": half(len(slots), 2, 16),
        "value": half(len(slots), 2, 16),
        "key_cache": half(3, 128, 2, 16),
        "value_cache": half(3, 128, 2, 16),
    }
    on_host = host_slots(np.array(slots, dtype=np.int64))
    return KvWrite(torch.from_numpy(on_host), int(on_host.max())).of(**(tensors | changes))


def windowed_mask(rows: int = 2, width: int = 3) -> torch.Tensor:
    return torch.zeros(rows, 1, 1, width * 128, dtype=torch.bool)


def verify(**changes: Any) -> VerifyAttention:
    """Two rows with 4 and 1 new tokens."""
    values: dict[str, Any] = {
        "shape": SHAPE,
        "page_size": 128,
        "query_lens": [4, 1],
        "kv_lens": [300, 5],
        "block_table": table(),
        "mask": TRIANGLE,
    }
    return VerifyAttention(**(values | changes))


def sinks(**changes: Any) -> SinkAttention:
    """The same with sinks."""
    values: dict[str, Any] = {
        "shape": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=128),
        "page_size": 128,
        "query_lens": [4, 1],
        "kv_lens": [300, 5],
        "block_table": table(),
        "mask": TRIANGLE,
        "sink": half(4),
    }
    return SinkAttention(**(values | changes))


def attend_several(
    call: VerifyAttention | SinkAttention, *shape: int, dtype: torch.dtype = torch.bfloat16, cache: int = 32
) -> Call:
    return call.of(half(*shape, dtype=dtype), half(9, 128, cache, dtype=dtype), half(9, 128, cache, dtype=dtype))


LOGITS = torch.zeros(2, 50)


def cut(ks: list[int] | None = None, ps: list[float] | None = None, **changes: Any) -> Call:
    """Two rows of 50 logits, cut."""
    k = None if ks is None else np.array(ks, dtype=np.int32)
    p = None if ps is None else np.array(ps, dtype=np.float32)
    tensors: dict[str, Any] = {
        "logits": LOGITS,
        "top_k": None if k is None else torch.from_numpy(k),
        "top_p": None if p is None else torch.from_numpy(p),
    }
    return TopKTopP(k, p).of(**(tensors | changes))


X, COS = half(1, 5, 4, 16), half(1, 5, 1, 16)

VIOLATIONS: list[tuple[str, str, Callable[[], object]]] = [
    # Attention: heads.
    (V1, "at most 256 query heads", lambda: AttentionShape(257, 257, 16)),
    (V1, "multiple of key heads", lambda: AttentionShape(6, 4, 16)),
    (V1, "at most 64 times as many", lambda: AttentionShape(128, 1, 16)),
    (V1, "multiple of 16", lambda: AttentionShape(4, 2, 24)),
    (V1, "at most 512", lambda: AttentionShape(4, 2, 528)),
    (V1, "key heads * head size is at most 65535", lambda: AttentionShape(256, 256, 256)),
    (V1, "query heads * head size is below 65535", lambda: AttentionShape(256, 4, 256)),
    # Attention: page size by path.
    (V1, "block_size is a multiple of 16", lambda: decode(page_size=24, block_table=table(2, 20))),
    (V1, "at most 512", lambda: decode(page_size=1024)),
    (V1, "block_size is a multiple of 128", lambda: prefill(page_size=64, block_table=table(1, 9))),
    # Attention: table and lengths.
    (V1, "block_table is one of int32", lambda: decode(block_table=table(dtype=torch.int64))),
    (V1, "block_table is [batch, pages]", lambda: decode(block_table=table().flatten())),
    (V1, "block_table is contiguous", lambda: decode(block_table=table(3, 2).T)),
    (V1, "as wide as the longest row has pages, 3", lambda: decode(block_table=table(2, 2))),
    (V1, "one entry for each of 3 rows", lambda: decode(block_table=table(3), kv_lens=[300, 5])),
    (V1, "list of Python integers", lambda: decode(kv_lens=torch.tensor([300, 5]))),
    (V1, "list of Python integers", lambda: decode(kv_lens=[300, np.int32(5)])),
    (V1, "no negative entry", lambda: decode(kv_lens=[300, -1])),
    (V1, "no more than it can read", lambda: prefill(query_len=301)),
    # Attention: masks and sparse modes.
    (V1, "ignored with one query token", lambda: decode(sparse_mode=CAUSAL, mask=TRIANGLE)),
    (V1, "give a window as a mask", lambda: decode(pre_tokens=5)),
    (V1, "atten_mask is [batch, 1, 1, table width * page]", lambda: decode(mask=windowed_mask(width=2))),
    (V1, "atten_mask is [batch, 1, 1, table width * page]", lambda: decode(mask=windowed_mask().flatten(1))),
    (V1, "atten_mask is one of bool", lambda: decode(mask=windowed_mask().half())),
    (V1, "sparse_mode is 3 (causal) or 4", lambda: prefill(sparse_mode=0)),
    (V1, "fixed atten_mask of 2048 x 2048", lambda: prefill(mask=None)),
    (V1, "fixed atten_mask of 2048 x 2048", lambda: prefill(mask=TRIANGLE[:300, :300])),
    (V1, "pre_tokens belongs to sparse_mode 4", lambda: prefill(pre_tokens=7)),
    (V2, "pre_tokens belongs to sparse_mode 4", lambda: prefill(sparse_mode=BAND)),
    (V2, "not negative", lambda: prefill(sparse_mode=BAND, pre_tokens=-1)),
    # Attention: tensors of a layer.
    (V1, "query is one of bfloat16, float16", lambda: attend(decode(), half(2, 1, 64, dtype=torch.float32))),
    (V1, "query, key, value have one dtype", lambda: attend(decode(), half(2, 1, 64, dtype=torch.float16))),
    (V1, "query is [2, 1, 64]", lambda: attend(decode(), half(2, 4, 1, 16))),
    (V1, "query is contiguous", lambda: attend(prefill(), half(1, 64, 40).transpose(1, 2))),
    (V1, "key and value are [pages, 128, 32]", lambda: attend(decode(), key=half(9, 128, 2, 16))),
    (V1, "key and value are [pages, 128, 32]", lambda: attend(decode(), value=half(8, 128, 32))),
    (V1, "fewer than 2**31 elements", lambda: attend(decode(), **dict.fromkeys(("key", "value"), vast()))),
    (V1, "on one device", lambda: attend(decode(), half(2, 1, 64).to("meta"))),
    # Attention: several rows with a few tokens each, and sinks.
    (V2, "give a decode call", lambda: verify(query_lens=[1, 1])),
    (V2, "a row has at least one new token", lambda: verify(query_lens=[4, 0])),
    (V2, "no more than it can read", lambda: verify(query_lens=[4, 6])),
    (V2, "each row has a length of its own", lambda: verify(query_lens=[4])),
    (V2, "each row has a length of its own", lambda: verify(query_lens=[4], kv_lens=[300])),
    (V2, "block_size is a multiple of 128", lambda: verify(page_size=64, block_table=table(2, 9))),
    (V2, "as wide as the longest row has pages, 3", lambda: verify(block_table=table(2, 2))),
    (V2, "fixed atten_mask of 2048 x 2048", lambda: verify(mask=TRIANGLE[:300, :300])),
    (V2, "a window has at least one token", lambda: verify(window=0)),
    (V2, "query is [2, 4, 64]", lambda: attend_several(verify(), 2, 5, 64)),
    (V2, "query is one of bfloat16, float16", lambda: attend_several(verify(), 2, 4, 64, dtype=torch.float32)),
    (V2, "key and value are [pages, 128, 32]", lambda: attend_several(verify(), 2, 4, 64, cache=48)),
    (V2, "heads are of 128 in layout TND", lambda: sinks(shape=SHAPE)),
    (V2, "learnable_sink is one of bfloat16", lambda: sinks(sink=half(4, dtype=torch.float32))),
    (V2, "a number for each of 4 query heads", lambda: sinks(sink=half(2))),
    (V2, "layout TND takes no mask for a window", lambda: sinks(query_lens=[1, 1], window=9)),
    (
        V2,
        "at most 4096 rows in layout TND",
        lambda: sinks(query_lens=[1] * 4097, kv_lens=[2] * 4097, block_table=table(4097)),
    ),
    (V2, "query is [5, 4, 128]", lambda: attend_several(sinks(), 8, 4, 128, cache=256)),
    (
        V2,
        "query is one of bfloat16",
        lambda: attend_several(sinks(), 5, 4, 128, dtype=torch.float16, cache=256),
    ),
    # The write of keys and values.
    ("npu_scatter_pa_kv_cache", "no slot is written twice", lambda: write([5, 6, 5])),
    ("npu_scatter_pa_kv_cache", "slots are from 0", lambda: write([-1, 6])),
    ("npu_scatter_pa_kv_cache", "slots are below pages * page size = 384", lambda: write([384])),
    ("npu_scatter_pa_kv_cache", "at least one", lambda: write([])),
    ("npu_scatter_pa_kv_cache", "one dtype", lambda: write([1], key_cache=half(3, 128, 2, 16, dtype=torch.float16))),
    ("npu_scatter_pa_kv_cache", "value is contiguous", lambda: write([1, 2], value=half(2, 16, 2).transpose(1, 2))),
    ("npu_scatter_pa_kv_cache", "one token for each slot", lambda: write([1, 2], key=half(1, 2, 16))),
    (
        "npu_scatter_pa_kv_cache",
        "caches are [pages, page size, 2, 16]",
        lambda: write([1], key_cache=half(3, 2, 128, 16)),
    ),
    # The cuts of a draw.
    ("npu_top_k_top_p", "p or k is given", cut),
    ("npu_top_k_top_p", "k is from 1 to 1024", lambda: cut([1, 1025], logits=torch.zeros(2, 2000))),
    ("npu_top_k_top_p", "k is from 1 to 1024", lambda: cut([-1, 5])),
    ("npu_top_k_top_p", "k is at most the 50 logits", lambda: cut([5, 51])),
    ("npu_top_k_top_p", "p is from 0 to 1", lambda: cut(ps=[0.5, 1.5])),
    ("npu_top_k_top_p", "p is from 0 to 1", lambda: cut(ps=[0.5, float("nan")])),
    ("npu_top_k_top_p", "logits is one of", lambda: cut([5, 5], logits=LOGITS.double())),
    ("npu_top_k_top_p", "2 dimensions", lambda: cut([5, 5], logits=LOGITS[None])),
    ("npu_top_k_top_p", "k is one of int32", lambda: cut([5, 5], top_k=torch.tensor([5, 5]))),
    ("npu_top_k_top_p", "p is one of bfloat16", lambda: cut(ps=[0.5, 0.5], logits=LOGITS.bfloat16())),
    ("npu_top_k_top_p", "k has one number for each of 2 rows", lambda: cut([5, 5, 5])),
    ("npu_top_k_top_p", "p on the device is that of the host", lambda: cut([5, 5], top_p=torch.ones(2))),
    ("npu_top_k_top_p", "on one device", lambda: cut([5, 5], logits=LOGITS.to("meta"))),
    # Norms, rotation, gate.
    ("npu_rms_norm", "gamma is the last dimension", lambda: rms_norm(half(5, 16), half(8), 1e-5)),
    ("npu_rms_norm", "one dtype", lambda: rms_norm(half(5, 16), half(16, dtype=torch.float32), 1e-5)),
    ("npu_rms_norm", "x is one of", lambda: rms_norm(torch.zeros(5, 16).double(), torch.zeros(16).double(), 1e-5)),
    ("npu_rms_norm", "2 to 8 dimensions", lambda: rms_norm(half(16), half(16), 1e-5)),
    ("npu_add_rms_norm", "x1 and x2 have one shape", lambda: add_rms_norm(half(5, 16), half(1, 16), half(16), 1e-5)),
    ("npu_add_rms_norm", "x is not empty", lambda: add_rms_norm(half(0, 16), half(0, 16), half(16), 1e-5)),
    ("npu_rotary_mul", "one dtype", lambda: rotary_mul(X, COS.float(), COS.float())),
    ("npu_rotary_mul", "4 dimensions", lambda: rotary_mul(X[0], COS, COS)),
    ("npu_rotary_mul", "[batch, tokens, 1, dim]", lambda: rotary_mul(X, COS[..., :8], COS[..., :8])),
    ("npu_rotary_mul", "below 896", lambda: rotary_mul(half(1, 1, 1, 896), half(1, 1, 1, 896), half(1, 1, 1, 896))),
    ("npu_rotary_mul", "heads are below 1000", lambda: rotary_mul(half(1, 5, 1000, 16), COS, COS)),
    ("npu_swiglu", "the last even", lambda: swiglu(half(5, 15))),
    # Updates of a graph.
    ("NPUGraph.update", "one update for each of the 2", lambda: graph_update([V1, V1], [kv([1, 2])], [2] * 2)),
    ("NPUGraph.update", "ignored in silence", lambda: graph_update([V1], [{"actual_seq_kvlen": [1, 2]}], [2])),
    ("NPUGraph.update", "ignored in silence", lambda: graph_update([V1], [{"actual_seq_lengths": [1, 2]}], [2])),
    (
        "NPUGraph.update",
        "ignored in silence",
        lambda: graph_update([V1], [kv([1, 2]) | {"context_lens": [1, 2]}], [2]),
    ),
    ("NPUGraph.update", "one entry for each of 2 rows", lambda: graph_update([V1], [kv([1])], [2])),
    ("NPUGraph.update", "list of Python integers", lambda: graph_update([V1], [kv(torch.tensor([1, 2]))], [2])),
    ("NPUGraph.update", "can be updated", lambda: graph_update(["npu_rms_norm"], [kv([1, 2])], [2])),
]


def kv(lengths: Any) -> dict[str, Any]:
    return {"actual_seq_lengths_kv": lengths}


def vast() -> torch.Tensor:
    """A cache of 2**31 elements that takes no memory."""
    return torch.empty(2**31 // (128 * 32), 128, 32, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("operator", "rule", "broken"), VIOLATIONS, ids=[f"{i:02} {rule}" for i, (_, rule, _) in enumerate(VIOLATIONS)]
)
def test_a_broken_rule_is_named_before_the_operator_is_called(
    operator: str, rule: str, broken: Callable[[], object]
) -> None:
    with pytest.raises(ContractViolation) as refused:
        broken()
    assert refused.value.operator == operator
    assert rule in refused.value.rule
    assert "got" in str(refused.value)
    assert f"documentation of {operator}" in str(refused.value)


def test_a_decode_call_says_everything_that_the_operator_needs() -> None:
    call = attend(decode(mask=windowed_mask()))
    assert [tuple(tensor.shape) for tensor in call.args] == [(2, 1, 64), (9, 128, 32), (9, 128, 32)]
    assert {key: value for key, value in call.kwargs.items() if not isinstance(value, torch.Tensor)} == {
        "input_layout": "BSH",
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "sparse_mode": 0,
        "block_size": 128,
        "actual_seq_lengths": [1, 1],
        "actual_seq_lengths_kv": [300, 5],
    }


def test_a_band_is_a_call_of_the_second_version() -> None:
    call = attend(prefill(sparse_mode=BAND, pre_tokens=23))
    assert call.kwargs["actual_seq_qlen"] == [40]
    assert (call.kwargs["pre_tokens"], call.kwargs["next_tokens"], call.kwargs["sparse_mode"]) == (23, 0, 4)
    assert not call.kwargs.keys() & {"actual_seq_lengths", "num_heads", "scale"}


def test_every_page_size_that_is_declared_is_right_on_both_paths() -> None:
    assert PAGE_SIZES == (128, 256, 384, 512)
    for size in PAGE_SIZES:
        decode(page_size=size)
        prefill(page_size=size)


def test_good_calls_pass() -> None:
    assert write([383, 0]).kwargs == {"cache_mode": "Norm"}
    assert write([383, 0]).args[4].dtype == torch.int32
    rms_norm(half(5, 4, 16), half(16), 1e-5)
    add_rms_norm(half(5, 16), half(5, 16), half(16), 1e-5)
    rotary_mul(X, COS, COS)
    swiglu(half(5, 16))
    update = [kv([3, 1]), {"actual_seq_kvlen": [3, 1], "actual_seq_qlen": [1, 1]}]
    assert graph_update([V1, V2], update, [2] * 2) == update
