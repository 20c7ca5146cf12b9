"""Each operator's reference kernel against plain torch in fp32: another formula, another path, one rounding apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import npu_calls as calls
import pytest
import torch
import torch.nn.functional as F

from devices.npu.emulator import poison, relaxed


def rows_of(cache: torch.Tensor, table: torch.Tensor, row: int, num_keys: int, kv_heads: int) -> torch.Tensor:
    """A row's keys out of a host cache, [kv_heads, keys, dim] in fp32, position by position."""
    found = []
    for position in range(num_keys):
        page, offset = int(table[row, position // calls.BLOCK]), position % calls.BLOCK
        token = (
            cache[page, offset]
            if cache.dim() == 3
            else cache[page, :, offset]
            if cache.shape[1] == kv_heads
            else cache[page, offset]
        )
        found.append(token.reshape(kv_heads, -1))
    return torch.stack(found, dim=1).float()


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[queries, heads, dim] over [kv_heads, keys, dim]."""
    attended = F.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None], key[None], value[None], attn_mask=allowed, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def lower_right(queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys + 1))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("lens", [[130, 5, 256], [129, 140, 150], [1, 1, 1], [0, 5, 256]], ids=str)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_decode_over_pages(npu: SimpleNamespace, lens: list[int], layout: str) -> None:
    call = calls.decode(actual_seq_lengths_kv=lens, input_layout=layout)
    heads = call["query"].view(3, calls.HEADS, calls.DIM)
    if layout != "BSH":
        call["query"] = heads.unsqueeze(1) if layout == "BSND" else heads.unsqueeze(2)
    if layout == "BNSD":
        for name in ("key", "value"):
            call[name] = call[name].view(calls.BLOCKS, calls.BLOCK, calls.KV_HEADS, -1).transpose(1, 2).contiguous()
    out, _ = npu.npu_fused_infer_attention_score(**call)
    assert out.shape == call["query"].shape
    found = out.cpu().view(3, calls.HEADS, calls.DIM)
    for row, length in enumerate(lens):
        if length == 0:
            assert not found[row].any()
            continue
        k, v = (
            rows_of(call[name].cpu(), call["block_table"].cpu(), row, length, calls.KV_HEADS)
            for name in ("key", "value")
        )
        close(found[row], dense(heads.cpu()[row][None], k, v, None, calls.SCALE)[0])


def test_what_lies_behind_a_rows_end_never_matters(npu: SimpleNamespace) -> None:
    """Poison behind every row's last key, in pages that several rows of similar length share a batch with."""
    for lens in ([130, 140, 150], [130, 5, 256]):
        call = calls.decode(actual_seq_lengths_kv=lens)
        clean, _ = npu.npu_fused_infer_attention_score(**call)
        for row, length in enumerate(lens):
            page, offset = divmod(length, calls.BLOCK)
            if offset:
                for name in ("key", "value"):
                    poison(call[name][int(call["block_table"][row, page]), offset:])
        dirty, _ = npu.npu_fused_infer_attention_score(**call)
        assert torch.equal(clean.cpu(), dirty.cpu())


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_prefill_over_pages_is_causal_from_the_lower_right(npu: SimpleNamespace, layout: str) -> None:
    call = calls.prefill()
    query = call["query"].cpu()[0]
    k, v = (rows_of(call[name].cpu(), call["block_table"].cpu(), 0, 130, calls.KV_HEADS) for name in ("key", "value"))
    if layout == "BSH":
        call["query"] = call["query"].flatten(2)
    elif layout.startswith("BNSD"):
        call["query"] = call["query"].transpose(1, 2).contiguous()
    out, lse = npu.npu_fused_infer_attention_score(**call | {"input_layout": layout, "softmax_lse_flag": True})
    found = out.cpu()[0]
    found = found.transpose(0, 1) if layout == "BNSD" else found.view(7, calls.HEADS, calls.DIM)
    close(found, dense(query, k, v, lower_right(7, 130), calls.SCALE))
    scores = torch.einsum("qhd,hkd->hqk", query.float(), k.repeat_interleave(3, 0)) * calls.SCALE
    expected = scores.masked_fill(~lower_right(7, 130), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.cpu()[0, ..., 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("mode", "window"), [(3, None), (4, 5)])
@pytest.mark.parametrize("sink", [False, True])
def test_packed_rows_over_pages(npu: SimpleNamespace, mode: int, window: int | None, sink: bool) -> None:
    """TND: cumulative query lengths, per-row key lengths; a window counts the token itself; a sink takes weight."""
    call = calls.packed(sparse_mode=mode)
    if window:
        call |= {"pre_tokens": window - 1, "next_tokens": 0}
    if sink:
        call["learnable_sink"] = calls.npu(calls.random(calls.HEADS))
    out, _ = npu.npu_fused_infer_attention_score_v2(**call)
    start = 0
    for row, (end, length) in enumerate(zip(call["actual_seq_qlen"], call["actual_seq_kvlen"], strict=True)):
        k, v = (
            rows_of(call[name].cpu(), call["block_table"].cpu(), row, length, calls.KV_HEADS)
            for name in ("key", "value")
        )
        query, allowed = call["query"].cpu()[start:end], lower_right(end - start, length, window)
        if sink:
            scores = torch.einsum("qhd,hkd->hqk", query.float(), k.repeat_interleave(3, 0)) * 128**-0.5
            extra = call["learnable_sink"].cpu().float().view(-1, 1, 1).expand(-1, end - start, 1)
            weights = torch.cat([scores.masked_fill(~allowed, -torch.inf), extra], -1).softmax(-1)[..., :-1]
            expected = torch.einsum("hqk,hkd->qhd", weights, v.repeat_interleave(3, 0))
        else:
            expected = dense(query, k, v, allowed, 128**-0.5)
        close(out.cpu()[start:end], expected)
        start = end


def test_packed_decode_rows_with_their_log_sums(npu: SimpleNamespace) -> None:
    """Rows of one query and similar length, which are computed together, agree with each computed alone."""
    call = calls.packed(actual_seq_qlen=[1, 2, 3], actual_seq_kvlen=[130, 140, 256], return_softmax_lse=True)
    call["query"] = call["query"][:3].contiguous()
    out, lse = npu.npu_fused_infer_attention_score_v2(**call)
    assert (out.shape, lse.shape) == ((3, calls.HEADS, 128), (3, calls.HEADS, 1))
    for row, length in enumerate((130, 140, 256)):
        alone = call | {"query": call["query"][row : row + 1], "block_table": call["block_table"][row : row + 1]}
        alone |= {"actual_seq_qlen": [1], "actual_seq_kvlen": [length]}
        one, sums = npu.npu_fused_infer_attention_score_v2(**alone)
        close(out[row], one.cpu()[0])
        torch.testing.assert_close(lse.cpu()[row], sums.cpu()[0], atol=1e-4, rtol=1e-4)


def test_packed_rows_without_pages(npu: SimpleNamespace) -> None:
    query, key, value = (calls.random(8, heads, 128, seed=seed) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    out, _ = npu.npu_fused_infer_attention_score_v2(
        *(calls.npu(tensor) for tensor in (query, key, value)),
        actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8], num_query_heads=4, num_key_value_heads=2,
        softmax_scale=0.1, input_layout="TND", sparse_mode=4, next_tokens=0, atten_mask=calls.npu(calls.causal_mask()),
    )  # fmt: skip
    for start, end in ((0, 3), (3, 8)):
        k, v = (tensor[start:end].float().transpose(0, 1) for tensor in (key, value))
        close(out.cpu()[start:end], dense(query[start:end], k, v, lower_right(end - start, end - start), 0.1))


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_sparse_modes_without_pages(npu: SimpleNamespace, mode: int) -> None:
    """Mode 0 without a mask sees everything, 2 is causal from the upper left, 3 from the lower right."""
    query, key, value = (calls.random(2, 4, size, 64, seed=size) for size in (5, 9, 10))
    value = value[:, :, :9].contiguous()
    mask = calls.npu(calls.causal_mask()) if mode else None
    out, _ = npu.npu_fused_infer_attention_score(
        *(calls.npu(tensor) for tensor in (query, key, value)), num_heads=4, input_layout="BNSD", scale=0.125,
        sparse_mode=mode, atten_mask=mask, actual_seq_lengths=[5], actual_seq_lengths_kv=[9],
    )  # fmt: skip
    shift = {0: 9, 2: 0, 3: 4}[mode]
    allowed = torch.arange(9)[None] <= torch.arange(5)[:, None] + shift
    close(
        out, F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=allowed, scale=0.125)
    )


def test_a_mask_of_the_callers_for_decode(npu: SimpleNamespace) -> None:
    hidden = torch.zeros(3, 256, dtype=torch.bool)
    hidden[:, 2:4] = True
    call = calls.decode(atten_mask=calls.npu(hidden[:, None, None]))
    out, _ = npu.npu_fused_infer_attention_score(**call)
    for row, length in enumerate(call["actual_seq_lengths_kv"]):
        k, v = (
            rows_of(call[name].cpu(), call["block_table"].cpu(), row, length, calls.KV_HEADS)
            for name in ("key", "value")
        )
        query = call["query"].cpu()[row].view(1, calls.HEADS, calls.DIM)
        close(
            out.cpu()[row].view(1, calls.HEADS, calls.DIM),
            dense(query, k, v, ~hidden[row : row + 1, :length], calls.SCALE),
        )


def test_the_out_form_writes_where_it_is_told(npu: SimpleNamespace) -> None:
    call = calls.decode()
    expected, _ = npu.npu_fused_infer_attention_score(**call)
    scratch = npu._npu_fused_infer_attention_score_get_max_workspace(**call)
    out, lse = torch.zeros_like(call["query"]), torch.zeros(1, dtype=torch.float32, device="npu")
    for form in (npu.npu_fused_infer_attention_score, npu.npu_fused_infer_attention_score.out):
        out.zero_()
        form(**call, workspace=scratch, out=[out, lse])
        assert torch.equal(out.cpu(), expected.cpu())
    shape, flag = npu._npu_fused_infer_attention_score_infer_output(
        call["query"], call["value"], input_layout="BSH", num_heads=6
    )
    assert (shape.shape, flag.shape) == (out.shape, (1,))


def test_atb_paged_attention_agrees_with_fia(npu: SimpleNamespace) -> None:
    call = calls.paged()
    assert npu._npu_paged_attention(**call) is None
    flat = {name: call[f"{name}_cache"].flatten(2) for name in ("key", "value")}
    expected, _ = npu.npu_fused_infer_attention_score(**calls.decode(query=call["query"].view(3, 1, -1), **flat))
    close(call["out"].view(3, 1, -1), expected.cpu())


def test_writes_land_in_their_slots(npu: SimpleNamespace) -> None:
    call = calls.cache_write()
    npu._npu_reshape_and_cache(**call)
    other = calls.cache_write_pa()
    npu.npu_scatter_pa_kv_cache(**other)
    third = torch.zeros(calls.BLOCKS * calls.BLOCK, calls.KV_HEADS, calls.DIM, dtype=torch.bfloat16, device="npu")
    returned = npu.npu_scatter_nd_update_(third, call["slot_indices"].unsqueeze(1), call["key"])
    assert returned is third
    expected = torch.zeros(calls.BLOCKS * calls.BLOCK, calls.KV_HEADS, calls.DIM, dtype=torch.bfloat16)
    for token, slot in enumerate((130, 0, 1023)):
        expected[slot] = call["key"].cpu()[token]
    for written in (call["key_cache"].flatten(0, 1), other["key_cache"].flatten(0, 1), third):
        assert torch.equal(written.cpu(), expected)


def test_scatter_nd_with_two_indices(npu: SimpleNamespace) -> None:
    table = torch.zeros(4, 5, 2, dtype=torch.int64, device="npu")
    npu.npu_scatter_nd_update_(
        table, calls.npu(torch.tensor([[1, 2], [3, 4]])), calls.npu(torch.tensor([[5, 6], [7, 8]]))
    )
    assert table.cpu()[1, 2].tolist() == [5, 6]
    assert table.cpu()[3, 4].tolist() == [7, 8]
    assert table.sum().item() == 26
    copied = npu.npu_scatter_nd_update(
        table, calls.npu(torch.tensor([[0]])), calls.npu(torch.ones(1, 5, 2, dtype=torch.int64))
    )
    assert copied.sum().item() - table.sum().item() == 10


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("offset", [None, [0, 128]])
def test_gather_copies_rows_out(npu: SimpleNamespace, cumulative: bool, offset: list[int] | None) -> None:
    call = calls.gather()
    if cumulative:
        call |= {"seq_lens": calls.npu(torch.tensor([0, 130, 134], dtype=torch.int32)), "is_seq_lens_cumsum": True}
    if offset:
        call["seq_offset"] = calls.npu(torch.tensor(offset, dtype=torch.int32))
    npu.npu_gather_pa_kv_cache(**call)
    cache = call["key_cache"].cpu()
    second = cache[0, :4] if offset else cache[7, :4]
    assert torch.equal(call["key"].cpu(), torch.cat([cache[3], cache[5, :2], second]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_and_activation(npu: SimpleNamespace, dtype: torch.dtype) -> None:
    x, y, gamma = (calls.random(*shape, seed=len(shape), dtype=dtype) for shape in ((4, 3, 64), (4, 3, 64), (64,)))
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0, "rtol": 2**-7}
    normed, rstd = npu.npu_rms_norm(calls.npu(x), calls.npu(gamma), 1e-5)
    expected = F.rms_norm(x.float(), (64,), gamma.float(), 1e-5)
    torch.testing.assert_close(normed.cpu(), expected.to(dtype), **tolerance)
    assert (rstd.shape, rstd.dtype) == ((4, 3, 1), torch.float32)
    torch.testing.assert_close(rstd.cpu()[..., 0], 1 / (x.float().pow(2).mean(-1) + 1e-5).sqrt())
    both, _, total = npu.npu_add_rms_norm(calls.npu(x), calls.npu(y), calls.npu(gamma), 1e-5)
    assert torch.equal(total.cpu(), x + y)
    torch.testing.assert_close(
        both.cpu(), F.rms_norm((x + y).float(), (64,), gamma.float(), 1e-5).to(dtype), **tolerance
    )
    gated = npu.npu_swiglu(calls.npu(x))
    torch.testing.assert_close(gated.cpu(), (F.silu(x[..., :32].float()) * x[..., 32:].float()).to(dtype), **tolerance)


def complex_rotation(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding as complex numbers turned by `angles` [tokens, dim / 2]."""
    halves = x.float().unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.float().chunk(2, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(halves.contiguous()) * torch.exp(1j * angles)[:, None])
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs(npu: SimpleNamespace, mode: str) -> None:
    x, angles = calls.random(1, 5, 3, 64, dtype=torch.float32), torch.rand(5, 32)
    whole = angles.repeat(1, 2) if mode == "half" else angles.repeat_interleave(2, -1)
    cos, sin = (calls.npu(part[None, :, None]) for part in (whole.cos(), whole.sin()))
    found = npu.npu_rotary_mul(calls.npu(x), cos, sin, mode).cpu()
    torch.testing.assert_close(found[0], complex_rotation(x[0], angles, mode == "interleave"), atol=1e-5, rtol=1e-5)


def test_apply_rotary_turns_in_place(npu: SimpleNamespace) -> None:
    angles = torch.rand(5, 32)
    whole = angles.repeat(1, 2)
    call = calls.rotary(
        query=calls.npu(calls.random(1, 5, 6, 64, dtype=torch.float32)),
        key=calls.npu(calls.random(1, 5, 2, 64, seed=1, dtype=torch.float32)),
        cos=calls.npu(whole.cos()[None, :, None]),
        sin=calls.npu(whole.sin()[None, :, None]),
    )
    before = call["query"].cpu(), call["key"].cpu()
    returned = npu.npu_apply_rotary_pos_emb(**call)
    for name, host, given in zip(("query", "key"), before, returned, strict=True):
        assert given is call[name]
        torch.testing.assert_close(given.cpu()[0], complex_rotation(host[0], angles, False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("use_k", "use_p"), [(True, False), (False, True), (True, True)])
def test_top_k_top_p_keeps_what_the_loops_keep(npu: SimpleNamespace, use_k: bool, use_p: bool) -> None:
    logits = calls.random(4, 50, dtype=torch.float32)
    k, p = torch.tensor([1, 5, 50, 20], dtype=torch.int32), torch.tensor([0.5, 0.0, 1.0, 0.9])
    found = npu.npu_top_k_top_p(
        calls.npu(logits), calls.npu(p) if use_p else None, calls.npu(k) if use_k else None
    ).cpu()
    for row in range(4):
        order = logits[row].argsort(descending=True).tolist()
        kept = order[: int(k[row])] if use_k else order
        if use_p:
            weights = logits[row, kept].softmax(-1).tolist()
            above = [sum(weights[:place]) for place in range(len(kept))]
            kept = [token for place, token in enumerate(kept) if place == 0 or above[place] < float(p[row])]
        assert found[row].isfinite().nonzero().flatten().tolist() == sorted(kept)
        assert torch.equal(found[row][kept], logits[row][kept])


def test_float32_attention_where_that_is_allowed(npu: SimpleNamespace) -> None:
    call: dict[str, Any] = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in calls.decode().items()
    }
    with relaxed(attention_dtypes=False):
        out, _ = npu.npu_fused_infer_attention_score(**call)
    k, v = (rows_of(call[name].cpu(), call["block_table"].cpu(), 0, 130, calls.KV_HEADS) for name in ("key", "value"))
    expected = dense(call["query"].cpu()[0].view(1, calls.HEADS, calls.DIM), k, v, None, calls.SCALE)
    torch.testing.assert_close(out.cpu()[0].view(1, calls.HEADS, calls.DIM), expected, atol=1e-5, rtol=1e-5)


def test_format_cast_to_plain_memory_is_the_tensor(npu: SimpleNamespace) -> None:
    x = torch.ones(2, device="npu")
    assert npu.npu_format_cast(x, 2) is x
