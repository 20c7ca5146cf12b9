"""Choosing tokens, against the definitions in double precision: one row, one uniform number, one inverse CDF."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from devices.base import KernelChoice
from devices.cpu.device import CpuDevice
from engine.sampling.sampler import CANDIDATES, Sampled, _best, _invert, sample, uniforms
from engine.step import SamplingColumns

CRITICAL_999 = {4: 18.467, 5: 20.515, 6: 22.458, 11: 31.264, 15: 37.697}
"""Chi-square that is exceeded once in a thousand, by degrees of freedom (standard table)."""


@dataclass(frozen=True)
class Ask:
    """What one row asks for."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    position: int = 0


def columns(asks: list[Ask]) -> SamplingColumns:
    return SamplingColumns(
        temperature=np.array([ask.temperature for ask in asks], dtype=np.float32),
        top_k=np.array([ask.top_k for ask in asks], dtype=np.int32),
        top_p=np.array([ask.top_p for ask in asks], dtype=np.float32),
        min_p=np.zeros(len(asks), dtype=np.float32),
        seed=np.array([ask.seed for ask in asks], dtype=np.uint64),
        position=np.array([ask.position for ask in asks], dtype=np.int64),
    )


def choose(logits: npt.NDArray[np.float32], asks: list[Ask]) -> list[int]:
    return sampled(logits, asks).token_ids.tolist()


def sampled(logits: npt.NDArray[np.float32], asks: list[Ask]) -> Sampled:
    return sample(torch.from_numpy(logits.copy()), columns(asks))


def uniform(ask: Ask) -> float:
    asked = columns([ask])
    return float(uniforms(asked.seed, asked.position)[0])


def distribution(logits: npt.NDArray[np.float32], ask: Ask) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Token ids in the order of the inverse CDF, and their probabilities: temperature, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / np.float64(np.float32(ask.temperature))
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if ask.top_k == -1 and ask.top_p == 1.0:
        return np.arange(len(logits)), probabilities
    best = np.argsort(-scaled, kind="stable")[: len(logits) if ask.top_k == -1 else ask.top_k]
    kept = probabilities[best] / probabilities[best].sum()
    in_nucleus = np.cumsum(kept) - kept < np.float64(np.float32(ask.top_p))
    return best[in_nucleus], kept[in_nucleus] / kept[in_nucleus].sum()


def expected_token(logits: npt.NDArray[np.float32], ask: Ask) -> int:
    if ask.temperature == 0.0:
        return int(np.argmax(logits))
    ids, probabilities = distribution(logits, ask)
    place = np.searchsorted(np.cumsum(probabilities), uniform(ask) * probabilities.sum(), side="right")
    return int(ids[min(int(place), len(ids) - 1)])


def random_logits(seed: int, rows: int, vocab_size: int, spread: float = 2.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.0, spread, (rows, vocab_size)).astype(np.float32)


def chi_square(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


# The definitions.


@pytest.mark.parametrize("ask", [Ask(temperature=0.0), Ask(top_k=1), Ask(temperature=0.0, top_k=5, top_p=0.3)])
def test_greedy_is_the_best_token(ask: Ask) -> None:
    logits = random_logits(0, 64, 300)
    assert choose(logits, [ask] * 64) == logits.argmax(-1).tolist()


FILTERS = {
    "plain": Ask(),
    "cold": Ask(temperature=0.3),
    "hot": Ask(temperature=3.0),
    "top-k": Ask(top_k=7),
    "top-p": Ask(top_p=0.7),
    "both": Ask(temperature=1.7, top_k=12, top_p=0.6),
    "tiny-nucleus": Ask(top_p=1e-6),
    "more-than-all": Ask(top_k=10**9, top_p=0.95),
}


@pytest.mark.parametrize("ask", FILTERS.values(), ids=FILTERS)
def test_a_choice_is_the_inverse_cdf_at_the_rows_uniform_number(ask: Ask) -> None:
    logits = random_logits(1, 200, 300)
    asks = [Ask(ask.temperature, ask.top_k, ask.top_p, seed=i * 7919, position=i % 5) for i in range(200)]
    assert choose(logits, asks) == [expected_token(row, one) for row, one in zip(logits, asks, strict=True)]


CHI_SQUARE_CASES = {
    "plain": (Ask(), 12),
    "top-k": (Ask(top_k=5), 5),
    "top-p": (Ask(top_p=0.8), 7),
    "temperature": (Ask(temperature=0.5, top_p=0.9), 6),
}


@pytest.mark.parametrize(("ask", "num_tokens"), CHI_SQUARE_CASES.values(), ids=CHI_SQUARE_CASES)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_many_choices_follow_the_distribution(ask: Ask, num_tokens: int, vary: str) -> None:
    n = 20_000
    logits = np.linspace(0.0, 2.2, 12, dtype=np.float32)[np.random.default_rng(3).permutation(12)]
    asks = [
        Ask(ask.temperature, ask.top_k, ask.top_p, **({"seed": i} if vary == "seed" else {"position": i}))
        for i in range(n)
    ]
    chosen = choose(np.broadcast_to(logits, (n, 12)), asks)
    ids, probabilities = distribution(logits, ask)
    assert len(ids) == num_tokens
    counts = np.bincount(chosen, minlength=12)
    assert counts.sum() == counts[ids].sum(), "a token outside top-k or top-p was chosen"
    assert chi_square(counts[ids], probabilities) < CRITICAL_999[num_tokens - 1]


def test_a_wrong_distribution_is_seen_by_the_chi_square() -> None:
    """The statistic has teeth: 3 per cent more on one of twelve tokens exceeds the table."""
    counts = np.full(12, 20_000 // 12)
    wrong = np.full(12, 1 / 12)
    wrong[0] += 0.03
    assert chi_square(counts, wrong / wrong.sum()) > CRITICAL_999[11]


# A nucleus that is larger than the candidates looked at first.


@pytest.mark.parametrize(
    "ask",
    [
        Ask(top_p=0.97),
        Ask(top_p=0.5),
        Ask(top_k=2 * CANDIDATES),
        Ask(top_k=2 * CANDIDATES, top_p=0.9),
        Ask(top_k=CANDIDATES + 1, top_p=0.999),
        Ask(temperature=0.5, top_k=2 * CANDIDATES, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 2.5])
def test_a_nucleus_beyond_the_candidates_equals_the_full_sort(ask: Ask, spread: float) -> None:
    logits = random_logits(4, 40, 3 * CANDIDATES, spread)
    asks = [Ask(ask.temperature, ask.top_k, ask.top_p, seed=i) for i in range(40)]
    assert choose(logits, asks) == [expected_token(row, one) for row, one in zip(logits, asks, strict=True)]


# Neighbours.


def a_mixed_batch() -> tuple[npt.NDArray[np.float32], list[Ask]]:
    """Rows of every kind; rounded logits, so that many are equal, and flat rows that need the full sort."""
    logits = random_logits(5, 24, 3 * CANDIDATES)
    logits[::2] = torch.from_numpy(logits[::2]).bfloat16().float().numpy()
    logits[3::6] *= 0.001
    kinds = [*FILTERS.values(), Ask(temperature=0.0), Ask(top_k=1), Ask(top_p=0.999), Ask(top_k=1500, top_p=0.9)]
    asks = [Ask(kind.temperature, kind.top_k, kind.top_p, seed=i) for i, kind in enumerate(kinds * 2)]
    return logits, asks


def test_a_choice_does_not_depend_on_neighbours_or_on_their_order() -> None:
    logits, asks = a_mixed_batch()
    together = choose(logits, asks)
    assert [choose(logits[i : i + 1], [ask])[0] for i, ask in enumerate(asks)] == together
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(asks))
        assert choose(logits[order], [asks[i] for i in order]) == [together[i] for i in order]


def test_equal_logits_are_chosen_alike_whoever_is_beside_them() -> None:
    """A flat neighbour makes the sampler look at more candidates; that must not reorder this row's equal ones."""
    row = random_logits(6, 1, 3 * CANDIDATES).round()  # a dozen values, hundreds of tokens each
    flat = random_logits(7, 1, 3 * CANDIDATES, 0.001)
    for seed in range(30):
        asks = [Ask(top_p=0.3, seed=seed), Ask(top_p=0.999, seed=seed)]
        assert choose(np.concatenate([row, flat]), asks)[0] == choose(row, asks[:1])[0]


def test_seed_and_position_decide_and_nothing_else() -> None:
    logits = np.broadcast_to(random_logits(8, 1, 300), (400, 300))
    same = choose(logits, [Ask(seed=5, position=9)] * 400)
    assert len(set(same)) == 1
    assert len(set(choose(logits, [Ask(seed=i, position=9) for i in range(400)]))) > 50
    assert len(set(choose(logits, [Ask(seed=5, position=i) for i in range(400)]))) > 50


# The uniform numbers.


def test_uniform_numbers_are_pure_in_range_and_even() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(100)
    positions = np.tile(np.arange(100, dtype=np.int64), 200)
    numbers = uniforms(seeds, positions)
    assert np.array_equal(numbers, uniforms(seeds, positions))
    assert np.array_equal(numbers[::-1], uniforms(seeds[::-1], positions[::-1]))
    assert 0.0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1.0
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.bincount((numbers * 16).astype(np.int64), minlength=16)
    assert chi_square(counts, np.full(16, 1 / 16)) < CRITICAL_999[15]


@pytest.mark.parametrize("axis", [0, 1], ids=["neighbouring-seeds", "neighbouring-positions"])
def test_uniform_numbers_of_neighbours_are_unrelated(axis: int) -> None:
    n = 200
    grid = uniforms(np.arange(n, dtype=np.uint64).repeat(n), np.tile(np.arange(n, dtype=np.int64), n)).reshape(n, n)
    first, second = np.moveaxis(grid, axis, 0)[:-1].ravel(), np.moveaxis(grid, axis, 0)[1:].ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 3.3 / np.sqrt(first.size)
    pairs = np.bincount((first * 4).astype(np.int64) * 4 + (second * 4).astype(np.int64), minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) < CRITICAL_999[15]


def test_extreme_seeds_and_positions_have_numbers_too() -> None:
    seeds = np.array([0, 1, 2**63 - 1, 2**64 - 1], dtype=np.uint64)
    numbers = uniforms(seeds, np.array([0, 2**31, 2**62, 1], dtype=np.int64))
    assert len(set(numbers.tolist())) == 4
    assert np.all((numbers >= 0) & (numbers < 1))


# Numbers at the edge.


@pytest.mark.parametrize("ask", [Ask(temperature=0.0), Ask(), Ask(top_p=0.8), Ask(top_k=5)], ids=str)
@pytest.mark.parametrize("damage", ["nan-row", "nan-lane", "inf-lane", "no-token"])
def test_a_row_that_is_not_finite_is_flagged_and_the_others_are_unaffected(ask: Ask, damage: str) -> None:
    logits = random_logits(9, 3, 300)
    asks = [Ask(ask.temperature, ask.top_k, ask.top_p, seed=i) for i in range(3)]
    clean = choose(logits, asks)
    if damage == "nan-row":
        logits[1] = np.nan
    elif damage == "nan-lane":
        logits[1, 17] = np.nan
    elif damage == "inf-lane":
        logits[1, 17] = np.inf
    else:
        logits[1] = -np.inf
    result = sampled(logits, asks)
    assert result.is_finite.tolist() == [True, False, True]
    tokens = result.token_ids.tolist()
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])
    assert 0 <= tokens[1] < 300


@pytest.mark.parametrize("ask", FILTERS.values(), ids=FILTERS)
def test_a_masked_token_is_never_chosen(ask: Ask) -> None:
    logits = random_logits(10, 300, 40)
    logits[:, ::2] = -np.inf
    asks = [Ask(ask.temperature, ask.top_k, ask.top_p, seed=i) for i in range(300)]
    result = sampled(logits, asks)
    assert bool(result.is_finite.all())
    assert all(token % 2 == 1 for token in result.token_ids.tolist())


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-37, 1e-6])
@pytest.mark.parametrize("ask", [Ask(), Ask(top_k=5), Ask(top_p=0.9)], ids=str)
def test_a_temperature_near_zero_is_nearly_greedy_not_a_random_token(ask: Ask, temperature: float) -> None:
    logits = random_logits(11, 50, 300) * 20
    asks = [Ask(temperature, ask.top_k, ask.top_p, seed=i) for i in range(50)]
    assert choose(logits, asks) == logits.argmax(-1).tolist()


def test_a_nucleus_smaller_than_any_number_holds_the_best_token() -> None:
    logits = random_logits(13, 50, 300)
    assert np.float32(1e-60) == 0.0
    assert choose(logits, [Ask(top_p=1e-60, seed=i) for i in range(50)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("size", [40, 37, 1, 1024, 2 * 1024 + 33])
def test_the_largest_is_the_first_of_equals_and_nan_is_larger_than_everything(kernels: KernelChoice, size: int) -> None:
    rng = np.random.default_rng(size)
    rows = rng.choice(
        np.array([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf, np.nan]), (60, size + 3), p=[0.3, 0.28, *[0.1] * 4, 0.02]
    )
    rows[:10] = np.clip(np.nan_to_num(rows[:10], nan=0.0), -1, 2)
    rows[0] = -np.inf
    rows[1:5, :-4] = -1.0
    logits = torch.from_numpy(rows.astype(np.float32))[:, :size]
    values, ids = CpuDevice(kernels).operators.largest(logits)
    for row, value, token_id in zip(logits.tolist(), values.tolist(), ids.tolist(), strict=True):
        nan = [i for i, one in enumerate(row) if np.isnan(one)]
        assert token_id == (nan[0] if nan else row.index(max(row)))
        assert np.isnan(value) if nan else value == max(row)


def test_large_logits_do_not_overflow() -> None:
    logits = random_logits(12, 50, 300) * 1e36
    asks = [Ask(temperature=0.01, top_p=top_p, seed=i) for i, top_p in enumerate([1.0, 0.9] * 25)]
    assert choose(logits, asks) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [5000, 4096, 128 * 64 + 7, 49_152])
@pytest.mark.parametrize("k", [1, 3, 64, 1024])
def test_the_best_tokens_are_those_of_a_whole_sort(vocab_size, k):
    rng = torch.Generator().manual_seed(k + vocab_size)
    scaled = torch.randn(5, vocab_size, generator=rng)
    scaled[1] = torch.sort(scaled[1]).values  # the best ones side by side, at the end
    scaled[2, 7:] = -torch.inf
    values, ids = _best(scaled, k)
    expected = torch.sort(scaled, dim=-1, descending=True).values[:, :k]
    assert torch.equal(values, expected)
    assert torch.equal(scaled.gather(-1, ids), expected)
    assert all(len(set(row.tolist())) == k for row in ids)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_inverting_finds_the_token_that_a_plain_cumulative_sum_finds(n):
    rng = np.random.default_rng(n)
    weights = rng.random((40, n)).astype(np.float32)
    weights[:20] *= rng.random((20, n)) < 0.02
    weights[np.arange(40), rng.integers(n, size=40)] += 0.5
    uniform = rng.random(40)
    uniform[::7] = np.nextafter(1.0, 0.0)
    uniform[::11] = 0.0
    found = _invert(torch.from_numpy(weights), torch.from_numpy(uniform)).tolist()
    for row, token in enumerate(found):
        cumulative = np.cumsum(weights[row].astype(np.float64))
        assert weights[row, token] > 0
        target = uniform[row] * cumulative[-1]
        slack = 1e-12 * cumulative[-1]
        assert cumulative[token] >= target - slack
        assert cumulative[token] - weights[row, token] <= target + slack
