"""Paged attention of every device against dense attention: one body, every device and page size.

A request's tokens are computed in any way (at once, in chunks, one by one, mixed with others) on pages in a shuffled
order; what comes out must be what dense fp32 attention over its own tokens gives. Whatever lies in a page behind a
row's end, in the padding page or in pages of others is NaN: it must not reach a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from devices.base import AttentionMetadata, Device, KernelChoice, KvLayer
from devices.page_pool import PADDING_PAGE
from devices.pages import page_count, ragged_slots
from devices.registry import DEVICE_NAMES, try_open

DEFAULT_DEVICES = ("cpu", "npu-sim")

HEADS = [(4, 4), (4, 2), (6, 2), (8, 1)]
HEAD_DIM = 16


def cases(asked: Sequence[str] | None) -> list[object]:
    """Every page size of the devices asked for; the CPU with its kernels and with its plain torch forms. A device that
    does not open is one case, skipped with its reason.

    When nobody asks, an emulator, slow as it is, has its default page size only.
    """
    found: list[object] = []
    for name in asked or DEVICE_NAMES:
        opened = try_open(name) if asked or name in DEFAULT_DEVICES else "not asked for (--device)"
        if isinstance(opened, str):
            skipped = pytest.mark.skip(reason=f"{name}: {opened}")
            found.append(pytest.param((name, "auto", 0), id=name, marks=skipped))
            continue
        capabilities = opened.capabilities
        sizes = capabilities.page_sizes if asked or name == "cpu" else (capabilities.default_page_size,)
        found += [
            pytest.param((name, kernels, size), id=f"{name}-{kernels}-page{size}")
            for kernels in (("auto", "torch") if name == "cpu" else ("auto",))
            for size in sizes
        ]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(metafunc.config.getoption("--device")))


@dataclass(frozen=True)
class Exactness:
    """What a device computes best with, and how far its results may be off."""

    dtype: torch.dtype
    error: float


def exactness(device: Device) -> Exactness:
    """fp32 where the device has it, else fp16, whose mantissa is longer than bf16's."""
    if "float32" in device.capabilities.dtypes:
        return Exactness(torch.float32, 1e-5)
    return Exactness(torch.float16, 4e-3)


@pytest.fixture
def device(case: tuple[str, KernelChoice, int]) -> Device:
    opened = try_open(*case[:2])
    assert not isinstance(opened, str)
    return opened


@pytest.fixture
def page_size(case: tuple[str, KernelChoice, int]) -> int:
    return case[2]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of `[tokens, heads, dim]`, in double precision, head by head and query by query."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        for i in range(q.shape[0]):
            seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
            scores = keys[seen] @ q[i, head] * q.shape[2] ** -0.5
            out[i, head] = torch.softmax(scores, 0) @ values[seen]
    return out


@dataclass
class Requests:
    """Requests on shuffled pages of one layer; everything that nobody wrote is NaN."""

    device: Device
    page_size: int
    lengths: Sequence[int]
    heads: tuple[int, int] = (4, 2)
    kv_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    seed: int = 0
    window: int | None = None
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_heads, num_kv_heads = self.heads
        draw = torch.Generator().manual_seed(self.seed)

        def tokens(heads: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, HEAD_DIM, generator=draw) for n in self.lengths]

        self.exact = exactness(self.device)
        self.kv_dtype = self.kv_dtype or self.exact.dtype
        dtype = self.exact.dtype if self.dtype is None else self.dtype
        self.q = [t.to(dtype) for t in tokens(num_heads)]
        self.k, self.v = ([t.to(self.kv_dtype) for t in tokens(num_kv_heads)] for _ in "kv")
        self.out = [torch.full_like(q, float("nan")) for q in self.q]
        self.done = [0] * len(self.lengths)
        num_pages = [page_count(n, self.page_size) for n in self.lengths]
        ids = np.random.default_rng(self.seed).permutation(sum(num_pages)).astype(np.int32) + 1
        self.tables = np.full((len(self.lengths), max(num_pages) + 1), PADDING_PAGE, dtype=np.int32)
        for row, pages in enumerate(np.split(ids, np.cumsum(num_pages)[:-1])):
            self.tables[row, : len(pages)] = pages
        self.layer: KvLayer = self.device.kv_layer(
            0, sum(num_pages) + 1, self.page_size, num_kv_heads, HEAD_DIM, self.kv_dtype
        )
        self.layer.k.fill_(float("nan"))
        self.layer.v.fill_(float("nan"))
        self.backend = self.device.attention(num_heads, num_kv_heads, HEAD_DIM, window=self.window)

    def step(self, news: dict[int, int]) -> None:
        """One step: request -> number of its next tokens, in this order."""
        rows = list(news)
        lengths = np.array([news[row] for row in rows], dtype=np.int32)
        starts = np.array([self.done[row] for row in rows], dtype=np.int32)
        tables = self.tables[rows]
        slots = ragged_slots(tables, starts, lengths, self.page_size)
        on_device = torch.from_numpy(tables).to(self.device.torch_device)
        self.backend.plan(AttentionMetadata(lengths, starts + lengths, on_device, slots, self.page_size))
        spans = [slice(int(start), int(start + n)) for start, n in zip(starts, lengths, strict=True)]
        q, k, v = (
            torch.cat([column[row][span] for row, span in zip(rows, spans, strict=True)]).to(self.device.torch_device)
            for column in (self.q, self.k, self.v)
        )
        got = self.backend.forward(q, k.to(q.dtype), v.to(q.dtype), self.layer)
        assert got.dtype == q.dtype
        assert got.shape == q.shape
        for row, span, part in zip(rows, spans, got.cpu().split(lengths.tolist()), strict=True):
            self.out[row][span] = part
            self.done[row] = span.stop

    def assert_right(self) -> None:
        assert self.largest_error() < self.exact.error

    def largest_error(self) -> float:
        """Over everything computed so far."""
        errors = [0.0]
        for row, done in enumerate(self.done):
            if done:
                want = dense(self.q[row][:done], self.k[row][:done], self.v[row][:done], self.window)
                got = self.out[row][:done].double()
                assert torch.isfinite(got).all(), f"request {row} of {self.lengths[row]} tokens is not finite"
                errors.append(float((got - want).abs().max()))
        return max(errors)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_of_rows_of_very_different_lengths(device: Device, page_size: int, heads: tuple[int, int]) -> None:
    requests = Requests(device, page_size, [1, 150, 2, 37, page_size, page_size + 1], heads)
    requests.step(dict(enumerate(requests.lengths)))
    requests.assert_right()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_token_by_token_from_the_first(device: Device, page_size: int, heads: tuple[int, int]) -> None:
    requests = Requests(device, page_size, [20, 20, 20], heads)
    for _ in range(20):
        requests.step({0: 1, 1: 1, 2: 1})
    requests.assert_right()


def test_decode_of_rows_of_very_different_lengths(device: Device, page_size: int) -> None:
    lengths = [2, 3, page_size + 1, 3 * page_size, 3 * page_size + 2, 4 * page_size, 130, 7]
    requests = Requests(device, page_size, lengths)
    requests.step({row: n - 1 for row, n in enumerate(lengths)})
    requests.step(dict.fromkeys(range(len(lengths)), 1))
    assert requests.done == lengths
    requests.assert_right()


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_chunks_equal_one_prefill(device: Device, page_size: int, chunk: int) -> None:
    requests = Requests(device, page_size, [100, 33])
    while requests.done != [100, 33]:
        left = {row: n - requests.done[row] for row, n in enumerate(requests.lengths)}
        requests.step({row: min(chunk, n) for row, n in left.items() if n})
    requests.assert_right()


def test_a_mixed_step_of_prefill_chunk_verify_and_decode(device: Device, page_size: int) -> None:
    requests = Requests(device, page_size, [40, 90, 70, 1, 131])
    requests.step({4: 130, 1: 50, 2: 60})
    requests.step({0: 40, 1: 40, 4: 1, 2: 6, 3: 1})
    requests.assert_right()


def test_a_request_that_sits_a_step_out_is_not_touched(device: Device, page_size: int) -> None:
    requests = Requests(device, page_size, [20, 20])
    requests.step({0: 10, 1: 10})
    for _ in range(10):
        requests.step({1: 1})
    requests.step({0: 10})
    requests.assert_right()


@pytest.mark.parametrize("window", [1, 2, 16, 33])
def test_a_window_ends_where_it_says_in_prefill_chunk_verify_and_decode(
    device: Device, page_size: int, window: int
) -> None:
    requests = Requests(device, page_size, [70, 20, 2, 50, 33], window=window)
    requests.step({0: 40, 1: 19, 3: 34})
    requests.step({0: 25, 1: 1, 2: 2, 3: 6, 4: 32})
    for _ in range(5):
        requests.step({0: 1, 3: 1})
    requests.step({3: 5, 4: 1})
    assert requests.done == list(requests.lengths)
    requests.assert_right()


@pytest.mark.parametrize("window", [3, 40])
def test_a_chunk_whose_window_begins_pages_behind_the_first(device: Device, page_size: int, window: int) -> None:
    requests = Requests(device, page_size, [3 * page_size + 9, 2 * page_size + 50], window=window)
    requests.step({0: 3 * page_size - 2, 1: 2 * page_size + 1})
    requests.step({0: 7, 1: 45})
    requests.step({0: 1, 1: 3})
    requests.assert_right()


def test_a_window_as_wide_as_the_row_hides_nothing(device: Device, page_size: int) -> None:
    wide, open_ended = (Requests(device, page_size, [40, 9], window=window) for window in (40, None))
    for requests in (wide, open_ended):
        requests.step({0: 30, 1: 8})
        requests.step({0: 10, 1: 1})
    torch.testing.assert_close(torch.cat(wide.out), torch.cat(open_ended.out), atol=wide.exact.error / 10, rtol=1e-6)


def test_pages_that_the_window_let_go_never_reach_a_result(device: Device, page_size: int) -> None:
    requests = Requests(device, page_size, [3 * page_size + 2, 4 * page_size + 2], window=2)
    requests.step({0: 3 * page_size + 1, 1: 4 * page_size + 1})
    for row in range(2):
        gone = torch.from_numpy(requests.tables[row, :2].astype(np.int64))
        requests.layer.k[gone] = float("nan")
        requests.layer.v[gone] = float("nan")
    requests.step({0: 1, 1: 1})
    requests.assert_right()


def test_what_lies_behind_a_rows_end_and_in_the_padding_page_never_reaches_a_result(
    device: Device, page_size: int
) -> None:
    """B024: a neighbour's NaN, a failed request's NaN in a page given again, and a poisoned padding page."""
    lengths = [3 * page_size, 4 * page_size, 2 * page_size + 1]
    requests = Requests(device, page_size, lengths)
    requests.step({row: n - 1 for row, n in enumerate(lengths)})
    requests.step({0: 1, 1: 1, 2: 1})
    assert torch.isnan(requests.layer.k[PADDING_PAGE]).all()
    requests.assert_right()


def test_a_table_that_names_pages_behind_the_rows_end_reads_none_of_them(device: Device, page_size: int) -> None:
    """A row keeps reserved pages behind its last token, and a table may show a former owner's there."""
    lengths = [3 * page_size, 4 * page_size]
    clean, dirty = (Requests(device, page_size, lengths) for _ in range(2))
    dirty.tables[0, 3:] = dirty.tables[1, 3]
    for requests in (clean, dirty):
        requests.step({row: n - 1 for row, n in enumerate(lengths)})
        requests.step({0: 1, 1: 1})
        requests.assert_right()
    assert torch.equal(torch.cat(clean.out), torch.cat(dirty.out))


def test_a_failed_request_ends_alone(device: Device, page_size: int) -> None:
    requests = Requests(device, page_size, [30, 30, 30])
    requests.v[1][5] = float("nan")
    requests.step({0: 29, 1: 29, 2: 29})
    requests.step({0: 1, 1: 1, 2: 1})
    assert torch.isnan(requests.out[1][5:]).all()
    requests.done[1] = 0
    requests.assert_right()


def test_a_step_writes_its_own_slots_and_no_other(device: Device, page_size: int) -> None:
    requests = Requests(device, page_size, [page_size + 2, 5])
    requests.step({0: page_size + 2, 1: 5})
    written = sum(int(torch.isfinite(side).sum()) for side in (requests.layer.k, requests.layer.v))
    assert written == 2 * sum(requests.lengths) * 2 * HEAD_DIM


def test_a_batch_gives_each_request_what_it_gets_alone(device: Device, page_size: int) -> None:
    together = Requests(device, page_size, [50, 9, 33])
    alone = Requests(device, page_size, [50, 9, 33])
    together.step({0: 49, 1: 8, 2: 32})
    together.step({0: 1, 1: 1, 2: 1})
    for row, n in enumerate(alone.lengths):
        alone.step({row: n - 1})
        alone.step({row: 1})
    for one, other in zip(together.out, alone.out, strict=True):
        torch.testing.assert_close(one, other, atol=alone.exact.error / 10, rtol=1e-5)


def test_bf16_kv_is_as_exact_as_bf16_allows(device: Device, page_size: int) -> None:
    if "bfloat16" not in device.capabilities.kv_dtypes:
        pytest.skip(f"{device.name} does not declare bf16 KV")
    if "float32" not in device.capabilities.dtypes:
        pytest.skip(f"{device.name} has no fp32 queries")
    requests = Requests(device, page_size, [100, 3, 40], kv_dtype=torch.bfloat16)
    requests.step({0: 99, 1: 2, 2: 39})
    requests.step({0: 1, 1: 1, 2: 1})
    assert requests.largest_error() < 1e-5, "KV is rounded once; the products are fp32 as the queries are"


def test_bf16_queries_stay_within_bf16(device: Device, page_size: int) -> None:
    if "bfloat16" not in device.capabilities.dtypes:
        pytest.skip(f"{device.name} does not declare bf16")
    requests = Requests(device, page_size, [70, 3], kv_dtype=torch.bfloat16, dtype=torch.bfloat16)
    requests.step({0: 69, 1: 2})
    requests.step({0: 1, 1: 1})
    assert requests.largest_error() < 3e-2


def test_a_long_prefill_is_cut_into_blocks_of_queries_without_a_seam(device: Device, page_size: int) -> None:
    for window in (None, 40):
        requests = Requests(device, page_size, [600], heads=(2, 1), window=window)
        requests.step({0: 30})
        requests.step({0: 570})
        requests.assert_right()


LONG = [137, 256, 511, 512, 513, 600, 1000, 2047, 2048, 2049, 4095]
"""About the ends of masks that an operator may ignore in silence: a row's of 512 keys, a triangle's of 2,048."""


@pytest.mark.parametrize("window", [None, 600])
def test_every_length_of_a_row_is_masked_right_alone_and_in_a_batch(
    device: Device, page_size: int, window: int | None
) -> None:
    """B063, B064: the last query of a prefill and the token decoded behind it."""
    if page_size < device.capabilities.default_page_size:
        pytest.skip("long rows are about masks, not pages: the default page and larger ones show the same")
    requests = Requests(device, page_size, LONG, heads=(2, 1), window=window)
    requests.step({row: n - 1 for row, n in enumerate(LONG)})
    batched = device.attention(2, 1, HEAD_DIM, window=window)
    for rows in ([*range(len(LONG))], *([row] for row in range(len(LONG)))):
        requests.done, requests.backend = [n - 1 for n in LONG], batched
        requests.step(dict.fromkeys(rows, 1))
        for row in rows:
            for at in (LONG[row] - 2, LONG[row] - 1):
                error = (requests.out[row][at].double() - dense_at(requests, row, at)).abs().max()
                assert error < requests.exact.error, (
                    f"position {at} of {LONG[row]} in {len(rows)} rows is off by {error}"
                )


def dense_at(requests: Requests, row: int, at: int) -> torch.Tensor:
    """As `dense`, for the query at one position and a single KV head; [heads, dim]."""
    seen = slice(0 if requests.window is None else max(0, at + 1 - requests.window), at + 1)
    q, k, v = (requests.q[row][at].double(), requests.k[row][seen, 0].double(), requests.v[row][seen, 0].double())
    return torch.softmax(q @ k.T * HEAD_DIM**-0.5, 1) @ v


def test_scores_that_16_bits_cannot_hold_are_right(device: Device, page_size: int) -> None:
    """B078, B062: products of queries and keys go to 600,000, where the largest number of fp16 is 65,504."""
    requests = Requests(device, page_size, [70, 33])
    requests.q, requests.k = ([tensor * 200 for tensor in column] for column in (requests.q, requests.k))
    requests.step({0: 60, 1: 32})
    requests.step({0: 1, 1: 1})
    requests.step({0: 9})
    requests.assert_right()


def test_many_layers_share_one_plan(device: Device, page_size: int) -> None:
    first, second = Requests(device, page_size, [40, 20]), Requests(device, page_size, [40, 20], seed=0)
    first.step({0: 40, 1: 20})
    q, k, v = (torch.cat(column).to(device.torch_device) for column in (second.q, second.k, second.v))
    again = first.backend.forward(q, k, v, second.layer)
    assert torch.equal(again.cpu(), torch.cat(first.out))
