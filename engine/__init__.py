"""Requests in, tokens out.

    from engine import LLM, SamplingParams

Start at `llm.py` (what a user calls), then `core.py` (the loop), `scheduler/` (decides), `step.py` (the message) and
`runner.py` (executes). Nothing heavy is imported until it is used: the scheduler runs without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.one_root import check_one_root

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.sampling.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

check_one_root()


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engine.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
