"""What start-up refuses because nothing could run later."""

import pytest
import torch

from devices.base import Capabilities
from engine.assembly import choose_dtype, chunk_tokens
from engine.errors import ConfigError


def test_a_chunk_must_be_able_to_end_where_the_device_resumes():
    by_token, by_page = Capabilities(resume_unit="token"), Capabilities(resume_unit="page")
    assert chunk_tokens(7, by_token, 128) == 7
    assert chunk_tokens(None, by_page, 128) is None
    assert chunk_tokens(128, by_page, 128) == 128
    with pytest.raises(ConfigError, match=r"chunked_prefill_size=127 .* page of 128 .* at least 128"):
        chunk_tokens(127, by_page, 128)


FP32_FIRST, BF16_FIRST, ALL = ("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16", "float32")


@pytest.mark.parametrize(
    ("saved", "supported", "chosen"),
    [
        ("bfloat16", FP32_FIRST, torch.bfloat16),
        ("float32", BF16_FIRST, torch.float32),
        ("float16", ALL, torch.float16),
        ("float16", BF16_FIRST, torch.float32),
        ("float64", BF16_FIRST, torch.float32),
        ("float32", ("bfloat16",), torch.bfloat16),
        (None, FP32_FIRST, torch.float32),
        (None, BF16_FIRST, torch.bfloat16),
    ],
)
def test_weights_keep_their_dtype_or_get_one_that_loses_nothing(saved, supported, chosen):
    assert choose_dtype("auto", saved, supported) is chosen


def test_a_dtype_that_is_asked_for_is_taken_or_refused():
    assert choose_dtype("bfloat16", "float32", FP32_FIRST) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype=float16 .* float32, bfloat16"):
        choose_dtype("float16", "float16", FP32_FIRST)
