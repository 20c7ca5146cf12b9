"""Penalties, biases and min-p against a plain form that treats one request at a time in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from devices.sampling import AllowedTokens, LogitEdits
from devices.torch_forms.logits import edited, masked
from engine.sampling.logits import joined, score
from engine.sampling.sampler import sample
from engine.step import SamplingColumns

VOCAB = 50


def plain_edits(logits, prompt, output, repetition, presence, frequency, bias, forbidden):
    row = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= presence + frequency * output.count(token)
    for token, value in bias.items():
        row[token] += value
    row[list(forbidden)] = -np.inf
    return row


def columns_of(rows) -> LogitEdits:
    seen, biases = [], []
    for i, (prompt, output, _, _, _, bias, forbidden) in enumerate(rows):
        seen += [(i, token, output.count(token)) for token in sorted(set(prompt) | set(output))]
        biases += [(i, token, value) for token, value in bias.items()] + [(i, token, -np.inf) for token in forbidden]
    places = np.array(seen, dtype=np.int32).reshape(-1, 3)
    return LogitEdits(
        *places.T,
        *(np.array([row[k] for row in rows], dtype=np.float32) for k in (2, 3, 4)),
        np.array([b[0] for b in biases], dtype=np.int32),
        np.array([b[1] for b in biases], dtype=np.int32),
        np.array([b[2] for b in biases], dtype=np.float32),
    )


@pytest.mark.parametrize("seed", range(8))
def test_edits_equal_the_plain_form(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (6, VOCAB)).astype(np.float32)
    rows = [
        (
            rng.integers(0, VOCAB, 12).tolist(),
            rng.integers(0, VOCAB, rng.integers(0, 20)).tolist(),
            float(rng.uniform(0.3, 2)),
            float(rng.uniform(-2, 2)),
            float(rng.uniform(-2, 2)),
            dict(zip(rng.integers(0, VOCAB, 3).tolist(), rng.normal(0, 5, 3).tolist(), strict=True)),
            set(rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()),
        )
        for _ in range(6)
    ]
    want = np.stack([plain_edits(row, *edits) for row, edits in zip(logits, rows, strict=True)])
    before = logits.copy()
    got = edited(torch.from_numpy(logits), columns_of(rows)).numpy()
    assert np.allclose(got, want, atol=1e-5)
    assert np.array_equal(before, logits)


def draws(logits: torch.Tensor, n: int, **cuts: float) -> np.ndarray:
    """Tokens of `n` independent draws from the same logits [vocab]."""
    values = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | cuts
    columns = SamplingColumns(
        temperature=np.full(n, values["temperature"], dtype=np.float32),
        top_k=np.full(n, values["top_k"], dtype=np.int32),
        top_p=np.full(n, values["top_p"], dtype=np.float32),
        min_p=np.full(n, values["min_p"], dtype=np.float32),
        seed=np.arange(n, dtype=np.uint64),
        position=np.zeros(n, dtype=np.int64),
    )
    return sample(logits.expand(n, -1).clone(), columns).token_ids.numpy()


def plain_distribution(logits: np.ndarray, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The definition, in float64: temperature, top-k, top-p over what is left, min-p, renormalised."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k != -1:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "cuts",
    [
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 0.05, "temperature": 2.0},
        {"min_p": 0.1, "top_k": 12},
        {"min_p": 0.3, "top_p": 0.8, "temperature": 0.5},
        {"top_k": 5, "top_p": 0.7, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_definition(cuts):
    """Chi-square of 20,000 seeded draws; the bound is the 99.99 % point for up to 49 degrees of freedom."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32))
    n = 20_000
    counts = np.bincount(draws(logits, n, **cuts), minlength=VOCAB)
    expected = plain_distribution(logits.numpy(), **cuts) * n
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi_square < 96.0


def test_the_chi_square_can_fail():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32))
    counts = np.bincount(draws(logits, 20_000, temperature=1.1), minlength=VOCAB)
    expected = plain_distribution(logits.numpy()) * 20_000
    likely = expected > 5
    assert ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum() > 96.0


def test_a_row_without_any_allowed_token_is_not_finite():
    logits = torch.zeros(2, VOCAB)
    logits[1] = -torch.inf
    columns = SamplingColumns(
        *(np.zeros(2, dtype=t) for t in (np.float32, np.int32, np.float32, np.float32, np.uint64, np.int64))
    )
    assert sample(logits, columns).is_finite.tolist() == [True, False]


def test_scores_are_log_softmax():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    target = torch.tensor([1, 2, 3, 4, 5])
    extra_row, extra_token = torch.tensor([0, 0, 4]), torch.tensor([7, 8, 9])
    whole = score(logits, target, 3, extra_row, extra_token)
    want = logits.double().log_softmax(-1)
    assert np.allclose(whole.chosen, want[range(5), target], atol=1e-5)
    assert np.allclose(whole.top, want.topk(3).values, atol=1e-5)
    assert np.allclose(whole.extra, [want[0, 7], want[0, 8], want[4, 9]], atol=1e-5)
    parts = [
        score(logits[:2], target[:2], 3, extra_row[:2], extra_token[:2]),
        score(logits[2:], target[2:], 3, extra_row[2:] - 2, extra_token[2:]),
    ]
    for name in ("chosen", "top_ids", "top", "extra"):
        assert np.array_equal(getattr(joined(parts), name), getattr(whole, name))


@pytest.mark.parametrize("vocab", [5, 32, 33, 100])
def test_a_mask_leaves_its_tokens_and_only_in_its_rows(vocab):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(4, vocab)).astype(np.float32))
    may = rng.random((2, -(-vocab // 32) * 32)) < 0.3
    words = np.packbits(may, axis=1, bitorder="little").view(np.int32)
    plain = logits.numpy().copy()
    for row, own in zip((3, 1), may, strict=True):
        plain[row][~own[:vocab]] = -np.inf
    done = masked(logits, AllowedTokens(np.array([3, 1], dtype=np.int32), words))
    assert (done.numpy() == plain).all()


def test_a_mask_hides_no_nan():
    logits = torch.zeros(2, 40)
    logits[0, 39] = torch.nan
    done = masked(logits, AllowedTokens(np.array([0, 1], dtype=np.int32), np.array([[1, 0]] * 2, dtype=np.int32)))
    assert done[0].isnan().all()
    assert done[1].isfinite().tolist() == [True] + [False] * 39
