"""An engine counts, by the reason, the prompts that found less than they could have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from harness import GREEDY, make_llm

from engine.sampling.params import SamplingParams

ONE = SamplingParams(temperature=0.0, max_new_tokens=1)


def test_each_reason_is_counted_once_where_it_belongs(tiny_path: Path) -> None:
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=128, resume_unit="page")
    seen: dict[str, int] = {}

    def counted(prompt: list[int], **where: str) -> str:
        """The reason that running a prompt added, "" when none was."""
        before = dict(llm.core.scheduler.misses)
        llm.core.add(np.array(prompt, dtype=np.int32), ONE, **where)
        while llm.core.has_work:
            llm.core.step()
        after = llm.core.scheduler.misses
        [reason] = [name for name in after if after[name] != before.get(name, 0)] or [""]
        seen[reason] = seen.get(reason, 0) + 1
        return reason

    first, second = [5] * 33, [6] * 33
    assert counted([5] * 16) == "below_page"  # the last token is computed, and is the page's
    assert counted(first) == "never_seen"
    assert counted(first) == ""
    assert counted([*first[:32], *second]) == "never_seen"
    assert counted(first, cache_salt="other") == "other_key"
    assert counted(first, cache_salt="other") == ""
    for start in range(10, 14):
        counted([start] * 97)  # more than the pool holds beside the rest
    assert counted(first) == "evicted"
    with llm.open_session() as session:
        session.generate(second, GREEDY)
        before = llm.core.scheduler.misses["clamped"]
        session.generate([7], GREEDY)
        assert llm.core.scheduler.misses["clamped"] == before + 1
    stats = llm.stats()
    assert stats["prefix_miss_never_seen_total"] == llm.core.scheduler.misses["never_seen"]
    assert stats["evicted_tokens_total"] >= 3 * 96
    uncached = make_llm(tiny_path, page_size=16, max_total_tokens=128, disable_radix_cache=True)
    uncached.generate(first, ONE)
    assert dict(uncached.core.scheduler.misses) == {"disabled": 1}
