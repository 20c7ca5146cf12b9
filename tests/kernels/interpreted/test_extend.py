"""Prefill attention against its torch form, which reads the same pages."""

import numpy as np
import pytest
import torch
from kernels.meter import Meter

from devices.cuda.arguments import attention_shape
from devices.cuda.configurations import extend_tiles
from devices.cuda.kernels import extend as kernel
from devices.torch_forms import paged_attention as torch_form

from .paged import DTYPES, Paged, assert_close, int32


def tile_queries(batch: Paged) -> int:
    shape = attention_shape(batch.q, batch.k, batch.v, batch.fresh_out(), None, *batch.scales.values())
    return extend_tiles(90, shape, batch.q.itemsize).block_m // batch.group


def run(form: object, batch: Paged, requests: list[int] | None = None, **options: object) -> torch.Tensor:
    out = batch.fresh_out()
    chosen = np.arange(len(batch.lengths), dtype=np.int32) if requests is None else np.array(requests, dtype=np.int32)
    queries = tile_queries(batch)
    tiles = kernel.plan_tiles(np.array(batch.new, np.int32), np.array(batch.lengths, np.int32), chosen, queries)
    padded = np.concatenate([tiles, [[-1], [0]]], axis=1)
    form.extend_attention(  # type: ignore[attr-defined]
        batch.q,
        batch.k,
        batch.v,
        out,
        batch.page_table,
        int32(padded[0]),
        int32(padded[1]),
        batch.query_starts,
        batch.seq_lens,
        **{"scale": batch.dim**-0.5} | batch.scales | options,
    )
    return out


def compare(batch: Paged, requests: list[int] | None = None, **options: object) -> None:
    got = run(kernel, batch, requests, **options)
    assert_close(got, run(torch_form, batch, requests, **options), batch.spread)
    assert (got[-1] == 7).all(), "the last token is no request's"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "page_size"), [(4, 16), (1, 64), (20, 128), (3, 32)])
def test_ragged_prefixes_and_new_tokens(dtype: torch.dtype, group: int, page_size: int) -> None:
    batch = Paged([37, 65, 1, 128], [37, 9, 1, 40], page_size, 1, group, dtype=dtype, fused=group == 4)
    compare(batch)


def test_rows_that_end_on_and_beside_a_page() -> None:
    compare(Paged([15, 16, 17, 48], [15, 16, 1, 33], 16, 2, 2))


@pytest.mark.parametrize("window", [1, 16, 50])
def test_a_window_ends_where_it_says(window: int) -> None:
    batch = Paged([37, 130], [37, 20], 16, 1, 2)
    for pages in (batch.k, batch.v):  # what the window has left may be another's by now
        for token in range(130 - 20 - window + 1):
            pages[batch.page_table[1, token // 16], :, token % 16] = float("nan")
    compare(batch, window=window)


def test_soft_cap_sinks_and_fp8_pages() -> None:
    batch = Paged([37, 100], [37, 20], 64, 2, 2, spread=2.0)
    compare(batch, soft_cap=5.0)
    compare(batch, sinks=torch.tensor([-3.0, 0.0, 2.0, 8.0]), window=30)
    compare(Paged([37, 100], [37, 20], 64, 2, 2, kv_dtype=torch.float8_e4m3fn))


def test_a_head_dim_that_is_no_power_of_two() -> None:
    compare(Paged([37, 40], [37, 20], 16, dim=48))


def test_requests_of_others_are_not_touched() -> None:
    batch = Paged([40, 30, 20], [20, 1, 9], 16, 1, 2)
    batch.page_table[1] = 10**6  # would be out of bounds
    got = run(kernel, batch, [2, 0])
    assert_close(got, run(torch_form, batch, [2, 0]))
    assert (got[20:21] == 7).all()


def test_tiles_cover_each_new_token_once_and_the_longest_come_first() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        new = draw.integers(1, 200, 6).astype(np.int32)
        lengths = new + draw.integers(0, 500, 6).astype(np.int32)
        chosen = draw.permutation(6)[:4].astype(np.int32)
        request, first = kernel.plan_tiles(new, lengths, chosen, 32)
        covered = sorted((int(r), int(f) + i) for r, f in zip(request, first, strict=True) for i in range(32))
        inside = [(r, i) for r, i in covered if i < new[r]]
        assert inside == sorted((int(r), i) for r in chosen for i in range(new[r]))
        keys = lengths[request] - new[request] + first
        assert (np.diff(keys) <= 0).all()
        assert len(request) == sum(-(-new[chosen] // 32)), "no tile is empty"


def test_keys_and_values_are_read_once_for_a_tile_of_queries(meter: Meter) -> None:
    batch = Paged([256], [16], 64, 2, 2)
    assert tile_queries(batch) == 16
    run(kernel, batch)
    assert meter.read_bytes <= 1.10 * batch.ideal_read_bytes
    assert meter.written_bytes == 16 * batch.q.shape[1] * batch.dim * 4


def test_a_tile_reads_no_key_that_none_of_its_rows_sees(meter: Meter) -> None:
    batch = Paged([64], [64], 16, 1, 2)
    run(kernel, batch)
    tile = 2 * 16 * batch.dim * 4  # keys and values of 16 tokens
    assert meter.read_bytes <= 1.10 * ((1 + 2 + 3 + 4) * tile + 64 * 2 * batch.dim * 4)
