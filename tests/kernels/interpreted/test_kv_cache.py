"""Writing and copying KV: against loops, and the torch forms against the same."""

import pytest
import torch
from kernels.meter import Meter

from devices.cuda.arguments import BadKernelArgument
from devices.cuda.kernels import kv_cache as kernel
from devices.torch_forms import kv_cache as torch_form

FORMS = pytest.mark.parametrize("form", [kernel, torch_form], ids=["kernel", "torch"])
FP8 = torch.float8_e4m3fn


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def write(
    form: object, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, dim: int, page: int, **scales: object
) -> None:
    draw = torch.Generator().manual_seed(0)
    fused = (torch.randn(6, 3 * heads, dim, generator=draw) * 3).to(dtype)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    k_pages, v_pages = (torch.full((5, heads, page, dim), -7.0).to(kv_dtype) for _ in "kv")
    slots = [2 * page + 1, 5 * page - 1, -1, 0, page - 1, -1]
    want_k, want_v = k_pages.clone(), v_pages.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            for want, new, name in ((want_k, k, "k_scale"), (want_v, v, "v_scale")):
                scale = scales.get(name, torch.ones(heads))
                scaled = (new[token].float() * (1 / scale)[:, None]).clamp(-448, 448) if scales else new[token]
                want[slot // page, :, slot % page] = scaled.to(kv_dtype)
    form.write_kv(k, v, k_pages, v_pages, torch.tensor(slots, dtype=torch.int32), **scales)  # type: ignore[attr-defined]
    assert torch.equal(bits(k_pages), bits(want_k))
    assert torch.equal(bits(v_pages), bits(want_v))


@FORMS
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_tokens_land_in_their_slots_and_nowhere_else(form: object, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """B024: a padding slot is no negative index; the last slot of the last page and page 0 keep what they held."""
    write(form, dtype, kv_dtype, heads=2, dim=32, page=16)
    write(form, dtype, kv_dtype, heads=3, dim=48, page=64)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_is_scaled_for_each_head_and_held_within_its_range(form: object, dtype: torch.dtype) -> None:
    scales = {"k_scale": torch.tensor([0.001, 1.0, 3.0]), "v_scale": torch.tensor([2.0, 0.3, 1e-4])}
    write(form, dtype, FP8, heads=3, dim=32, page=16, **scales)


@FORMS
def test_a_nan_is_stored_as_one_in_fp8(form: object) -> None:
    k = torch.full((1, 1, 16), float("nan"))
    pages = torch.zeros(1, 1, 16, 16).to(FP8)
    scale = torch.ones(1)
    form.write_kv(k, k, pages, pages.clone(), torch.zeros(1, dtype=torch.int32), k_scale=scale, v_scale=scale)  # type: ignore[attr-defined]
    assert pages[0, 0, 0].float().isnan().all()


def test_a_slot_far_behind_two_gib_is_not_folded_back_by_int32() -> None:
    k, pages = torch.zeros(1, 8, 128), torch.zeros(1, 8, 128, 128)
    slot = (1 << 20) * 128
    arguments = (k, k, pages, pages, torch.tensor([slot], dtype=torch.int32), pages, pages, 1024, 1024)
    with pytest.raises(Exception, match=f"store of 4 bytes at address {pages.data_ptr() + slot * 8 * 128 * 4},"):
        kernel.write_kernel[(1,)](*arguments, HEADS=8, BLOCK_H=8, DIM=128, BLOCK_DIM=128, PAGE=128, HAS_SCALES=False)


@FORMS
def test_a_fork_copies_whole_pages(form: object) -> None:
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(7, 3, 16, 48, generator=draw) for _ in "kv")
    want_k, want_v = k.clone(), v.clone()
    for source, target in ((1, 2), (1, 6), (4, 0)):
        want_k[target], want_v[target] = k[source], v[source]
    sources, targets = (torch.tensor(ids, dtype=torch.int32) for ids in ([1, 1, 4], [2, 6, 0]))
    form.copy_pages(k, v, sources, targets)  # type: ignore[attr-defined]
    assert torch.equal(k, want_k)
    assert torch.equal(v, want_v)


def test_a_write_moves_each_number_once(meter: Meter) -> None:
    write(kernel, torch.bfloat16, torch.bfloat16, heads=8, dim=64, page=16)
    numbers = 4 * 2 * 8 * 64
    assert meter.written_bytes == numbers * 2
    assert meter.read_bytes <= 1.10 * numbers * 2


def test_what_the_kernel_cannot_do_is_said() -> None:
    k, pages, slots = torch.zeros(2, 1, 16), torch.zeros(1, 1, 16, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BadKernelArgument, match="int64"):
        kernel.write_kv(k, k, pages, pages, slots.long())
    with pytest.raises(BadKernelArgument, match=r"k must be of shape \(3, 1, 16\)"):
        kernel.write_kv(k, k, pages, pages, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(BadKernelArgument, match="k_scale"):
        kernel.write_kv(k, k, pages.to(FP8), pages.to(FP8), slots)
    with pytest.raises(BadKernelArgument, match="contiguous"):
        kernel.write_kv(k, k, pages.transpose(2, 3), pages.transpose(2, 3), slots)
    with pytest.raises(BadKernelArgument, match="v_pages must be of"):
        kernel.write_kv(k, k, pages, pages.half(), slots)
