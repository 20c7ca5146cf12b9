"""Split attention of few new tokens against its torch form, which reads the same pages."""

import pytest
import torch
from kernels.meter import Meter

from devices.cuda.arguments import BadKernelArgument
from devices.cuda.kernels import decode as kernel
from devices.torch_forms import paged_attention as torch_form

from .paged import DTYPES, Paged, assert_close, int32

EDGES = [1, 16, 17, 130]


def run(form: object, batch: Paged, requests: list[int] | None = None, **options: object) -> torch.Tensor:
    out = batch.fresh_out()
    rows = list(range(len(batch.lengths))) if requests is None else requests
    chosen: dict[str, object] = {"max_queries": max(batch.new), "scale": batch.dim**-0.5, "num_splits": 3}
    form.decode_attention(  # type: ignore[attr-defined]
        batch.q,
        batch.k,
        batch.v,
        out,
        batch.page_table,
        int32(rows),
        batch.query_starts,
        batch.seq_lens,
        **chosen | batch.scales | options,
    )
    return out


def compare(batch: Paged, requests: list[int] | None = None, **options: object) -> None:
    got = run(kernel, batch, requests, **options)
    assert_close(got, run(torch_form, batch, requests, **options), batch.spread)
    assert (got[-1] == 7).all(), "the last token is no request's"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "page_size"), [(4, 2, 16), (1, 3, 64), (8, 1, 128), (20, 1, 64), (3, 2, 32)]
)
def test_decode_of_lengths_around_page_edges(dtype: torch.dtype, group: int, num_kv_heads: int, page_size: int) -> None:
    batch = Paged(EDGES, [1] * 4, page_size, num_kv_heads, group, dtype=dtype, fused=group == 4)
    compare(batch, split_tokens=64)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_rows_are_shared_evenly_by_any_number_of_programs(num_splits: int) -> None:
    compare(Paged([1, 600, 257], [1] * 3, 64, 1, 2), num_splits=num_splits)


def test_verified_drafts_see_no_later_token() -> None:
    compare(Paged([8, 17, 80, 70], [1, 2, 3, 8], 16, 1, 2), split_tokens=32)
    compare(Paged([8, 17, 80, 70], [8, 1, 2, 8], 16, 1, 4), num_splits=1)
    compare(Paged([40, 20], [5, 2], 16, 1, 20), num_splits=1)  # 100 rows: two tiles


@pytest.mark.parametrize("window", [1, 17, 100])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_window_ends_where_it_says(window: int, num_splits: int) -> None:
    batch = Paged([5, 70, 130], [1, 4, 1], 16, 1, 2)
    for pages in (batch.k, batch.v):  # what the window has left may be another's by now
        for row, (length, new) in enumerate(zip(batch.lengths, batch.new, strict=True)):
            for token in range(max(0, length - new - window + 1)):
                pages[batch.page_table[row, token // 16], :, token % 16] = float("nan")
    compare(batch, window=window, num_splits=num_splits, split_tokens=0 if num_splits == 1 else 48)


@pytest.mark.parametrize("num_splits", [1, 5])
def test_soft_cap_and_sinks(num_splits: int) -> None:
    batch = Paged([5, 90, 130], [1, 3, 2], 64, 2, 2, spread=3.0)
    split_tokens = 64 if num_splits > 1 else 0
    sinks = torch.linspace(-4, 9, 4)
    for options in ({"soft_cap": 5.0}, {"soft_cap": 20.0, "sinks": sinks, "window": 40}):
        compare(batch, num_splits=num_splits, split_tokens=split_tokens, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_pages_are_multiplied_by_the_scales_of_their_head(dtype: torch.dtype) -> None:
    compare(Paged([70, 1, 130], [1, 1, 2], 64, 2, 2, dtype=dtype, kv_dtype=torch.float8_e4m3fn), num_splits=1)


def test_bf16_pages_lose_nothing_to_fp32_queries() -> None:
    compare(Paged([70, 1, 100], [1] * 3, 16, kv_dtype=torch.bfloat16), num_splits=1)


def test_a_head_dim_that_is_no_power_of_two() -> None:
    compare(Paged([70, 2], [1, 2], 16, dim=48), num_splits=1)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    compare(Paged([130, 64], [1, 1], 16, 1, spread=60.0), split_tokens=32, num_splits=5)


def test_padded_entries_and_requests_of_others_are_not_touched() -> None:
    batch = Paged([40, 30, 20], [1, 1, 1], 16)
    batch.page_table[1] = 10**6  # would be out of bounds
    got = run(kernel, batch, [2, -1, 0, -1])
    assert_close(got, run(torch_form, batch, [2, 0]))
    assert (got[1] == 7).all()


@pytest.mark.parametrize("others", [[700], [100, 20]])
def test_with_fixed_spans_a_row_gets_the_same_bits_in_any_batch(others: list[int]) -> None:
    lengths = [310, *others]
    batch = Paged(lengths, [1] * len(lengths), 64, 1, 2, dim=16)
    alone = Paged([310], [1], 64, 1, 2, dim=16)
    for index in range(5):  # the same row on other pages
        batch.k[batch.page_table[0, index]] = alone.k[alone.page_table[0, index]]
        batch.v[batch.page_table[0, index]] = alone.v[alone.page_table[0, index]]
    batch.q[0] = alone.q[0]
    in_batch = run(kernel, batch, split_tokens=64, num_splits=-(-max(lengths) // 64))
    assert torch.equal(in_batch[0], run(kernel, alone, split_tokens=64, num_splits=5)[0])


def test_too_few_fixed_spans_lose_no_keys() -> None:
    compare(Paged([310], [1], 64), split_tokens=64, num_splits=2)


@pytest.mark.parametrize("group", [1, 4, 20])
def test_keys_and_values_are_read_once(meter: Meter, group: int) -> None:
    batch = Paged([300, 129], [1, 1], 64, 2, group)
    run(kernel, batch, num_splits=1)
    assert meter.read_bytes <= 1.10 * batch.ideal_read_bytes
    assert meter.written_bytes == 2 * batch.q.shape[1] * batch.dim * 4


def test_a_window_reads_what_it_shows(meter: Meter) -> None:
    batch = Paged([300, 290], [1, 1], 16)
    run(kernel, batch, num_splits=1, window=64)
    ideal = 2 * 64 * 2 * 2 * batch.dim * 4 + 2 * batch.q.shape[1] * batch.dim * 4
    assert meter.read_bytes <= 1.10 * ideal


def test_what_a_kernel_cannot_do_is_said() -> None:
    with pytest.raises(BadKernelArgument, match="head_dim=24"):
        run(kernel, Paged([3], [1], dim=24))
    with pytest.raises(BadKernelArgument, match="page_size=8"):
        run(kernel, Paged([3], [1], page_size=8))
    with pytest.raises(BadKernelArgument, match="max_queries=9"):
        run(kernel, Paged([30], [9]))
    with pytest.raises(BadKernelArgument, match="split_tokens=24"):
        run(kernel, Paged([3], [1]), split_tokens=24)
    with pytest.raises(BadKernelArgument, match="k_scale and v_scale"):
        run(kernel, Paged([3], [1]), k_scale=torch.ones(2))
    batch = Paged([3], [1])
    batch.k = batch.k.transpose(1, 2)
    with pytest.raises(BadKernelArgument):
        run(kernel, batch)
