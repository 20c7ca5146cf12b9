"""`--deterministic`: a logprob is the same to the last bit, whatever the batch, the chunks, the page and the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import make_llm, run
from tiny_models import save_tiny_model

from devices.registry import DeviceUnavailable, open_device
from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.errors import ConfigError

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, return_logprob=True, top_logprobs_num=3)

if open_device("cpu").device.pack is None:
    pytest.skip("the CPU's own kernels cannot be built here", allow_module_level=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that the library's products of many and of few rows differ."""
    path = tmp_path_factory.mktemp("deterministic")
    save_tiny_model(path, "llama", hidden_size=288, intermediate_size=1056)
    return path


def prompts() -> list[list[int]]:
    """Lengths below and above the rows at which the default changes products, with a shared head."""
    rng = np.random.default_rng(3)
    head = rng.integers(3, 250, 40).tolist()
    return [[*head, *rng.integers(3, 250, n).tolist()] for n in (1, 9, 50, 120, 33, 2)]


def logprobs(llm: LLM, batch: list[list[int]]) -> list[list[tuple[int, float, tuple[tuple[int, float], ...]]]]:
    """Token, logprob and best tokens of every step, request after request; floats are compared as they are."""
    requests = run(llm, batch, PARAMS)
    return [[(one.token_id, one.logprob, one.top) for one in r.scores.output] for r in requests if r.scores is not None]


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
def test_every_bit_is_the_same_whatever_else_is_in_the_step(saved: Path, dtype: str, quantization: str) -> None:
    def engine(**kwargs: int | bool) -> LLM:
        return make_llm(saved, deterministic=True, dtype=dtype, quantization=quantization, **kwargs)

    alone = engine(disable_radix_cache=True, page_size=1, chunked_prefill_size=-1)
    expected = [logprobs(alone, [prompt])[0] for prompt in prompts()]
    for page_size, chunk in ((16, -1), (1, 7), (128, 100)):
        together = engine(page_size=page_size, chunked_prefill_size=chunk)
        for _ in range(2):  # the second time from the cache
            assert logprobs(together, prompts()) == expected


def test_flags_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="deterministic and kernels=torch exclude each other"):
        EngineConfig.from_kwargs(deterministic=True, kernels="torch")


@pytest.mark.parametrize("name", ["cuda", "npu", "npu-sim"])
def test_devices_that_cannot_promise_it_refuse(name: str) -> None:
    with pytest.raises(DeviceUnavailable, match="--deterministic works with --device cpu"):
        open_device(name, "deterministic")
