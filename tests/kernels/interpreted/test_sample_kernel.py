"""The fused sampler chooses what `engine.sampling.sampler` chooses: the same logits and seed, the same token."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from devices.cuda.kernels.sample import log_normaliser, sample
from engine.sampling import sampler
from engine.step import SamplingColumns

# Infinities and NaN are meant here; the interpreter is numpy, which warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALL = -1


@dataclass(frozen=True)
class Ask:
    temperature: float = 1.0
    top_k: int = ALL
    top_p: float = 1.0
    min_p: float = 0.0


MIXED = [
    Ask(),
    Ask(temperature=0.0),
    Ask(top_k=1),
    Ask(temperature=0.3, min_p=0.05),
    Ask(top_k=7),
    Ask(top_p=0.7),
    Ask(temperature=1.7, top_k=12, top_p=0.6, min_p=0.2),
    Ask(top_p=1e-6),
    Ask(top_k=10**9, top_p=0.95),
    Ask(top_k=40, top_p=0.999),
    Ask(temperature=1e-40),
]


def columns(asks: list[Ask], seed: int) -> SamplingColumns:
    def of(name: str, dtype: type) -> npt.NDArray[np.generic]:
        return np.array([getattr(ask, name) for ask in asks], dtype=dtype)

    draw = np.random.default_rng(seed)
    return SamplingColumns(
        *(of(name, dtype) for name, dtype in (("temperature", np.float32), ("top_k", np.int32))),  # type: ignore[arg-type]
        *(of(name, np.float32) for name in ("top_p", "min_p")),  # type: ignore[arg-type]
        seed=draw.integers(0, 2**62, len(asks)).astype(np.uint64),
        position=draw.integers(0, 5000, len(asks)),
    )


def choose(logits: torch.Tensor, asked: SamplingColumns, **kwargs: int) -> tuple[list[int], list[bool]]:
    uniform = sampler.uniforms(asked.seed, asked.position)
    arrays = (asked.temperature, asked.top_k, asked.top_p, asked.min_p, uniform)
    tokens, is_finite = sample(logits, *map(torch.from_numpy, arrays), **kwargs)
    return tokens.tolist(), is_finite.tolist()


def random_logits(rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, spread, (rows, vocab_size)).astype(np.float32))


@pytest.mark.parametrize(
    ("vocab_size", "spread", "capacity"),
    [(100, 2.0, 128), (1030, 2.0, 2048), (100, 0.01, 16)],
    ids=["few", "two-blocks", "more-than-are-copied"],
)
def test_the_same_logits_and_seed_give_the_same_token_as_on_the_cpu(
    vocab_size: int, spread: float, capacity: int
) -> None:
    logits = random_logits(len(MIXED), vocab_size, spread)
    asked = columns(MIXED, seed=vocab_size)
    want = sampler.sample(logits.clone(), asked)
    assert choose(logits, asked, capacity=capacity) == (want.token_ids.tolist(), [True] * len(MIXED))


@pytest.mark.parametrize(("min_p", "num_kept"), [(0.0, 5), (0.2, 2)])
def test_choices_follow_the_distribution_of_what_the_cuts_leave(min_p: float, num_kept: int) -> None:
    """Numbers spread evenly over [0, 1) give each kept token its share, to one in the number of draws."""
    row = random_logits(1, 12, 1.0, seed=3)
    n = 24
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    of, top_k = torch.full((n,), 1.0), torch.full((n,), 5, dtype=torch.int32)
    tokens, _ = sample(row.expand(n, 12).contiguous(), of, top_k, of, min_p * of, uniform)
    best = torch.topk(row[0].double(), num_kept)
    share = torch.softmax(best.values, 0)
    counts = torch.bincount(tokens, minlength=12)[best.indices]
    assert int(counts.sum()) == n
    assert float((counts / n - share).abs().max()) <= 1.0 / n


def test_equal_logits_are_taken_in_the_order_of_their_ids() -> None:
    row = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    uniform = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    of = torch.ones(4)
    tokens, _ = sample(row.expand(4, 6).contiguous(), of, torch.full((4,), 4, dtype=torch.int32), of, 0 * of, uniform)
    assert tokens.tolist() == [1, 2, 4, 5]
    greedy, _ = sample(row, torch.zeros(1), torch.full((1,), -1, dtype=torch.int32), of[:1], 0 * of[:1], uniform[:1])
    assert greedy.tolist() == [1]


@pytest.mark.parametrize("damage", ["nan-row", "nan-lane", "inf-lane", "no-token"])
def test_a_row_that_is_not_finite_is_flagged_and_the_others_are_unaffected(damage: str) -> None:
    """B099."""
    asks = [Ask(top_p=0.8), Ask(), Ask(top_k=5)]
    logits, asked = random_logits(3, 50, 2.0), columns(asks, seed=5)
    clean, _ = choose(logits, asked)
    if damage == "nan-row":
        logits[1] = torch.nan
    elif damage == "nan-lane":
        logits[1, 17] = torch.nan
    elif damage == "inf-lane":
        logits[1, 17] = torch.inf
    else:
        logits[1] = -torch.inf
    tokens, is_finite = choose(logits, asked)
    assert is_finite == [True, False, True]
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])
    assert 0 <= tokens[1] < 50


def test_a_masked_token_is_never_chosen() -> None:
    logits = random_logits(8, 40, 2.0)
    logits[:, ::2] = -torch.inf
    tokens, is_finite = choose(logits, columns(MIXED[:8], seed=8))
    assert all(is_finite)
    assert all(token % 2 == 1 for token in tokens)


def test_rows_of_a_view_and_rows_far_apart_are_read_where_they_lie() -> None:
    wide = random_logits(4, 90, 2.0)
    asked = columns([Ask(), Ask(top_k=3), Ask(top_p=0.5), Ask(temperature=0.0)], seed=2)
    assert choose(wide[:, 10:70], asked) == choose(wide[:, 10:70].contiguous(), asked)


def test_the_normaliser_is_the_logarithm_of_the_sum() -> None:
    logits = random_logits(3, 1100, 3.0)
    logits[0] += 1e4
    logits[2, 5] = torch.nan
    got = log_normaliser(logits)
    torch.testing.assert_close(got[:2], torch.logsumexp(logits[:2], -1))
    assert torch.isnan(got[2])
