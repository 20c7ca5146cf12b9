"""A device's own sampler against the one on the host: greedy tokens, the distribution of draws, what it declines.

One body for every device that has a sampler. The oracles are `engine.sampling.sampler` on the CPU, in double precision,
and a loop over tokens from the best one on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from devices.base import Device
from devices.registry import try_open
from devices.sampling import Draws, Sampler
from engine.sampling.choice import chooser
from engine.sampling.sampler import Sampled, sample, uniforms
from engine.step import SamplingColumns

pytestmark = pytest.mark.devices("npu-sim")

ALL = -1


@dataclass(frozen=True)
class Ask:
    temperature: float = 1.0
    top_k: int = ALL
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = [Ask(temperature=0.0), Ask(top_k=1), Ask(temperature=0.0, top_k=5, top_p=0.3)]
WHOLE = [Ask(), Ask(temperature=0.3), Ask(temperature=2.5, min_p=0.05), Ask(temperature=1e-40)]
CUT = [
    Ask(top_k=7),
    Ask(top_p=0.7),
    Ask(temperature=1.7, top_k=12, top_p=0.6, min_p=0.2),
    Ask(top_p=1e-6),
    Ask(top_p=0.95, min_p=0.1),
    Ask(top_k=40, top_p=0.999),
    Ask(top_k=10**9),
]


def columns(asks: list[Ask], seed: int = 0) -> SamplingColumns:
    draw = np.random.default_rng(seed)
    return SamplingColumns(
        temperature=np.array([ask.temperature for ask in asks], dtype=np.float32),
        top_k=np.array([ask.top_k for ask in asks], dtype=np.int32),
        top_p=np.array([ask.top_p for ask in asks], dtype=np.float32),
        min_p=np.array([ask.min_p for ask in asks], dtype=np.float32),
        seed=draw.integers(0, 2**62, len(asks)).astype(np.uint64),
        position=draw.integers(0, 5000, len(asks)),
    )


def draws(asks: list[Ask], uniform: npt.NDArray[np.float64]) -> Draws:
    asked = columns(asks)
    return Draws(asked.temperature, asked.top_k, asked.top_p, asked.min_p, uniform)


def random_logits(rows: int, vocab_size: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, spread, (rows, vocab_size)).astype(np.float32))


@pytest.fixture
def device(device_name: str) -> Device:
    opened = try_open(device_name)
    assert not isinstance(opened, str)
    if opened.sampler is None:
        pytest.skip(f"{device_name} has no sampler of its own")
    return opened


@pytest.fixture
def sampler(device: Device) -> Sampler:
    assert device.sampler is not None
    return device.sampler


def by_engine(device: Device, logits: torch.Tensor, asked: SamplingColumns) -> Sampled:
    """As the engine has a step's tokens chosen."""
    choice = chooser(asked, None, None, device.sampler, logits.shape[-1])
    device.send()
    return choice(logits.to(device.torch_device))


def by_sampler(device: Device, logits: torch.Tensor, asked: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    assert device.sampler is not None
    choice = device.sampler.prepare(asked)
    device.send()
    return choice(logits.to(device.torch_device))


def choose(device: Device, logits: torch.Tensor, asked: SamplingColumns) -> list[int]:
    chosen = by_engine(device, logits, asked)
    assert chosen.is_finite.cpu().all()
    assert chosen.on_host == {}
    return chosen.token_ids.cpu().tolist()


@pytest.mark.parametrize("asks", [GREEDY, WHOLE, GREEDY + WHOLE], ids=["greedy", "whole", "mixed"])
def test_greedy_tokens_and_draws_from_all_tokens_are_those_of_the_host(device: Device, asks: list[Ask]) -> None:
    for seed, vocab_size in enumerate((3, 256, 1030)):
        logits, asked = random_logits(len(asks), vocab_size, seed=seed), columns(asks, seed)
        assert choose(device, logits, asked) == sample(logits.clone(), asked).token_ids.tolist()


@pytest.mark.parametrize("ask", WHOLE + CUT, ids=str)
def test_draws_follow_the_distribution(device: Device, ask: Ask) -> None:
    """Numbers spread evenly over [0, 1) give each token its share, to one in the number of draws."""
    n, row = 400, random_logits(1, 90, 1.5, seed=3)
    rows = row.expand(n, 90)
    uniform = (np.arange(n) + 0.5) / n
    tokens, _ = by_sampler(device, rows, draws([ask] * n, uniform))
    got = np.bincount(tokens.cpu().numpy(), minlength=90) / n
    assert np.abs(got - shares(row[0].double().numpy(), ask)).max() <= 1.0 / n + 1e-6


def shares(logits: npt.NDArray[np.float64], ask: Ask) -> npt.NDArray[np.float64]:
    """Probability of each token, by a loop over the tokens from the best one on."""
    order = np.argsort(-logits, kind="stable")
    if ask.temperature < 1e-30:
        return np.where(np.arange(len(logits)) == order[0], 1.0, 0.0)
    weight = np.exp((logits - logits.max()) / np.float32(ask.temperature))
    limit = len(logits) if ask.top_k == ALL else min(ask.top_k, len(logits))
    kept: list[int] = []
    mass, total = 0.0, weight[order[:limit]].sum()
    for token in order[:limit]:
        if kept and mass >= ask.top_p * total:
            break
        kept.append(token)
        mass += weight[token]
    probability = np.zeros(len(logits))
    probability[kept] = np.where(weight[kept] >= np.float32(ask.min_p), weight[kept], 0.0)
    probability /= probability.sum()
    return probability


def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    asks = GREEDY + WHOLE + CUT
    logits, asked = random_logits(len(asks), 300), columns(asks)
    together = choose(device, logits, asked)
    for row in range(len(asks)):
        assert choose(device, logits[row : row + 1], asked.of(np.array([row]))) == [together[row]]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_numbers_is_flagged_and_the_others_are_unaffected(device: Device, number: float) -> None:
    asks = [Ask(top_p=0.8), Ask(), Ask(top_k=5), Ask(temperature=0.0)]
    logits, asked = random_logits(4, 50), columns(asks)
    clean = choose(device, logits, asked)
    for damaged in range(4):
        bad = logits.clone()
        bad[damaged, 17 if number > 0 or np.isnan(number) else slice(None)] = number
        chosen = by_engine(device, bad, asked)
        assert chosen.is_finite.cpu().tolist() == [row != damaged for row in range(4)]
        tokens = chosen.token_ids.cpu().tolist()
        assert 0 <= tokens[damaged] < 50
        assert [t for row, t in enumerate(tokens) if row != damaged] == [
            t for row, t in enumerate(clean) if row != damaged
        ]


def test_a_masked_token_is_never_chosen(device: Device) -> None:
    asks = WHOLE + CUT
    logits = random_logits(len(asks), 40)
    logits[:, ::2] = -torch.inf
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        tokens, is_finite = by_sampler(device, logits, draws(asks, np.full(len(asks), uniform, dtype=np.float64)))
        assert is_finite.cpu().all()
        assert (tokens.cpu() % 2 == 1).all()


def test_a_large_vocabulary_is_drawn_from_without_drift(device: Device) -> None:
    """The share of mass up to the token that is drawn is the number it was drawn with, to float32's exactness."""
    vocab_size, n = 151_000, 16
    logits = random_logits(1, vocab_size, 0.5, seed=9)
    uniform = (np.arange(n) + 0.5) / n
    tokens, _ = by_sampler(device, logits.expand(n, -1), draws([Ask()] * n, uniform))
    until = np.exp(logits[0].double().numpy()).cumsum()
    chosen = tokens.cpu().numpy()
    assert (until[chosen] / until[-1] > uniform - 2e-6).all()
    assert (until[chosen - 1] / until[-1] < uniform + 2e-6).all()


def test_what_is_more_than_a_logprob_is_the_logarithm_of_the_sum(device: Device, sampler: Sampler) -> None:
    logits = random_logits(3, 1100, 3.0)
    logits[0] += 1e4
    got = sampler.log_normaliser(logits.to(device.torch_device)).cpu()
    torch.testing.assert_close(got, torch.logsumexp(logits.double(), -1).float())


def test_a_top_k_beyond_the_sampler_is_drawn_on_the_host_and_counted(device: Device, sampler: Sampler) -> None:
    if sampler.max_top_k is None:
        pytest.skip("it takes any top-k")
    most = sampler.max_top_k
    asks = [Ask(), Ask(top_k=most + 1), Ask(top_k=most), Ask(temperature=0.0, top_k=most + 1), Ask(top_k=10**6)]
    logits, asked = random_logits(len(asks), 2 * most, 1.0), columns(asks)
    chosen = by_engine(device, logits, asked)
    want = sample(logits.clone(), asked).token_ids.tolist()
    assert chosen.on_host == {"top_k": 1}
    tokens = chosen.token_ids.cpu().tolist()
    assert [tokens[row] for row in (0, 1, 3)] == [want[row] for row in (0, 1, 3)]
    kept = torch.topk(logits[2], most).indices.tolist()
    assert tokens[2] in kept
    alone = by_engine(device, logits[1:2], asked.of(np.array([1])))
    assert alone.token_ids.cpu().tolist() == [want[1]]


def test_nothing_waits_for_the_device(device: Device, device_name: str) -> None:
    if device_name != "npu-sim":
        pytest.skip("only the emulator counts waits")
    from devices.npu.emulator import counting

    asks = GREEDY + WHOLE + CUT
    logits = random_logits(len(asks), 300).to(device.torch_device)
    asked = columns(asks)
    with counting() as counted:
        by_sampler(device, logits, draws(asks, uniforms(asked.seed, asked.position)))
    assert counted.counts.syncs == Counter()
    assert counted.counts.operators["npu::npu_top_k_top_p"] == 2, "with a top-k, and with a top-p alone"
