"""Arguments of the engine: unknown names, other spellings, conflicts, types, ranges and choices."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import ENV_MODEL_CACHE, THEMES, EngineConfig, all_fields
from engine.errors import ConfigError


def refuse(**kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**kwargs)
    return str(caught.value)


def value_of(config: EngineConfig, name: str) -> Any:
    for theme in (config.model, config.memory, config.cache, config.session, config.schedule):
        if hasattr(theme, name):
            return getattr(theme, name)
    raise AssertionError(name)


def test_no_argument_at_all_gives_the_defaults() -> None:
    assert EngineConfig.from_kwargs() == EngineConfig()


def test_every_argument_has_help_and_one_home() -> None:
    names = [f.name for _, f in all_fields()]
    assert len(names) == len(set(names))
    assert {theme for theme, _ in all_fields()} == set(THEMES)
    spellings = [spelling for _, f in all_fields() for spelling in (f.name, *f.metadata["aliases"])]
    assert len(spellings) == len(set(spellings))
    assert all(f.metadata["help"].endswith((".", "others.")) for _, f in all_fields())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("page_sise", "page_size"),
        ("max_num_seq", "max_num_seqs"),
        ("disable_radix", "disable_radix_cache"),
        ("chunked_prefil_size", "chunked_prefill_size"),
    ],
)
def test_an_unknown_argument_is_told_the_nearest_name(wrong: str, near: str) -> None:
    assert refuse(**{wrong: 1}) == f"unknown argument {wrong}; did you mean {near}?"


def test_an_unknown_argument_that_resembles_nothing_gets_no_hint() -> None:
    assert refuse(zzzz=1) == "unknown argument zzzz"


ALIASES = [
    ("model_path", "model", "m"),
    ("max_model_len", "context_length", 64),
    ("block_size", "page_size", 16),
    ("gpu_memory_utilization", "mem_fraction_static", 0.5),
    ("max_num_seqs", "max_running_requests", 4),
    ("max_num_batched_tokens", "chunked_prefill_size", 64),
    ("seed", "random_seed", 7),
    ("enforce_eager", "disable_cuda_graph", True),
]


def test_every_alias_is_tested() -> None:
    assert {alias for alias, _, _ in ALIASES} == {alias for _, f in all_fields() for alias in f.metadata["aliases"]}


@pytest.mark.parametrize(("alias", "name", "value"), ALIASES)
def test_an_alias_sets_the_same_argument_and_not_twice(alias: str, name: str, value: Any) -> None:
    assert value_of(EngineConfig.from_kwargs(**{alias: value}), name) == value
    assert EngineConfig.from_kwargs(**{alias: value}) == EngineConfig.from_kwargs(**{name: value})
    assert refuse(**{name: value, alias: value}) == f"{alias} and another spelling of {name} are both given"


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("context_length", [None, 2, 10**6], [1, 0, -1]),
    ("page_size", [None, 1, 24], [0, -16]),
    ("mem_fraction_static", [None, 0.001, 0.999], [0.0, 1.0, -0.1, 1.5, math.nan, math.inf, 0, 1]),
    ("max_total_tokens", [None, 1], [0, -5]),
    ("max_running_requests", [None, 1], [0, -1]),
    ("schedule_conservativeness", [0.001, 1, 99.9], [0.0, 100.0, -1.0, math.nan]),
    ("chunked_prefill_size", [None, -1, 1, 10**6], [0, -2]),
    ("random_seed", [None, 0, 2**63 - 1], [-1, 2**63]),
]


@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[name for name, _, _ in RANGES])
def test_a_number_out_of_range_is_refused_with_its_value_and_the_rule(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert value_of(EngineConfig.from_kwargs(**{name: value}), name) == value
    for value in bad:
        text = refuse(**{name: value})
        assert text.startswith(f"{name}={value}")
        assert "must be" in text


def test_every_choice_is_taken_and_nothing_else() -> None:
    chosen = [f for _, f in all_fields() if f.metadata["choices"]]
    assert {f.name for f in chosen} >= {"dtype", "kv_cache_dtype", "radix_eviction_policy", "schedule_policy"}
    for f in chosen:
        for choice in f.metadata["choices"]:
            EngineConfig.from_kwargs(**{f.name: choice})
        for wrong in ("", "nonsense", f.metadata["choices"][0].upper()):
            text = refuse(**{f.name: wrong})
            assert text == f"{f.name}={wrong!r} must be one of {', '.join(f.metadata['choices'])}"


@pytest.mark.parametrize("name", [f.name for _, f in all_fields()])
def test_an_argument_of_the_wrong_type_is_refused(name: str) -> None:
    default = value_of(EngineConfig(), name)
    for wrong in ([1], {}, b"x", 1j, object()):
        assert refuse(**{name: wrong}).startswith(f"{name}=")
    if isinstance(default, bool):
        wrongs: list[Any] = [0, 1, None, "true"]
    elif isinstance(default, str) or name == "model_cache":
        wrongs = [1, 1.0, True]
    else:
        wrongs = ["16", True, False]
    for wrong in wrongs:
        assert refuse(**{name: wrong}).startswith(f"{name}={wrong!r} must be")


def test_true_is_not_one() -> None:
    for name in ("page_size", "max_total_tokens", "schedule_conservativeness", "mem_fraction_static", "random_seed"):
        assert refuse(**{name: True}).startswith(f"{name}=True must be")
    assert refuse(page_size=True) == "page_size=True must be int | None"


def test_a_whole_number_is_a_number() -> None:
    assert EngineConfig.from_kwargs(schedule_conservativeness=2).schedule.schedule_conservativeness == 2
    assert "must be int" in refuse(page_size=16.0)


def test_a_chunk_of_minus_one_takes_prompts_whole() -> None:
    assert EngineConfig.from_kwargs().chunk_tokens == 512
    assert EngineConfig.from_kwargs(chunked_prefill_size=64).chunk_tokens == 64
    assert EngineConfig.from_kwargs(chunked_prefill_size=-1).chunk_tokens is None


def test_the_memory_share_has_a_default() -> None:
    assert EngineConfig.from_kwargs().mem_fraction == 0.3
    assert EngineConfig.from_kwargs(mem_fraction_static=0.7).mem_fraction == 0.7


def test_the_model_folder_is_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_MODEL_CACHE, raising=False)
    assert EngineConfig.from_kwargs().model_cache is None
    monkeypatch.setenv(ENV_MODEL_CACHE, "/from/environment")
    assert str(EngineConfig.from_kwargs().model_cache) == "/from/environment"
    assert str(EngineConfig.from_kwargs(model_cache="/given").model_cache) == "/given"
    assert "~" not in str(EngineConfig.from_kwargs(model_cache="~/models").model_cache)


def test_a_configuration_cannot_be_changed() -> None:
    config = EngineConfig.from_kwargs()
    with pytest.raises(AttributeError):
        config.memory.page_size = 1  # type: ignore[misc]
