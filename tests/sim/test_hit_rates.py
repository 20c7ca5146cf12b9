"""With room for everything, what the cache gives equals the closed formula exactly: anchors D7."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.sampling.params import SamplingParams
from engine.sim.world import WorldConfig, build

ONE_TOKEN = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
LENGTHS = (128, 512, 1024, 2048, 8192, 32768, 131072)
AGENT = [12_000 + 2_242 * turn for turn in range(33)]
CHAT = [500 + 250 * turn for turn in range(6)]

D7 = {
    1: (".992 .998 .999 1.000 1.000 1.000 1.000", ".9470", ".7407"),
    16: (".875 .969 .984 .992 .998 1.000 1.000", ".9468", ".7348"),
    64: (".500 .875 .938 .969 .992 .998 1.000", ".9464", ".7111"),
    128: ("0 .750 .875 .938 .984 .996 .999", ".9457", ".6637"),
    256: ("0 .500 .750 .875 .969 .992 .998", ".9444", ".5689"),
    528: ("0 0 .516 .773 .967 .999 .999", ".9412", ".4693"),
    1024: ("0 0 0 .500 .875 .969 .992", ".9366", ".3034"),
    4096: ("0 0 0 0 .500 .875 .969", ".9049", "0"),
    16384: ("0 0 0 0 0 .500 .875", ".7778", "0"),
}
"""The table: by quantum, the share of a cached prompt for each of LENGTHS, then of the two traces."""


def hits_of(page_size: int, lengths: Sequence[int]) -> list[int]:
    """Cached tokens of prompts that each begin with the one before, in an engine with room for all of them."""
    longest = max(lengths) + page_size + 1
    num_pages = sum(lengths) // page_size + 2 * len(lengths) + 2
    world = build(WorldConfig(page_size=page_size, num_pages=num_pages, num_rows=1, context_len=longest))
    text = np.random.default_rng(0).integers(16, 4096, max(lengths)).astype(np.int32)
    cached = []
    for length in lengths:
        (request,) = world.core.add(text[:length], ONE_TOKEN)
        while world.core.has_work:
            world.core.step()
        cached.append(request.cached_tokens)
    assert world.core.audit() == []
    return cached


def share(hits: int, tokens: int, digits: int) -> str:
    """As the table writes it."""
    text = f"{hits / tokens:.{digits}f}"
    return "0" if hits == 0 else text.removeprefix("0")


@pytest.mark.parametrize("quantum", D7)
def test_a_prompt_that_is_all_cached_hits_all_pages_but_that_of_its_last_token(quantum: int) -> None:
    for length, said in zip(LENGTHS, D7[quantum][0].split(), strict=True):
        first, second = hits_of(quantum, [length, length])
        assert (first, second) == (0, (length - 1) // quantum * quantum)
        assert share(second, length, 3) == said


@pytest.mark.parametrize("quantum", D7)
def test_a_growing_conversation_hits_the_whole_pages_of_the_turn_before(quantum: int) -> None:
    for lengths, said in ((AGENT, D7[quantum][1]), (CHAT, D7[quantum][2])):
        hits = hits_of(quantum, lengths)
        assert hits == [0, *(before // quantum * quantum for before in lengths[:-1])]
        assert share(sum(hits), sum(lengths), 4) == said
