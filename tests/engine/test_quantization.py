"""Weights of 4 and 8 bits in an engine: near the same weights as floats, the same whatever the batch and the chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, make_llm, run
from reference_logits import logits_of_steps
from tiny_ggufs import write_tiny_gguf
from tiny_models import save_tiny_model

from devices.base import Device
from devices.cpu.device import CpuDevice
from devices.quantized import quantize
from engine import LLM, SamplingParams
from engine.assembly import choose_quantization
from engine.config import ModelArgs
from engine.models.parts import Parts

HAS_KERNELS = CpuDevice().pack is not None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="the CPU kernels cannot be built here")

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
PROMPT = np.random.default_rng(5).integers(3, 300, 40).tolist()
TEXT = (
    "Rivers carry water, sand and news from the mountains to the sea. A bridge over one of them is old when the people "
    "who cross it no longer know who built it, and it is loved when they repair it without being asked. In spring the "
    "snow melts, the current grows brown and fast, and fishermen wait on the banks with their nets folded beside them. "
    "Children throw sticks from one side and run to the other to see whose comes out first."
)


def gguf_of(folder: Path, quant: str, architecture: str = "llama", **overrides: Any) -> Path:
    model = save_tiny_model(folder / "hf", architecture, seed=3, **(SHAPE | overrides))
    return write_tiny_gguf(folder / "m.gguf", model, architecture, quant)


def assert_near(got: LLM, wanted: LLM, share: float) -> None:
    ours, _ = logits_of_steps(got, PROMPT, 1)
    theirs, _ = logits_of_steps(wanted, PROMPT, 1)
    assert (ours - theirs).norm() < share * theirs.norm()


@needs_kernels
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_runs_in_its_own_bits(tmp_path: Path, quant: str, tied: bool) -> None:
    path = gguf_of(tmp_path, quant, tie_word_embeddings=tied)
    kept, plain = make_llm(path, dtype="bfloat16"), make_llm(path, dtype="bfloat16", quantization="none")
    share = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[quant] / 64
    assert kept.core.runner.model.step_bytes < (share + 0.03) * plain.core.runner.model.step_bytes
    assert_near(kept, make_llm(path), 0.05)
    assert_near(plain, make_llm(path), 0.05)


@needs_kernels
def test_biases_and_experts(tmp_path: Path) -> None:
    for architecture in ("qwen2", "qwen3moe"):
        path = gguf_of(tmp_path / architecture, "Q8_0", architecture, moe_intermediate_size=64)
        assert_near(make_llm(path, dtype="bfloat16"), make_llm(path), 0.05)


@needs_kernels
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_1"])
def test_chunks_batches_and_the_cache_change_no_bit(tmp_path: Path, quant: str) -> None:
    path = gguf_of(tmp_path, quant)
    whole, tokens = logits_of_steps(make_llm(path, dtype="bfloat16"), PROMPT, 12)
    chunked = make_llm(path, dtype="bfloat16", chunked_prefill_size=7)
    for _ in range(2):  # once more, from the cache
        got, same = logits_of_steps(chunked, PROMPT, 12)
        assert torch.equal(got, whole)
        assert same == tokens
    others = [np.random.default_rng(i).integers(3, 300, 5 + 7 * i).tolist() for i in range(6)]
    together = run(make_llm(path, dtype="bfloat16"), [*others, PROMPT], GREEDY)
    alone = run(make_llm(path, dtype="bfloat16"), [PROMPT], GREEDY)
    assert together[-1].output_ids == alone[0].output_ids


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("wanted", "share"), [("int8", 0.05), ("int4", 0.6)])
def test_floats_are_rounded_on_request(tmp_path: Path, wanted: str, share: float, kernels: str) -> None:
    save_tiny_model(tmp_path, "llama", seed=3, **(SHAPE | {"intermediate_size": 150}))
    got = make_llm(tmp_path, quantization=wanted, kernels=kernels)
    plain = make_llm(tmp_path)
    assert_near(got, plain, share)
    fewer = 0.32 if wanted == "int8" else 0.3
    is_packed = HAS_KERNELS and kernels == "auto"
    assert (got.core.runner.model.step_bytes < fewer * plain.core.runner.model.step_bytes) == is_packed


@needs_kernels
def test_the_torch_form_computes_with_the_same_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", seed=3, **SHAPE)
    for wanted in ("int8", "int4"):
        packed, dense = (make_llm(tmp_path, quantization=wanted, kernels=kernels) for kernels in ("auto", "torch"))
        assert_near(packed, dense, 0.06)


def test_fp32_by_name_and_none_keep_every_bit_of_the_file(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, "Q4_1")
    wanted, _ = logits_of_steps(make_llm(path, quantization="none"), PROMPT, 2)
    got, _ = logits_of_steps(make_llm(path), PROMPT, 2)
    assert torch.equal(got, wanted)


def test_which_weights_stay_in_few_bits() -> None:
    def chosen(kernels: Any, saved: str | None, **model: str) -> str:
        device: Device = CpuDevice(kernels)
        return choose_quantization(ModelArgs(**model), saved, device)  # type: ignore[arg-type]

    kept = "file" if HAS_KERNELS else "none"
    assert chosen("auto", None) == chosen("auto", None, dtype="bfloat16") == kept
    assert chosen("auto", "bfloat16") == chosen("auto", None, dtype="float32") == "none"
    assert chosen("torch", None) == chosen("auto", None, quantization="none") == "none"
    assert chosen("torch", None, quantization="int8") == chosen("auto", "bfloat16", quantization="int8") == "int8"
    assert chosen("auto", None, dtype="float32", quantization="int4") == "int4"


@needs_kernels
def test_parts_of_several_forms_make_one_output() -> None:
    rng = np.random.default_rng(0)
    weights = [torch.from_numpy(rng.standard_normal((rows, 64), dtype=np.float32)) for rows in (20, 6, 6, 9)]
    given = [quantize(weights[0], 4), quantize(weights[1], 8), quantize(weights[2], 8), weights[3]]
    parts = Parts(torch.float32, CpuDevice(), "file")
    linear = parts.linear(64, [20, 6, 6, 9], bias=True)
    named = linear.destinations("abcd")
    bias = []
    for name, weight in zip("abcd", given, strict=True):
        named[f"{name}.weight"].put(weight)
        named[f"{name}.bias"].copy_(torch.from_numpy(rng.standard_normal(weight.shape[0], dtype=np.float32)))
        bias.append(named[f"{name}.bias"])
    dense = torch.cat([w if isinstance(w, torch.Tensor) else w.dequantized(torch.float32) for w in given])
    want_bias = torch.cat(bias)
    parts.prepare()
    x = torch.from_numpy(rng.standard_normal((5, 64), dtype=np.float32))
    got, want = linear.linear(x), x @ dense.T + want_bias
    assert got.shape == (5, 41)
    assert (got - want).norm() < 0.01 * want.norm()
    assert torch.allclose(got[:, 32:], want[:, 32:], atol=1e-4)


def mean_nll(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_new_tokens=1, return_logprob=True, logprob_start_len=0)
    scores = llm.generate(llm.tokenizer.encode(TEXT), params).prompt_logprobs
    assert scores is not None
    found = [score.logprob for score in scores if score is not None]
    assert len(found) > 80
    return -math.fsum(found) / len(found)


@needs_kernels
@pytest.mark.smollm2
def test_the_default_model_is_as_good_in_its_own_bits(smollm2_path: Path) -> None:
    wanted = mean_nll(make_llm(smollm2_path, dtype="bfloat16", quantization="none"))
    got = mean_nll(make_llm(smollm2_path, dtype="bfloat16"))
    assert abs(got - wanted) < 0.01 * wanted
    assert 3 < wanted < 5
