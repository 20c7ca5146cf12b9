"""Rows with a few new tokens each in one attention call, and attention sinks: the builders' calls, run by the emulator.

The oracle is dense attention in fp32, row by row and position by position, with the sink as one more score.
"""

from __future__ import annotations

from types import SimpleNamespace

import npu_calls as calls
import pytest
import torch

from devices.npu.arguments.attention import AttentionShape
from devices.npu.arguments.several import SinkAttention, VerifyAttention
from devices.npu.emulator import poison

PAGE = 128
QUERY_LENS, KV_LENS = [4, 1, 8, 2], [130, 9, 300, 2]
TABLE = [[3, 5, 0], [7, 0, 0], [2, 6, 1], [4, 0, 0]]
NUM_PAGES = 8


def cache(shape: AttentionShape, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages on the host; what lies behind each row's end is never a number."""
    pages = calls.random(NUM_PAGES, PAGE, shape.num_kv_heads * shape.head_dim, seed=seed, dtype=dtype)
    poison(pages[0])
    for ids, length in zip(TABLE, KV_LENS, strict=True):
        last, offset = divmod(length, PAGE)
        poison(pages[ids[last], offset:])
    return pages


def row_keys(pages: torch.Tensor, row: int, num_kv_heads: int) -> torch.Tensor:
    """[keys, kv_heads, dim] in fp32."""
    tokens = [pages[TABLE[row][position // PAGE], position % PAGE] for position in range(KV_LENS[row])]
    return torch.stack(tokens).float().view(KV_LENS[row], num_kv_heads, -1)


def expected(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: AttentionShape,
    window: int | None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, dim] of the rows one behind the other, each query by itself."""
    out, done = [], 0
    for row, (new, length) in enumerate(zip(QUERY_LENS, KV_LENS, strict=True)):
        keys, values = (row_keys(pages, row, shape.num_kv_heads) for pages in (key, value))
        for number in range(new):
            position = length - new + number
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            for head in range(shape.num_heads):
                scores = keys[seen, head // shape.group] @ queries[done + number, head].float() * shape.scale
                if sink is not None:
                    scores = torch.cat([scores, sink[head].float()[None]])
                weights = scores.softmax(0)[: position + 1 - first]
                out.append(weights @ values[seen, head // shape.group])
        done += new
    return torch.stack(out).view(done, shape.num_heads, shape.head_dim)


@pytest.mark.parametrize("window", [None, 3, 140], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_verify_step_are_attended_in_one_call(
    npu: SimpleNamespace, window: int | None, dtype: torch.dtype
) -> None:
    shape = AttentionShape(4, 2, 16)
    key, value = cache(shape, 2, dtype), cache(shape, 3, dtype)
    queries = calls.random(sum(QUERY_LENS), 4, 16, seed=1, dtype=dtype)
    padded = torch.full((4, max(QUERY_LENS), 64), torch.nan, dtype=dtype)
    for row, part in enumerate(queries.flatten(1).split(QUERY_LENS)):
        padded[row, : len(part)] = part
    step = VerifyAttention(
        shape,
        PAGE,
        QUERY_LENS,
        KV_LENS,
        calls.npu(torch.tensor(TABLE, dtype=torch.int32)),
        calls.npu(calls.causal_mask()),
        window,
    )
    call = step.of(calls.npu(padded), calls.npu(key), calls.npu(value))
    out, _ = npu.npu_fused_infer_attention_score_v2(*call.args, **call.kwargs)
    found = torch.cat([row[:new] for row, new in zip(out.cpu(), QUERY_LENS, strict=True)]).view(-1, 4, 16)
    torch.testing.assert_close(found.float(), expected(queries, key, value, shape, window), atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("window", [None, 3, 140], ids=str)
def test_a_sink_takes_weight_and_gives_no_value(npu: SimpleNamespace, window: int | None) -> None:
    shape, dtype = AttentionShape(4, 2, 128), torch.bfloat16
    key, value = cache(shape, 2, dtype), cache(shape, 3, dtype)
    queries, sink = calls.random(sum(QUERY_LENS), 4, 128, seed=1), calls.random(4, seed=5) * 2
    step = SinkAttention(
        shape,
        PAGE,
        QUERY_LENS,
        KV_LENS,
        calls.npu(torch.tensor(TABLE, dtype=torch.int32)),
        calls.npu(calls.causal_mask()),
        calls.npu(sink),
        window,
    )
    call = step.of(calls.npu(queries), calls.npu(key), calls.npu(value))
    out, _ = npu.npu_fused_infer_attention_score_v2(*call.args, **call.kwargs)
    want = expected(queries, key, value, shape, window, sink)
    torch.testing.assert_close(out.cpu().float(), want, atol=4e-3, rtol=1e-2)
    assert not torch.allclose(want, expected(queries, key, value, shape, window), atol=4e-3)
