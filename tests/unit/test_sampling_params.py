"""What a request may ask of sampling: every field's range, and a refusal that names field, value and rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.errors import BadRequest
from engine.sampling.params import MAX_SEED, MAX_TOKEN_IDS, SamplingParams

INTEGER_LIMITS = {"max_new_tokens": (1, 2**31 - 1), "seed": (0, MAX_SEED)}
NUMBER_LIMITS = {"temperature": (0.0, 100.0), "top_p": (1e-300, 1.0)}
NOT_NUMBERS: list[Any] = ["1", None, [1], {}, True, False, 1j, b"1", object()]


def refuse(field: str, value: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field
    assert str(error).startswith(f"{field}=")
    assert error.rule
    return error


def test_the_defaults_are_in_range() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.stop, params.stop_token_ids) == (
        1.0,
        -1,
        1.0,
        (),
        (),
    )


@pytest.mark.parametrize("field", INTEGER_LIMITS)
def test_an_integer_is_taken_up_to_its_limits_and_not_beyond(field: str) -> None:
    low, high = INTEGER_LIMITS[field]
    for value in (low, low + 1, high):
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in (low - 1, high + 1, -(2**70), 10**400):
        error = refuse(field, value)
        assert error.value == value
        assert str(low) in error.rule
        assert str(high) in error.rule


@pytest.mark.parametrize("field", NUMBER_LIMITS)
def test_a_number_is_taken_up_to_its_limits_and_not_beyond(field: str) -> None:
    low, high = NUMBER_LIMITS[field]
    for value in (low, high, (low + high) / 2, int(high)):
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in (-1e-9, high + 1e-6, -1, 10**400, -(10**400), math.inf, -math.inf, math.nan):
        error = refuse(field, value)
        assert error.value is value
        assert str(high) in error.rule


def test_top_p_of_nothing_is_refused_and_temperature_zero_is_greedy() -> None:
    assert "above 0" in refuse("top_p", 0.0).rule
    assert "above 0" in refuse("top_p", 0).rule
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams().is_greedy


def test_top_k_is_a_count_or_minus_one_for_all() -> None:
    for value in (-1, 1, 2, 2**31 - 1):
        assert SamplingParams(top_k=value).top_k == value
    for value in (0, -2, 2**31, 10**400):
        assert "-1 for all" in refuse("top_k", value).rule


@pytest.mark.parametrize("field", ["max_new_tokens", "temperature", "top_k", "top_p", "seed"])
def test_what_is_no_number_is_refused_where_a_number_belongs(field: str) -> None:
    for value in NOT_NUMBERS:
        if not (field == "seed" and value is None):
            refuse(field, value)
    if field in {"max_new_tokens", "top_k", "seed"}:
        refuse(field, 1.0)
        refuse(field, math.nan)


@pytest.mark.parametrize("field", ["ignore_eos", "skip_special_tokens"])
def test_a_switch_is_true_or_false_and_no_number(field: str) -> None:
    for value in (True, False):
        assert getattr(SamplingParams(**{field: value}), field) is value
    for wrong in (0, 1, "true", None, []):
        assert "true or false" in refuse(field, wrong).rule


def test_stop_strings_are_one_string_or_a_list() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=()).stop == ()
    for wrong in ([""], "", [1], 5, ["x" * 1025], ["x"] * 33, "\ud83d", {"a": 1}):
        refuse("stop", wrong)


def test_stop_token_ids_are_a_short_list_of_ids() -> None:
    assert SamplingParams(stop_token_ids=[5, 0, 2**31 - 1]).stop_token_ids == (5, 0, 2**31 - 1)
    assert len(SamplingParams(stop_token_ids=range(MAX_TOKEN_IDS)).stop_token_ids) == MAX_TOKEN_IDS
    for wrong in ([-1], [2**31], [1.0], ["a"], [True], [None], [[1]], "12", 7, None, range(MAX_TOKEN_IDS + 1)):
        refuse("stop_token_ids", wrong)


def test_the_lists_are_copies() -> None:
    stops, ids = ["a"], [1]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


@pytest.mark.parametrize(("token_id", "vocab_size"), [(300, 300), (2**31 - 1, 300), (0, 0)])
def test_a_stop_id_that_the_model_lacks_is_refused(token_id: int, vocab_size: int) -> None:
    params = SamplingParams(stop_token_ids=[token_id])
    params.check_vocabulary(token_id + 1)
    with pytest.raises(BadRequest, match=f"stop_token_ids={token_id}: .*0..{vocab_size - 1}"):
        params.check_vocabulary(vocab_size)


def test_a_refusal_survives_a_value_that_cannot_be_shown() -> None:
    class Nameless:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Nameless" in str(refuse("temperature", Nameless()))
    long = refuse("temperature", "\ud83d" * 1000)
    assert len(str(long)) < 200
    str(long).encode()
