"""The CPU's own kernels against the torch forms, over many shapes; skipped with the reason where none can be built.

Both get the same inputs of one dtype. What a kernel returns in bf16 may differ from the torch form by the rounding of
results and of what torch rounds on the way; fp32 results differ by the order of additions.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_paths import compiled

from devices.base import AttentionBackend, AttentionMetadata, KvLayer
from devices.cpu.device import CpuDevice
from devices.cpu.kernels import build
from devices.cpu.kernels.attention import KernelAttention
from devices.cpu.kernels.bf16 import Bf16Weight
from devices.cpu.kernels.build import KernelsUnavailable, load_kernels
from devices.cpu.kernels.operators import MAX_KERNEL_ROWS, KernelOperators
from devices.pages import page_count, ragged_slots
from devices.torch_forms.attention import PagedAttention
from devices.torch_forms.operators import TorchOperators

try:
    LIBRARY = load_kernels()
except KernelsUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FORMS = KernelOperators(LIBRARY, has_fast_bf16=False)
ORACLE = TorchOperators()

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True, params=[1, 3], ids=["1-thread", "3-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within the dtype's tolerance of the largest value."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.numel():
        scale = max(1.0, float(want.double().abs().max()))
        assert float((got.double() - want.double()).abs().max()) <= TOLERANCE[want.dtype] * scale


@dtypes
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (3, 16), (4, 17), (37, 48), (130, 576), (64, 31), (5, 4099)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_of_1_to_70_rows(dtype: torch.dtype, outs: int, ins: int, has_bias: bool) -> None:
    weight = draw(outs, ins, dtype=dtype)
    bias = draw(outs, dtype=dtype, seed=1) if has_bias else None
    x = draw(70, ins, dtype=dtype, seed=2)
    for rows in range(0, 71, 1 if ins < 1000 else 23):
        assert_near(FORMS.linear(weight, bias)(x[:rows]), ORACLE.linear(weight, bias)(x[:rows]))


@dtypes
@pytest.mark.parametrize("has_fast_bf16", [False, True])
def test_a_row_of_a_deterministic_linear_does_not_depend_on_the_others(dtype: torch.dtype, has_fast_bf16: bool) -> None:
    linear = KernelOperators(LIBRARY, has_fast_bf16, deterministic=True).linear(draw(150, 2050, dtype=dtype))
    x = draw(5 * MAX_KERNEL_ROWS, 2050, dtype=dtype, seed=1)
    whole = linear(x)
    for rows in (1, 2, 3, 31, 200):
        assert torch.equal(linear(x[5 : 5 + rows]), whole[5 : 5 + rows])


@dtypes
def test_a_linear_may_return_fp32(dtype: torch.dtype) -> None:
    weight = draw(40, 96, dtype=dtype)
    for rows in (2, MAX_KERNEL_ROWS + 1):
        x = draw(rows, 96, dtype=dtype, seed=1)
        got = FORMS.linear(weight, out_dtype=torch.float32)(x)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@dtypes
def test_a_linear_takes_rows_and_columns_of_a_view(dtype: torch.dtype) -> None:
    weight, x = draw(12, 40, dtype=dtype), draw(9, 120, dtype=dtype, seed=1)
    for view in (x[:, 40:80], x[::2, 3:43], draw(40, 9, dtype=dtype, seed=2).T):
        assert_near(FORMS.linear(weight)(view), ORACLE.linear(weight)(view))


def test_a_linear_refuses_another_dtype_or_size() -> None:
    linear = FORMS.linear(draw(4, 8, dtype=torch.float32))
    for x in (draw(2, 8, dtype=torch.bfloat16), draw(2, 7, dtype=torch.float32)):
        with pytest.raises(ValueError, match="does not fit"):
            linear(x)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What multiplies pairs of bf16, without this processor's instructions."""
    return compiled("plain", tmp_path_factory.mktemp("plain"), ["bf16", "attention"])


@pytest.mark.parametrize("is_plain", [False, True], ids=["native", "plain"])
@pytest.mark.parametrize(("outs", "ins"), [(1, 2), (31, 16), (32, 48), (130, 576), (64, 30), (5, 4098)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bf16_panels_of_every_shape(outs: int, ins: int, has_bias: bool, is_plain: bool, plain: ctypes.CDLL) -> None:
    weight = draw(outs, ins, dtype=torch.bfloat16)
    bias = draw(outs, dtype=torch.bfloat16, seed=1) if has_bias else None
    held = Bf16Weight(plain if is_plain else LIBRARY, weight)
    linear, rounded = held.linear(bias, torch.float32), held.linear(bias)
    x = draw(70, ins, dtype=torch.bfloat16, seed=2)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    whole = linear(x)
    for rows in (0, 1, 2, 7, 8, 13, 70):
        got = linear(x[70 - rows :])
        assert torch.equal(got, whole[70 - rows :])
        assert torch.equal(rounded(x[70 - rows :]), got.bfloat16())
        torch.testing.assert_close(got.double(), want[70 - rows :], rtol=1e-5, atol=1e-5 * ins)


def test_bf16_panels_give_rows_and_refuse_what_does_not_fit() -> None:
    weight = draw(70, 10, dtype=torch.bfloat16)
    held = Bf16Weight(LIBRARY, weight)
    ids = torch.tensor([69, 0, 33, 33])
    assert torch.equal(held.rows(ids), weight[ids])
    for wrong in (-1, 70):
        with pytest.raises(IndexError, match="of a weight with 70"):
            held.rows(torch.tensor([0, wrong]))
    view = draw(6, 30, dtype=torch.bfloat16, seed=1)[::2, 5:15]
    assert torch.equal(held.linear()(view), held.linear()(view.contiguous()))
    for x in (draw(2, 10, dtype=torch.float32), draw(2, 12, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="does not fit"):
            held.linear()(x)


def test_rows_of_odd_size_take_the_other_form() -> None:
    weight, x = draw(6, 31, dtype=torch.bfloat16), draw(3, 31, dtype=torch.bfloat16, seed=1)
    assert_near(KernelOperators(LIBRARY, has_fast_bf16=True).linear(weight)(x), ORACLE.linear(weight)(x))


@dtypes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype, value: float) -> None:
    x = draw(7, 64, dtype=dtype)
    x[3, 9] = value
    got = FORMS.linear(draw(33, 64, dtype=dtype, seed=1))(x)
    assert not torch.isfinite(got[3]).any()
    assert torch.isfinite(got[[0, 1, 2, 4, 5, 6]]).all()
    normed, total = FORMS.add_rms_norm(x, torch.ones_like(x), draw(64, dtype=dtype, seed=2), 1e-5)
    for result in (normed, total, FORMS.silu_mul(x)):
        assert not torch.isfinite(result[3]).all()
        assert torch.isfinite(result[[0, 1, 2, 4, 5, 6]]).all()


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("size", [1, 7, 48, 576, 1031])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = draw(rows, size, dtype=dtype), draw(rows, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=dtype, seed=2)
    assert_near(FORMS.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5))
    for got, want in zip(
        FORMS.add_rms_norm(x, residual, weight, 1e-5), ORACLE.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert_near(got, want)


@dtypes
def test_a_norm_of_heads_in_a_wider_row(dtype: torch.dtype) -> None:
    heads = draw(6, 5, 24, dtype=dtype)[:, 1:3]
    weight = draw(24, dtype=dtype, seed=1)
    assert_near(FORMS.rms_norm(heads, weight, 1e-6), ORACLE.rms_norm(heads, weight, 1e-6))


@dtypes
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 37), (33, 1536)])
def test_the_gate_of_an_mlp(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = draw(rows, 2 * size, dtype=dtype) * 30
    assert_near(FORMS.silu_mul(gate_up), ORACLE.silu_mul(gate_up))


@dtypes
@pytest.mark.parametrize("dim", [2, 8, 64, 96, 128])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_rotation_of_heads_in_a_wider_row(dtype: torch.dtype, dim: int, tokens: int) -> None:
    x = draw(tokens, 11 * dim, dtype=dtype)[:, : 7 * dim].view(tokens, 7, dim)
    angles = draw(tokens, dim // 2, dtype=torch.float32, seed=1)
    assert_near(FORMS.rotate(x, angles.cos(), angles.sin()), ORACLE.rotate(x, angles.cos(), angles.sin()))


class Pages:
    """A step on shuffled pages; keys and values of earlier tokens of the window are there, every other slot is NaN."""

    def __init__(
        self,
        lengths: list[int],
        news: list[int],
        heads: tuple[int, int],
        dim: int,
        page_size: int,
        kv: torch.dtype,
        window: int | None = None,
    ) -> None:
        self.heads, self.dim = heads, dim
        num_pages = [page_count(n, page_size) for n in lengths]
        ids = np.random.default_rng(0).permutation(sum(num_pages)).astype(np.int32) + 1
        tables = np.zeros((len(lengths), max(num_pages, default=0) + 1), dtype=np.int32)
        for row, part in enumerate(np.split(ids, np.cumsum(num_pages))[:-1]):
            tables[row, : len(part)] = part
        seq_lens, query_lens = np.array(lengths, dtype=np.int32), np.array(news, dtype=np.int32)
        past = seq_lens - query_lens
        slots = ragged_slots(tables, past, query_lens, page_size)
        self.step = AttentionMetadata(query_lens, seq_lens, torch.from_numpy(tables), slots, page_size)
        self.kv = kv
        shape = (sum(num_pages) + 1, heads[1], page_size, dim)
        self.k, self.v = (torch.full(shape, float("nan")).to(kv) for _ in "kv")
        gone = np.zeros_like(past) if window is None else np.maximum(past + 1 - window, 0)
        old = ragged_slots(tables, gone, past - gone, page_size)
        for seed, side in enumerate((self.k, self.v)):
            side[old // page_size, :, old % page_size] = draw(len(old), heads[1], dim, dtype=kv, seed=10 + seed)

    def run(
        self, backend: AttentionBackend, dtype: torch.dtype, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step's result, and keys and values behind it; queries are `scale` times as large."""
        tokens, (num_heads, num_kv_heads) = len(self.step.slots), self.heads
        row = draw(tokens, num_heads + 2 * num_kv_heads, self.dim, dtype=dtype, seed=5)
        q, k, v = torch.split(row, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        q = q * scale
        backend.plan(self.step)
        if not isinstance(backend, KernelAttention) or not is_laid_out(backend, dtype, self.k):
            layer = KvLayer(self.k.clone(), self.v.clone(), 0)
            return backend.forward(q, k, v, layer), layer.k, layer.v
        layer = KvLayer(*laid_out(self.k, self.v), 0)
        return backend.forward(q, k, v, layer), *as_tokens(layer.k, layer.v)


def is_laid_out(backend: KernelAttention, dtype: torch.dtype, pages: torch.Tensor) -> bool:
    """Whether the kernel keeps pages [pages, heads, page_size, dim] in the order of attention_pairs.h."""
    lanes = ctypes.c_int.in_dll(LIBRARY, "packed_lanes").value
    is_pairs = backend._functions[dtype, dtype].__name__ == "attention_pairs" and dtype == pages.dtype == torch.bfloat16
    return is_pairs and pages.shape[2] % lanes == 0 and pages.shape[3] % lanes == 0


def laid_out(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [pages, heads, page_size, dim] in that order, of the same shape."""
    pages, heads, page_size, dim = k.shape
    keys, values = k.view(pages, heads, page_size, dim // 2, 2), v.view(pages, heads, page_size // 2, 2, dim)
    return keys.transpose(2, 3).reshape(k.shape), values.transpose(3, 4).reshape(v.shape)


def as_tokens(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `laid_out`."""
    pages, heads, page_size, dim = k.shape
    keys, values = k.view(pages, heads, dim // 2, page_size, 2), v.view(pages, heads, page_size // 2, dim, 2)
    return keys.transpose(2, 3).reshape(k.shape), values.transpose(3, 4).reshape(v.shape)


STEPS = {
    "decode": ([1, 16, 17, 33, 130, 64, 65], [1] * 7),
    "prefill": ([70, 1, 33], [70, 1, 33]),
    "chunk and decode": ([150, 40, 97], [64, 1, 30]),
    "nothing": ([], []),
}


FORMS_OF_ATTENTION = [(dtype, kv, False) for dtype in DTYPES for kv in DTYPES] + [
    (torch.bfloat16, torch.bfloat16, True)
]


@pytest.mark.parametrize(("dtype", "kv", "has_fast_bf16"), FORMS_OF_ATTENTION, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 2), (16, 2), (5, 1)], ids=str)
def test_attention_over_pages(
    dtype: torch.dtype, kv: torch.dtype, has_fast_bf16: bool, step: str, heads: tuple[int, int]
) -> None:
    shapes = itertools.product((32, 64, 96, 128, 8), (1, 16, 128), (None, 40))
    for dim, page_size, window in list(shapes)[:: 3 if step == "decode" else 7]:
        pages = Pages(*STEPS[step], heads, dim, page_size, kv, window)
        got, *got_kv = pages.run(KernelAttention(LIBRARY, has_fast_bf16, *heads, dim, window), dtype)
        if not STEPS[step][0]:
            assert got.shape == (0, heads[0], dim)
            continue
        # Torch rounds scores and weights to bf16; from fp32 queries it computes what the kernel should.
        want, *want_kv = pages.run(_exact(PagedAttention(*heads, dim, window)), dtype)
        assert_near(got, want.to(dtype))
        for one, other in zip(got_kv, want_kv, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("step", ["decode", "chunk and decode"])
def test_attention_of_pairs_without_their_instruction(step: str, plain: ctypes.CDLL) -> None:
    for dim, page_size, window in itertools.product((32, 96), (1, 16), (None, 40)):
        pages = Pages(*STEPS[step], (9, 3), dim, page_size, torch.bfloat16, window)
        got, *_ = pages.run(KernelAttention(plain, True, 9, 3, dim, window), torch.bfloat16)
        want, *_ = pages.run(_exact(PagedAttention(9, 3, dim, window)), torch.bfloat16)
        assert_near(got, want.bfloat16())


@pytest.mark.parametrize(("dtype", "kv", "has_fast_bf16"), FORMS_OF_ATTENTION, ids=str)
def test_scores_far_apart_do_not_overflow(dtype: torch.dtype, kv: torch.dtype, has_fast_bf16: bool) -> None:
    pages = Pages([150, 70], [1, 70], (3, 3), 64, 16, kv)
    got, *_ = pages.run(KernelAttention(LIBRARY, has_fast_bf16, 3, 3, 64), dtype, scale=100.0)
    want, *_ = pages.run(_exact(PagedAttention(3, 3, 64)), dtype, scale=100.0)
    assert_near(got, want.to(dtype))


def _exact(backend: PagedAttention) -> AttentionBackend:
    """The backend with queries in fp32; keys and values as they come."""
    forward = backend.forward
    backend.forward = lambda q, k, v, layer: forward(q.float(), k, v, layer)  # type: ignore[method-assign]
    return backend


@pytest.mark.parametrize(
    ("dtype", "has_fast_bf16"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("window", [None, 45])
def test_what_a_token_gets_depends_on_nothing_but_its_row(
    dtype: torch.dtype, has_fast_bf16: bool, window: int | None
) -> None:
    heads, dim = (6, 2), 64
    whole = Pages([200], [200], heads, dim, 16, dtype)
    want, k, v = whole.run(KernelAttention(LIBRARY, has_fast_bf16, *heads, dim, window), dtype)
    for page_size in (1, 16, 128):
        alone = Pages([200], [1], heads, dim, page_size, dtype)
        table = alone.step.page_tables[0].long()
        slots = torch.arange(200)
        source = whole.step.page_tables[0].long()[slots // 16], slots % 16
        for side, full in ((alone.k, k), (alone.v, v)):
            side[table[slots // page_size], :, slots % page_size] = full[source[0], :, source[1]]
        row = draw(200, heads[0] + 2 * heads[1], dim, dtype=dtype, seed=5)[199:]
        backend = KernelAttention(LIBRARY, has_fast_bf16, *heads, dim, window)
        backend.plan(alone.step)
        pages = laid_out(alone.k, alone.v) if is_laid_out(backend, dtype, alone.k) else (alone.k, alone.v)
        got = backend.forward(row[:, :6], row[:, 6:8], row[:, 8:], KvLayer(*pages, 0))
        assert torch.equal(got[0], want[199])


def test_the_library_is_built_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_kernels(tmp_path)
    [built] = tmp_path.iterdir()
    load_kernels.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    second = load_kernels(tmp_path)
    assert first._name == second._name == str(built)


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    root = str(Path(torch.__file__).parent)
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert [path for path in loaded if path.startswith(root)]
    assert not [path for path in loaded if path.startswith(("/usr", "/lib"))]


@pytest.mark.parametrize("missing", ["a compiler", "a source that compiles", "a folder"])
def test_without_kernels_the_device_computes_in_torch_and_says_why(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    if missing == "a compiler":
        monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    elif missing == "a folder":
        folder.write_text("a file in its place")
    else:
        (tmp_path / "bad.cpp").write_text("int f( { }")
        monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    load_kernels.cache_clear()
    monkeypatch.setattr("devices.cpu.device.load_kernels", lambda: load_kernels(folder))
    device = CpuDevice()
    load_kernels.cache_clear()
    assert isinstance(device.operators, TorchOperators)
    assert isinstance(device.attention(4, 2, 8), PagedAttention)
    reasons = {"a compiler": "no no-such-compiler", "a folder": "exists", "a source that compiles": "error: "}
    assert "plain torch, slower, because" in device.description
    assert reasons[missing] in device.description


def test_plain_torch_can_be_asked_for() -> None:
    device = CpuDevice("torch")
    assert isinstance(device.operators, TorchOperators)
    assert isinstance(device.attention(4, 2, 8), PagedAttention)
    assert device.description.endswith("kernels: plain torch, as asked")


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001], ids=hex)
def test_a_nan_of_any_bits_is_stored_as_nan(bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    k = nan.expand(1, 1, 16).contiguous()
    pages = Pages([3], [1], (1, 1), 16, 16, torch.bfloat16)
    backend = KernelAttention(LIBRARY, False, 1, 1, 16)
    backend.plan(pages.step)
    backend.forward(torch.ones(1, 1, 16), k, k, KvLayer(pages.k, pages.v, 0))
    page = int(pages.step.page_tables[0, 0])
    assert torch.isnan(pages.k[page, 0, 2]).all()
    assert torch.isfinite(pages.k[page, 0, :2]).all()
