"""Latent (MLA) decode against its torch form."""

import pytest
import torch
from kernels.meter import Meter

from devices.cuda.arguments import BadKernelArgument
from devices.cuda.kernels import latent as kernel
from devices.torch_forms import paged_attention as torch_form

from .paged import Paged, assert_close, int32


def run(form: object, batch: Paged, latent: int, requests: list[int] | None = None, **options: object) -> torch.Tensor:
    out = torch.full((len(batch.q), batch.group, latent), 7.0, dtype=batch.dtype)
    rows = list(range(len(batch.lengths))) if requests is None else requests
    chosen: dict[str, object] = {"max_queries": max(batch.new), "scale": 0.1, "num_splits": 1}
    form.decode_latent_attention(  # type: ignore[attr-defined]
        batch.q,
        batch.k,
        out,
        batch.page_table,
        int32(rows),
        batch.query_starts,
        batch.seq_lens,
        **chosen | options,
    )
    return out


def latent_batch(lengths: list[int], new: list[int], heads: int, **options: object) -> Paged:
    return Paged(lengths, new, num_kv_heads=1, group=heads, dim=80, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (20, 16)])
def test_latents_are_keys_and_values(dtype: torch.dtype, heads: int, page_size: int) -> None:
    batch = latent_batch([5, 130, 64], [1, 1, 1], heads, page_size=page_size, dtype=dtype, fused=heads == 20)
    for options in ({"num_splits": 3, "split_tokens": 64}, {"num_splits": 1}):
        got = run(kernel, batch, 64, **options)
        assert_close(got, run(torch_form, batch, 64, **options))
        assert (got[-1] == 7).all()


def test_verified_drafts_see_no_later_token_and_padding_is_not_touched() -> None:
    batch = latent_batch([9, 40, 70], [3, 2, 1], 8)
    batch.page_table[1] = 10**6  # would be out of bounds
    got = run(kernel, batch, 64, [2, -1, 0], num_splits=2, split_tokens=32)
    assert_close(got, run(torch_form, batch, 64, [2, 0]))
    assert (got[3:5] == 7).all()


def test_a_latent_is_read_once_for_its_block_of_heads(meter: Meter) -> None:
    batch = latent_batch([256, 130], [1, 1], 16, page_size=64)
    run(kernel, batch, 64)
    partial = 2 * 16 * 65 * 4  # written by the split, read by the merge
    ideal = (256 + 130) * 80 * 4 + 2 * 16 * 80 * 4 + partial
    assert meter.read_bytes <= 1.10 * ideal
    assert meter.written_bytes == partial + 2 * 16 * 64 * 4


def test_what_the_kernel_cannot_do_is_said() -> None:
    with pytest.raises(BadKernelArgument, match="rotary part=20"):
        run(kernel, Paged([3], [1], num_kv_heads=1, dim=84), 64)
