"""What start-up refuses because nothing could run later."""

import pytest

from devices.base import Capabilities
from engine.assembly import chunk_tokens
from engine.errors import ConfigError


def test_a_chunk_must_be_able_to_end_where_the_device_resumes():
    by_token, by_page = Capabilities(resume_unit="token"), Capabilities(resume_unit="page")
    assert chunk_tokens(7, by_token, 128) == 7
    assert chunk_tokens(None, by_page, 128) is None
    assert chunk_tokens(128, by_page, 128) == 128
    with pytest.raises(ConfigError, match=r"chunked_prefill_size=127 .* page of 128 .* at least 128"):
        chunk_tokens(127, by_page, 128)
