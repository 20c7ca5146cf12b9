"""The API process's end where nobody is at the other one."""

from __future__ import annotations

import asyncio
import logging

import pytest

from engine.config import EngineConfig
from engine.sampling.params import SamplingParams
from engine.server.engine_client import EngineClient, EngineDied
from engine.server.messages import Start


def test_an_engine_that_has_gone_is_that_and_no_internal_error() -> None:
    """Its socket closes a moment before its end is noticed; what is asked in between is told the same."""

    async def main() -> None:
        client = EngineClient(EngineConfig(), logging.WARNING)
        assert not client.died.is_set()
        with pytest.raises(EngineDied):
            await client.submit(Start("r", b"", SamplingParams()))
        with pytest.raises(EngineDied):
            await client.call("stats")
        client.abort("r")
        client.tell("close_session", session_id="s")
        assert (client.num_open, client._calls) == (0, {})
        await client.stop()

    asyncio.run(main())
