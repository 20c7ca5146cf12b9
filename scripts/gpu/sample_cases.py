"""The choice of tokens, and what happens to logits before it."""

from __future__ import annotations

import numpy as np
import torch
from case import Case, randn


def sample(name: str, device: torch.device, rows: int, vocab_size: int, top_p: float | None) -> Case:
    from report import share_wrong

    from devices.cuda.kernels.sample import sample as choose
    from engine.sampling import sampler
    from engine.step import SamplingColumns

    logits = [randn(device, rows, vocab_size, dtype=torch.float32) * 2 for _ in range(4)]
    columns = SamplingColumns(
        temperature=np.full(rows, 0.0 if top_p is None else 0.7, dtype=np.float32),
        top_k=np.full(rows, -1, dtype=np.int32),
        top_p=np.full(rows, top_p or 1.0, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.arange(rows, dtype=np.int64),
    )
    uniform = sampler.uniforms(columns.seed, columns.position)
    on_device = [
        torch.from_numpy(x).to(device)
        for x in (columns.temperature, columns.top_k, columns.top_p, columns.min_p, uniform)
    ]
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [choose(logits[i], *on_device)[0]]

    def error() -> float:
        return share_wrong(last[0].tolist(), sampler.sample(logits[0].cpu(), columns).token_ids.tolist())

    # Sums round differently on the two: one row in fifty may be drawn on the border of two tokens.
    return Case(name, run, error, 4 * rows * vocab_size, target=0.6 if top_p is None else None, tolerance=0.02)


def edit(name: str, device: torch.device, rows: int, vocab_size: int, seen: int) -> Case:
    """Penalties of `seen` tokens a row, two biases and a grammar in every row; the same bits as the plain form's."""
    from devices.cuda.kernels.edit import Biases, Masks, Penalties, edit_logits
    from devices.sampling import AllowedTokens, LogitEdits
    from devices.torch_forms.logits import changed

    draw = np.random.default_rng(0)
    logits = [randn(device, rows, vocab_size, dtype=torch.float32) * 4 for _ in range(4)]
    row = np.arange(rows, dtype=np.int32)
    tokens = np.stack([draw.choice(vocab_size, seen, replace=False) for _ in row]).astype(np.int32)
    words = draw.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32))).astype(np.int32)
    columns = [draw.uniform(0.5, 2.0, rows).astype(np.float32) for _ in range(3)]
    counts = draw.integers(0, 3, rows * seen).astype(np.int32)
    biased, biases = np.tile(np.array([3, 5], dtype=np.int32), rows), np.tile(np.float32([1.5, -2.0]), rows)
    plain = LogitEdits(np.repeat(row, seen), tokens.reshape(-1), counts, *columns, np.repeat(row, 2), biased, biases)

    def on_device(*arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    starts = np.arange(rows + 1, dtype=np.int32)
    penalties = Penalties(*on_device(starts * seen, plain.token_id, counts, *columns))
    added, masks = Biases(*on_device(starts * 2, biased, biases)), Masks(*on_device(row, words))
    last: list[torch.Tensor] = []

    def run(i: int) -> None:
        last[:] = [edit_logits(logits[i], penalties, added, masks)]

    def error() -> float:
        want = changed(logits[0], plain, AllowedTokens(row, words))
        return float((last[0] != want).float().mean())

    num_bytes = rows * (8 * vocab_size + 4 * words.shape[1] + 8 * seen)
    return Case(name, run, error, num_bytes, target=0.6, tolerance=1e-6)
