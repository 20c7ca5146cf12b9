"""Penalties, biases and grammars on the GPU are those of `engine.sampling.logits`, and so is the token that follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted_gpu import InterpretedRuntime

from devices.cuda.arguments import BadKernelArgument
from devices.cuda.kernels.edit import Masks, edit_logits
from devices.cuda.sampler import TritonSampler, stage_edits
from devices.cuda.upload import Uploader
from devices.sampling import AllowedTokens, LogitEdits
from devices.torch_forms.logits import changed
from engine.sampling.choice import chooser
from engine.step import SamplingColumns

# Infinities are meant here; the interpreter is numpy, which warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS, VOCAB = 5, 1100
"""More than one block of tokens, no multiple of one, and no multiple of 32."""


def some_logits(seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, 4.0, (ROWS, vocab_size)).astype(np.float32))


def some_edits(seed: int = 0, vocab_size: int = VOCAB) -> LogitEdits:
    """Row 0 has nothing, row 4 all; a token of row 1 has a bias and is forbidden, in this order and the other."""
    draw = np.random.default_rng(seed)
    counts = (0, 3, 1, 200, vocab_size)
    seen = [np.sort(draw.choice(vocab_size, n, replace=False)) for n in counts]
    biases = [(1, 7, 3.5), (1, 7, -np.inf), (1, 8, -np.inf), (1, 8, 2.0), (3, 0, -4.0), (3, vocab_size - 1, 5.0)]
    return LogitEdits(
        row=np.repeat(np.arange(ROWS), counts).astype(np.int32),
        token_id=np.concatenate(seen).astype(np.int32),
        count=draw.integers(0, 4, sum(counts)).astype(np.int32),
        repetition=np.array([1.0, 1.3, 0.7, 1.9, 1.1], dtype=np.float32),
        presence=np.array([0.0, 0.5, -1.5, 2.0, 0.1], dtype=np.float32),
        frequency=np.array([0.0, -0.25, 1.0, 0.3, 0.7], dtype=np.float32),
        bias_row=np.array([row for row, _, _ in biases], dtype=np.int32),
        bias_token_id=np.array([token for _, token, _ in biases], dtype=np.int32),
        bias=np.array([bias for _, _, bias in biases], dtype=np.float32),
    )


def without(edits: LogitEdits, *names: str) -> LogitEdits:
    return LogitEdits(*(getattr(edits, n)[: 0 if n in names else None] for n in LogitEdits.__slots__))


PENALTIES_ONLY = without(some_edits(), "bias_row", "bias_token_id", "bias")
BIASES_ONLY = without(some_edits(), "row", "token_id", "count")


def a_grammar(rows: list[int], seed: int = 0, vocab_size: int = VOCAB) -> AllowedTokens:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)))
    return AllowedTokens(np.array(rows, dtype=np.int32), words.astype(np.int32))


def on_gpu(logits: torch.Tensor, edits: LogitEdits | None, allowed: AllowedTokens | None) -> torch.Tensor:
    uploader = Uploader(InterpretedRuntime())
    edit = stage_edits(uploader, len(logits), edits, allowed)
    assert edit is not None
    uploader.send()
    return edit(logits)


@pytest.mark.parametrize(
    ("edits", "allowed"),
    [
        (PENALTIES_ONLY, None),
        (BIASES_ONLY, None),
        (None, a_grammar([1, 3])),
        (some_edits(), a_grammar([3, 0, 4])),
    ],
    ids=["penalties", "biases", "grammar", "all"],
)
def test_changed_logits_are_the_same_bits_as_on_the_cpu(
    edits: LogitEdits | None, allowed: AllowedTokens | None
) -> None:
    logits = some_logits()
    before = logits.clone()
    got = on_gpu(logits, edits, allowed)
    assert torch.equal(got, changed(logits, edits, allowed))
    assert torch.equal(logits, before), "the model's own logits are scored later"
    assert got.stride(0) % 16 == 0


def test_programs_of_a_row_keep_to_their_spans() -> None:
    logits, edits = some_logits(), some_edits()
    uploader = Uploader(InterpretedRuntime())
    edit = stage_edits(uploader, ROWS, edits, None)
    assert edit is not None
    uploader.send()
    assert torch.equal(edit(logits, span=256), edit(logits))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_logit_shows_also_where_a_grammar_forbids_it(bad: float) -> None:
    """A forbidden -inf is as good as any other; the row of a NaN or +inf is flagged, the others are not."""
    allowed = a_grammar([0, 1, 2, 3, 4])
    allowed.words[:, 0] &= ~1
    logits = some_logits()
    logits[2, 0] = bad
    columns = SamplingColumns(
        *(np.full(ROWS, value, dtype=dtype) for value, dtype in ((0, np.float32), (-1, np.int32), (1, np.float32))),  # type: ignore[arg-type]
        min_p=np.zeros(ROWS, dtype=np.float32),
        seed=np.arange(ROWS, dtype=np.uint64),
        position=np.arange(ROWS),
    )
    uploader = Uploader(InterpretedRuntime())
    choose = chooser(columns, None, allowed, TritonSampler(uploader), logits.shape[-1])
    uploader.send()
    got, want = choose(logits), chooser(columns, None, allowed, None, logits.shape[-1])(logits)
    assert got.is_finite.tolist() == want.is_finite.tolist()
    assert got.is_finite.tolist() == [True, True, bad == float("-inf"), True, True]
    assert torch.equal(got.token_ids[got.is_finite], want.token_ids[want.is_finite])


def test_seeded_choices_after_edits_are_those_of_the_plain_form() -> None:
    logits, edits, allowed = some_logits(3), some_edits(3), a_grammar([0, 2, 4], 3)
    columns = SamplingColumns(
        temperature=np.array([1.0, 0.7, 0.0, 1.5, 1.0], dtype=np.float32),
        top_k=np.array([-1, 20, -1, -1, 5], dtype=np.int32),
        top_p=np.array([1.0, 0.9, 1.0, 0.8, 1.0], dtype=np.float32),
        min_p=np.array([0.0, 0.0, 0.0, 0.01, 0.1], dtype=np.float32),
        seed=np.arange(9, 9 + ROWS, dtype=np.uint64),
        position=np.arange(40, 40 + ROWS),
    )
    uploader = Uploader(InterpretedRuntime())
    choose = chooser(columns, edits, allowed, TritonSampler(uploader), logits.shape[-1])
    uploader.send()
    assert uploader.num_copies == 1, "penalties, biases, grammar and draws go up together"
    got, want = choose(logits), chooser(columns, edits, allowed, None, logits.shape[-1])(logits)
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.is_finite.all()


def test_a_mask_that_ends_before_the_vocabulary_is_refused() -> None:
    masks = Masks(torch.zeros(ROWS, dtype=torch.int32), torch.zeros(1, VOCAB // 32, dtype=torch.int32))
    with pytest.raises(BadKernelArgument, match="34 words of 32 tokens do not cover a vocabulary of 1100"):
        edit_logits(some_logits(), None, None, masks)
