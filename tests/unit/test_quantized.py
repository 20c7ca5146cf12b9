"""Weights of few bits: what rounding may cost, and GGUF's blocks against the `gguf` package's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from tiny_ggufs import write_tiny_gguf
from tiny_models import save_tiny_model

from devices.quantized import QuantizedWeight, joined, quantize
from engine.errors import ModelLoadError
from engine.weights.gguf import GgufSource
from engine.weights.gguf_blocks import packed
from engine.weights.slot import WeightSlot

HALF_ULP = 2.0**-11
"""How much fp16 rounds, relative to the number."""

SCALES = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": -1}
"""fp16 numbers at the start of a block; Q6_K has one at its end."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def random_blocks(kind: str, rows: int, in_size: int) -> np.ndarray:
    """Blocks of random bytes with scales of random size."""
    rng = np.random.default_rng(len(kind))
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * in_size // block_size, block_bytes), dtype=np.uint8)
    numbers = rng.uniform(-0.02, 0.02, (len(blocks), abs(SCALES[kind]))).astype(np.float16).view(np.uint8)
    place = slice(-numbers.shape[1], None) if SCALES[kind] < 0 else slice(numbers.shape[1])
    blocks[:, place] = numbers
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("in_size", [1, 31, 32, 100, 576])
def test_eight_bits_are_off_by_at_most_half_a_step(in_size: int) -> None:
    weight = draw(9, in_size)
    got = quantize(weight, 8)
    step = got.scales.float().repeat_interleave(32, 1)[:, :in_size]
    assert got.shape == weight.shape
    # The largest elements may lie beyond 127 steps, by what fp16 took from the step.
    assert ((got.dequantized(torch.float32) - weight).abs() <= step / 2 + 128 * step * HALF_ULP).all()


@pytest.mark.parametrize("in_size", [1, 31, 32, 100, 576])
def test_four_bits_are_no_worse_than_sixteen_even_steps_over_a_block(in_size: int) -> None:
    weight = draw(9, in_size, seed=1)
    got = quantize(weight, 4)
    blocks = torch.nn.functional.pad(weight, (0, -in_size % 32)).reshape(9, -1, 32)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low) / 15
    even = torch.where(step > 0, low + ((blocks - low) / step).round() * step, low)
    mine = torch.nn.functional.pad(got.dequantized(torch.float32), (0, -in_size % 32)).reshape(blocks.shape)
    mine, even, blocks = (x.flatten(1)[:, :in_size].double() for x in (mine, even, blocks))
    assert (mine - blocks).square().sum() <= (even - blocks).square().sum() * 1.01 + 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros_and_constants_constant(bits: int) -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2, 32:] = 0.5, -0.25
    got = quantize(weight, bits).dequantized(torch.float32)
    torch.testing.assert_close(got, weight, rtol=HALF_ULP * 2, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_does_not_fit_is_refused(bits: int, value: float) -> None:
    weight = draw(4, 64)
    weight[2, 40] = value
    with pytest.raises(ValueError, match="not finite, or beyond fp16"):
        quantize(weight, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_one_form_join_row_by_row(bits: int) -> None:
    parts = [quantize(draw(rows, 96, seed=rows), bits) for rows in (3, 1, 20)]
    whole = joined(parts)
    assert whole.shape == (24, 96)
    assert whole.num_bytes == sum(part.num_bytes for part in parts)
    values = [part.dequantized(torch.float32) for part in parts]
    assert torch.equal(whole.dequantized(torch.float32), torch.cat(values))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_simple_blocks_are_taken_over_bit_by_bit(kind: str) -> None:
    rows = random_blocks(kind, 7, 96)
    got = packed(rows, GGMLQuantizationType[kind], 96)
    assert got.num_bytes == rows.nbytes
    assert np.array_equal(got.dequantized(torch.float32).numpy(), dequantize(rows, GGMLQuantizationType[kind]))


def test_products_of_scales_are_rounded_to_fp16() -> None:
    rows = random_blocks("Q4_K", 5, 1024)
    got = packed(rows, GGMLQuantizationType.Q4_K, 1024)
    want = dequantize(rows, GGMLQuantizationType.Q4_K)
    assert (got.bits, got.quants.shape) == (4, (5, 32, 16))
    largest = (got.scales.float().abs() * 15 + got.minima.float().abs()).repeat_interleave(32, 1).numpy()
    assert (np.abs(got.dequantized(torch.float32).numpy() - want) <= largest * HALF_ULP * 1.01 + 1e-7).all()
    assert np.abs(want).max() > 1


@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K"])
def test_five_and_six_bits_become_eight(kind: str) -> None:
    rows = random_blocks(kind, 5, 512)
    got = packed(rows, GGMLQuantizationType[kind], 512)
    want = torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))
    largest = want.reshape(5, -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert got.bits == 8
    assert ((got.dequantized(torch.float32) - want).abs() <= largest * (0.5 / 127 + 2 * HALF_ULP)).all()


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q6_K", 8)])
def test_a_file_gives_its_matrices_packed_and_the_rest_as_before(tmp_path: Path, kind: str, bits: int) -> None:
    size = 256 if kind.endswith("K") else 64
    model = save_tiny_model(
        tmp_path / "hf", "llama", hidden_size=size, intermediate_size=size, head_dim=size // 4, num_attention_heads=4
    )
    path = tmp_path / "m.gguf"
    if kind.endswith("K"):  # the package has no quantiser of these: random blocks in the place of Q8_0
        write_tiny_gguf(path, model, "llama", kind, store=lambda values, kind: random_blocks(kind, *values.shape))
    else:
        write_tiny_gguf(path, model, "llama", kind)
    plain, kept = dict(GgufSource(path).tensors()), dict(GgufSource(path).tensors(keep_packed=True))
    assert plain.keys() == kept.keys()
    for name, value in kept.items():
        if value.shape == plain[name].shape and len(value.shape) == 1:
            assert torch.equal(value, plain[name])
            continue
        assert isinstance(value, QuantizedWeight)
        assert value.bits == bits
        share = 5e-3 if kind.endswith("K") else 0
        assert (value.dequantized(torch.float32) - plain[name]).norm() <= share * plain[name].norm()


def slot(bits: int | None) -> WeightSlot:
    return WeightSlot(torch.Size((4, 64)), bits, torch.bfloat16, torch.device("cpu"))


def test_a_slot_keeps_what_has_few_enough_bits() -> None:
    weight = draw(4, 64)
    four, eight = quantize(weight, 4), quantize(weight, 8)
    for bits, given, kept in [(None, four, four), (None, eight, eight), (8, four, four), (4, four, four)]:
        place = slot(bits)
        place.put(given)
        assert place.nbytes == kept.num_bytes
        assert place.take() is kept
    for bits, given in [(4, eight), (4, weight), (8, weight)]:
        place = slot(bits)
        place.put(given)
        taken = place.take()
        assert isinstance(taken, QuantizedWeight)
        assert taken.bits == bits
    place = slot(None)
    place.put(weight)
    assert torch.equal(place.take(), weight.bfloat16())


def test_a_slot_knows_what_it_would_keep() -> None:
    weight = draw(4, 64)
    for bits in (None, 8):
        place = slot(bits)
        place.put(weight)
        assert place.would_keep(weight.clone())
        assert not place.would_keep(weight + 1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_scales_that_are_no_numbers_are_refused_with_the_tensor(tmp_path: Path, kind: str) -> None:
    def store(values: np.ndarray, kind: str) -> np.ndarray:
        blocks = random_blocks(kind, *values.shape)
        number = np.array([np.inf], dtype=np.float16).view(np.uint8)
        blocks[3, -2:] = number
        blocks[3, :2] = number
        return blocks

    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    path = write_tiny_gguf(
        tmp_path / "m.gguf", save_tiny_model(tmp_path / "hf", "llama", **sizes), "llama", kind, store
    )
    with pytest.raises(ModelLoadError, match=r"token_embd.weight: .* beyond fp16"):
        list(GgufSource(path).tensors(keep_packed=True))
