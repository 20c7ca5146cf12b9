"""What a request may ask of sampling, validated where it enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import BadRequest
from engine.text.stops import validate_stop_strings

MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1; the context's end may come first.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: choose among the k best tokens; -1 means all.
        top_p: choose among the fewest best tokens whose probabilities (after top-k) reach this sum, in (0, 1].
        seed: makes the request's choices reproducible whatever runs beside it; None draws one.
        stop: strings that end the answer; the answer is cut before the first of them.
        stop_token_ids: token ids that end the answer, like the model's own end-of-sequence ids.
        ignore_eos: go on after the model's own end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raises BadRequest that names the field, its value and its range."""
        _check_int("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        if self.top_k != -1:
            _check_int("top_k", self.top_k, 1, 2**31 - 1, "or -1 for all")
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadRequest("top_p", self.top_p, "must be above 0 and at most 1")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(name, getattr(self, name), "must be true or false")
        object.__setattr__(self, "stop", validate_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises BadRequest when a token id does not exist in the model."""
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise BadRequest("stop_token_ids", token_id, f"the model's token ids are 0..{vocab_size - 1}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def _check_int(field: str, value: Any, low: int, high: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(field, value, f"must be an integer from {low} to {high} {otherwise}".strip())


def _check_float(field: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is in no range
        raise BadRequest(field, value, f"must be a number from {low} to {high}")


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(field, value, f"must be a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    for token_id in value:
        _check_int(field, token_id, 0, 2**31 - 1)
    return tuple(value)
