"""Every rule broken on purpose: the rule that should catch it does, with a text that says what and where it is from.

Each case spoils one argument of a call that is legal otherwise (`test_the_calls_are_legal`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import npu_calls as calls
import pytest
import torch

from devices.npu.emulator import ContractViolation, Strictness, relaxed, strictness

FIA, FIA2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
Build = Callable[[], dict[str, Any]]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def table(rows: list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype, device="npu")


def cache_of(blocks: int, block: int, width: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(blocks, block, width, dtype=torch.bfloat16, device="npu") for name in ("key", "value")}


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="npu")


def huge_cache() -> dict[str, torch.Tensor]:
    """2^31 elements; nobody touches the 4 GiB, so nothing is taken."""
    cache = torch.empty(1 << 17, 128, 128, dtype=torch.bfloat16, device="npu")
    return {"key": cache, "value": cache}


def spoilt_mask() -> torch.Tensor:
    mask = calls.causal_mask()
    mask[4, 4] = True
    return calls.npu(mask)


CASES: list[tuple[str, str, Build]] = [
    # Lengths are host lists, per row or cumulative as the layout says.
    ("host-lists", FIA, lambda: calls.decode(actual_seq_lengths_kv=ints(130, 5, 256))),
    ("host-lists", FIA2, lambda: calls.packed(actual_seq_qlen=ints(4, 5, 8))),
    ("host-lists", "_npu_paged_attention", lambda: calls.paged(context_lens=ints(130, 5, 256))),
    ("host-lists", "_npu_paged_attention", lambda: calls.paged(context_lens=torch.tensor([130, 5, 256]))),
    ("lens-missing", FIA, lambda: calls.decode(actual_seq_lengths_kv=None)),
    ("lens-missing", FIA2, lambda: calls.packed(actual_seq_qlen=None)),
    ("lens-count", FIA, lambda: calls.decode(actual_seq_lengths_kv=[130, 5])),
    ("lens-range", FIA, lambda: calls.decode(actual_seq_lengths_kv=[130, -1, 256])),
    ("lens-range", FIA, lambda: calls.prefill(actual_seq_lengths=[8])),
    ("cumulative-lens", FIA2, lambda: calls.packed(actual_seq_qlen=[4, 1, 3])),
    ("cumulative-lens", FIA2, lambda: calls.packed(actual_seq_qlen=[4, 5, 7])),
    # Pages.
    ("page-size", FIA, lambda: calls.prefill(block_size=64) | cache_of(16, 64, 128)),
    ("page-size", FIA, lambda: calls.prefill(block_size=640) | cache_of(6, 640, 128)),
    ("page-size", FIA, lambda: calls.decode(block_size=24) | cache_of(40, 24, 128)),
    (
        "page-size",
        "_npu_paged_attention",
        lambda: calls.paged(key_cache=half(4, 256, 2, 64), value_cache=half(4, 256, 2, 64)),
    ),
    ("block-size", FIA, lambda: calls.decode(block_size=256)),
    ("table-shape", FIA, lambda: calls.decode(block_table=table([[3, 5], [7, 0]]))),
    ("table-shape", FIA, lambda: calls.decode(block_table=table([[3], [7], [2]]))),
    ("table-dtype", FIA, lambda: calls.decode(block_table=table([[3, 5], [7, 0], [2, 6]], torch.int64))),
    (
        "table-dtype",
        "_npu_paged_attention",
        lambda: calls.paged(block_table=table([[3, 5], [7, 0], [2, 6]], torch.int64)),
    ),
    ("block-ids", FIA, lambda: calls.decode(block_table=table([[3, 8], [7, 0], [2, 6]]))),
    ("block-ids", FIA, lambda: calls.decode(block_table=table([[3, 5], [-1, 0], [2, 6]]))),
    ("block-ids", "_npu_paged_attention", lambda: calls.paged(block_table=table([[3, 8], [7, 0], [2, 6]]))),
    ("block-ids", "npu_gather_pa_kv_cache", lambda: calls.gather(block_tables=table([[3, 9], [7, 0]]))),
    ("cache-form", FIA, lambda: calls.decode(key=half(8, 2, 128, 64), value=half(8, 2, 128, 64))),
    ("cache-form", FIA, lambda: calls.decode() | cache_of(8, 128, 192)),
    ("cache-form", FIA, lambda: calls.decode(value=half(7, 128, 128))),
    ("cache-form", FIA2, lambda: calls.packed(value=half(7, 2, 128, 128))),
    ("int32-elements", FIA, lambda: calls.decode() | huge_cache()),
    # Masks.
    ("mask-size", FIA, lambda: calls.prefill(atten_mask=None)),
    ("mask-size", FIA, lambda: calls.prefill(atten_mask=calls.npu(torch.ones(256, 256, dtype=torch.bool).triu(1)))),
    ("mask-size", FIA, lambda: calls.decode(sparse_mode=1)),
    ("mask-size", FIA, lambda: calls.decode(sparse_mode=3, atten_mask=calls.npu(calls.causal_mask()[None]))),
    ("mask-size", FIA, lambda: calls.decode(atten_mask=calls.npu(torch.zeros(2, 1, 1, 256, dtype=torch.bool)))),
    ("mask-rank", FIA, lambda: calls.decode(atten_mask=calls.npu(torch.zeros(3, 256, dtype=torch.bool)))),
    ("mask-size", FIA2, lambda: calls.packed(sparse_mode=0)),
    ("mask-content", FIA, lambda: calls.prefill(atten_mask=calls.npu(~calls.causal_mask()))),
    ("mask-content", FIA, lambda: calls.prefill(atten_mask=spoilt_mask())),
    ("mask-dtype", FIA, lambda: calls.prefill(atten_mask=calls.npu(calls.causal_mask().bfloat16()))),
    ("mask-width", FIA, lambda: calls.decode(atten_mask=calls.npu(torch.zeros(3, 1, 1, 200, dtype=torch.bool)))),
    (
        "mask-ignored",
        FIA,
        lambda: calls.decode(
            query=half(1, 1, 384),
            actual_seq_lengths_kv=[600],
            block_table=table([[1, 2, 3, 4, 5]]),
            atten_mask=calls.npu(torch.zeros(1, 1, 1, 640, dtype=torch.bool)),
        ),
    ),
    ("window-ignored", FIA, lambda: calls.decode(sparse_mode=4, pre_tokens=63, next_tokens=0)),
    ("band", FIA, lambda: calls.prefill(sparse_mode=4, pre_tokens=3, next_tokens=-9)),
    ("sparse-mode", FIA, lambda: calls.prefill(sparse_mode=5)),
    ("sparse-mode", FIA2, lambda: calls.packed(sparse_mode=2)),
    # Shapes and types.
    ("gqa-ratio", FIA, lambda: calls.decode(num_key_value_heads=4)),
    ("gqa-ratio", FIA, lambda: calls.decode(query=half(3, 1, 130 * 64), num_heads=130, num_key_value_heads=2)),
    ("heads", FIA, lambda: calls.decode(query=half(3, 1, 257 * 16), num_heads=257, num_key_value_heads=257)),
    ("heads", FIA, lambda: calls.decode(num_heads=5, num_key_value_heads=1)),
    ("heads", FIA, lambda: calls.prefill(num_heads=8)),
    ("head-size", FIA, lambda: calls.decode(query=half(3, 1, 6 * 40))),
    ("head-size", FIA, lambda: calls.decode(query=half(3, 1, 6 * 528))),
    (
        "tnd-head-size",
        FIA2,
        lambda: calls.packed(query=half(8, 6, 64), key=half(8, 2, 128, 64), value=half(8, 2, 128, 64)),
    ),
    ("layout", FIA, lambda: calls.decode(input_layout="SBH")),
    ("layout", FIA, lambda: calls.decode(input_layout="BNSD")),
    ("layout", FIA, lambda: calls.heads_first(input_layout="BNSD_BSND")),
    ("sink", FIA2, lambda: calls.packed(learnable_sink=torch.zeros(6, device="npu"))),
    ("packed-causal", FIA2, lambda: calls.packed(actual_seq_kvlen=[130, 1, 256])),
    ("attention-dtype", FIA, lambda: calls.decode(query=torch.zeros(3, 1, 384, device="npu"))),
    (
        "attention-dtype",
        FIA2,
        lambda: {
            name: value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in calls.packed().items()
        },
    ),
    ("contiguity", FIA, lambda: calls.prefill(query=half(1, 6, 7, 64).transpose(1, 2))),
    ("not-emulated", FIA, lambda: calls.decode(query_rope=half(3, 1, 64), key_rope=half(8, 128, 64))),
    ("one-device", FIA, lambda: calls.decode(block_table=torch.tensor([[3, 5], [7, 0], [2, 6]], dtype=torch.int32))),
    # Writes into caches and tables.
    (
        "scatter-dtype",
        "npu_scatter_nd_update_",
        lambda: calls.scatter(input=table([[0, 0], [0, 0]]), indices=table([[1]]), updates=table([[1, 2]])),
    ),
    ("dtypes", "npu_scatter_nd_update_", lambda: calls.scatter(updates=torch.zeros(2, 4, device="npu"))),
    ("shapes", "npu_scatter_nd_update_", lambda: calls.scatter(indices=ints(3, 7))),
    ("indices", "npu_scatter_nd_update_", lambda: calls.scatter(indices=table([[3], [10]]))),
    ("indices", "npu_scatter_nd_update_", lambda: calls.scatter(indices=table([[3], [-1]]))),
    ("duplicates", "npu_scatter_nd_update_", lambda: calls.scatter(indices=table([[3], [3]]))),
    ("slots", "_npu_reshape_and_cache", lambda: calls.cache_write(slot_indices=ints(130, 0, 1024))),
    ("slots", "_npu_reshape_and_cache", lambda: calls.cache_write(slot_indices=ints(130, -1, 4))),
    ("slots", "npu_scatter_pa_kv_cache", lambda: calls.cache_write_pa(slot_mapping=ints(130, 0, 1024))),
    (
        "slot-dtype",
        "_npu_reshape_and_cache",
        lambda: calls.cache_write(slot_indices=ints(130, 0, 4, dtype=torch.int64)),
    ),
    ("duplicates", "_npu_reshape_and_cache", lambda: calls.cache_write(slot_indices=ints(130, 4, 130))),
    ("duplicates", "npu_scatter_pa_kv_cache", lambda: calls.cache_write_pa(slot_mapping=ints(130, 4, 130))),
    ("contiguity", "npu_scatter_pa_kv_cache", lambda: calls.cache_write_pa(key=half(2, 3, 64).transpose(0, 1))),
    ("cache-mode", "npu_scatter_pa_kv_cache", lambda: calls.cache_write_pa(cache_mode="PA_NZ")),
    ("dtypes", "npu_scatter_pa_kv_cache", lambda: calls.cache_write_pa(key=torch.zeros(3, 2, 64, device="npu"))),
    ("shapes", "_npu_reshape_and_cache", lambda: calls.cache_write(slot_indices=ints(130, 4))),
    ("shapes", "npu_gather_pa_kv_cache", lambda: calls.gather(seq_lens=ints(130, 5))),
    (
        "one-device",
        "npu_scatter_pa_kv_cache",
        lambda: calls.cache_write_pa(slot_mapping=torch.tensor([130, 0, 4], dtype=torch.int32)),
    ),
    # The rest of a layer.
    ("dtypes", "npu_rms_norm", lambda: {"input": half(2, 64), "gamma": torch.ones(64, device="npu")}),
    ("dtypes", "npu_rms_norm", lambda: {"input": ints(1, 2), "gamma": ints(1, 2)}),
    ("shapes", "npu_rms_norm", lambda: {"input": half(2, 64), "gamma": half(32)}),
    ("shapes", "npu_add_rms_norm", lambda: {"x1": half(2, 64), "x2": half(1, 64), "gamma": half(64)}),
    ("shapes", "npu_swiglu", lambda: {"input": half(2, 63)}),
    ("shapes", "npu_rotary_mul", lambda: {"input": half(5, 6, 64), "r1": half(5, 1, 64), "r2": half(5, 1, 64)}),
    (
        "dtypes",
        "npu_rotary_mul",
        lambda: {
            "input": half(1, 5, 6, 64),
            "r1": torch.zeros(1, 5, 1, 64, device="npu"),
            "r2": torch.zeros(1, 5, 1, 64, device="npu"),
        },
    ),
    (
        "rotary-mode",
        "npu_rotary_mul",
        lambda: {"input": half(1, 5, 6, 64), "r1": half(1, 5, 1, 64), "r2": half(1, 5, 1, 64), "rotary_mode": "neox"},
    ),
    (
        "head-size",
        "npu_apply_rotary_pos_emb",
        lambda: calls.rotary(
            query=half(1, 5, 6, 32), key=half(1, 5, 2, 32), cos=half(1, 5, 1, 32), sin=half(1, 5, 1, 32)
        ),
    ),
    ("rotary-mode", "npu_apply_rotary_pos_emb", lambda: calls.rotary(rotary_mode="interleave")),
    ("layout", "npu_apply_rotary_pos_emb", lambda: calls.rotary(layout="BNSD")),
    ("arguments", "npu_top_k_top_p", lambda: {"logits": half(2, 50)}),
    ("ranges", "npu_top_k_top_p", lambda: {"logits": half(2, 50), "k": ints(3, 51)}),
    ("ranges", "npu_top_k_top_p", lambda: {"logits": half(2, 2000), "k": ints(3, 1025)}),
    ("ranges", "npu_top_k_top_p", lambda: {"logits": half(2, 50), "k": ints(3, 0)}),
    ("ranges", "npu_top_k_top_p", lambda: {"logits": half(2, 50), "p": half(2) + 1.5}),
    ("numbers", "npu_top_k_top_p", lambda: {"logits": half(2, 50) * torch.nan, "k": ints(3, 4)}),
    ("dtypes", "npu_top_k_top_p", lambda: {"logits": half(2, 50), "p": torch.ones(2, device="npu")}),
    ("dtypes", "npu_top_k_top_p", lambda: {"logits": half(2, 50), "k": ints(3, 4, dtype=torch.int64)}),
    ("nd-only", "npu_format_cast", lambda: {"input": half(16, 16), "acl_format": 29}),
]


@pytest.mark.parametrize(
    ("rule", "operator", "build"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_rule_is_caught_by_its_name(npu: SimpleNamespace, rule: str, operator: str, build: Build) -> None:
    with pytest.raises(ContractViolation) as violation:
        getattr(npu, operator)(**build())
    assert violation.value.rule == rule, str(violation.value)
    assert operator in violation.value.operator
    assert rule in str(violation.value)


@pytest.mark.parametrize("operator", calls.LEGAL)
def test_the_calls_are_legal(npu: SimpleNamespace, operator: str) -> None:
    for build in calls.LEGAL[operator]:
        getattr(npu, operator)(**build())


def test_every_operator_with_a_broken_call_has_a_legal_one() -> None:
    assert {operator for _, operator, _ in CASES} <= set(calls.LEGAL)


def test_the_rules_say_where_they_are_from_and_what_hardware_does(npu: SimpleNamespace) -> None:
    with pytest.raises(ContractViolation, match=r"torch_npu 2\.13 operator docs"):
        npu.npu_fused_infer_attention_score(**calls.decode(actual_seq_lengths_kv=None))
    with pytest.raises(ContractViolation, match="silently reads other memory"):
        npu.npu_fused_infer_attention_score(**calls.decode(block_table=table([[3, 9], [7, 0], [2, 6]])))
    with pytest.raises(ContractViolation, match="silently corrupts memory"):
        npu._npu_reshape_and_cache(**calls.cache_write(slot_indices=ints(0, 1, 5000)))


def test_entries_behind_a_rows_pages_may_hold_anything(npu: SimpleNamespace) -> None:
    npu.npu_fused_infer_attention_score(**calls.decode(block_table=table([[3, 5], [7, -999], [2, 6]])))


def test_a_switch_shows_the_silent_result(npu: SimpleNamespace) -> None:
    """A mask [1, 1, 1, 640] in sparse mode 0 hides key 3, but not key 600: what hardware does without a word."""

    def attend(hidden: list[int]) -> torch.Tensor:
        mask = torch.zeros(1, 1, 1, 640, dtype=torch.bool)
        mask[..., hidden] = True
        call = calls.decode(
            query=calls.npu(calls.random(1, 1, 384)),
            actual_seq_lengths_kv=[640],
            block_table=table([[1, 2, 3, 4, 5]]),
            atten_mask=calls.npu(mask),
        )
        with relaxed(masks=False):
            out: torch.Tensor = npu.npu_fused_infer_attention_score(**call)[0].cpu()
        return out

    everything = attend([])
    assert not torch.equal(attend([3]), everything)
    assert torch.equal(attend([600]), everything)


def test_every_switch_is_on_and_comes_back() -> None:
    assert all(getattr(strictness(), switch.name) for switch in fields(Strictness))
    with relaxed(bounds=False, graphs=False):
        assert not strictness().bounds
        assert strictness().pages
    assert strictness() == Strictness()
