"""What a request may ask of sampling, validated where it enters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import BadRequest
from engine.sampling.grammar import Grammar
from engine.text.stops import validate_stop_strings

MAX_SEED = 2**63 - 1
MAX_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 128
MAX_N = 128
MAX_TIME_LIMIT_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, when to stop and what to report. Names are SGLang's.

    Penalties and biases change the logits first; then temperature, top-k, top-p and min-p, in this order. Logprobs are
    those of the model's own logits, before any of it.

    Attributes:
        n: answers to the same prompt; they share its KV.
        max_new_tokens: most tokens to generate, at least 1; the context's end may come first.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: choose among the k best tokens; -1 means all.
        top_p: choose among the fewest best tokens whose probabilities (after top-k) reach this sum, in (0, 1].
        min_p: drop tokens whose probability is below this share of the best one's, in [0, 1]; 0 drops none.
        repetition_penalty: divides (multiplies, when negative) the logits of tokens that prompt or output hold, in
            (0, 2]; 1 changes nothing.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the output holds, once, or once
            for each time; in [-2, 2].
        logit_bias: added to the logits of these token ids; in [-100, 100] each.
        min_new_tokens: no stop id is chosen before so many tokens.
        seed: makes the request's choices reproducible whatever runs beside it; None draws one.
        stop: strings that end the answer; the answer is cut before the first of them.
        stop_token_ids: token ids that end the answer, like the model's own end-of-sequence ids.
        ignore_eos: go on after the model's own end-of-sequence ids.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility; the tokenizers used here never add any.
        include_stop_str_in_output: leave the stop string that ended the answer in its text.
        return_logprob: report the logprob of every generated token.
        top_logprobs_num: and of so many best tokens at its place.
        token_ids_logprob: and of these tokens.
        logprob_start_len: report prompt tokens too, from this position on; -1 reports none.
        grammar: what the text must be; the answer ends where it is whole, and is cut when a limit comes first.
        time_limit_s: seconds from arrival after which the request ends as it is; None is no limit.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] = ()
    logprob_start_len: int = -1
    time_limit_s: float | None = None
    grammar: Grammar | None = None
    edits_logits: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises BadRequest that names the field, its value and its range."""
        _check_int("n", self.n, 1, MAX_N)
        _check_int("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1)
        _check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        if self.top_k != -1:
            _check_int("top_k", self.top_k, 1, 2**31 - 1, "or -1 for all")
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise BadRequest("top_p", self.top_p, "must be above 0 and at most 1")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.repetition_penalty == 0.0:
            raise BadRequest("repetition_penalty", self.repetition_penalty, "must be above 0 and at most 2")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(name, getattr(self, name), "must be true or false")
        _check_int("top_logprobs_num", self.top_logprobs_num, 0, MAX_TOP_LOGPROBS)
        _check_int("logprob_start_len", self.logprob_start_len, -1, 2**31 - 1)
        if self.time_limit_s is not None:
            _check_float("time_limit_s", self.time_limit_s, 0.0, MAX_TIME_LIMIT_S)
        if not isinstance(self.grammar, Grammar | None):
            raise BadRequest("grammar", self.grammar, "must be a Grammar")
        object.__setattr__(self, "stop", validate_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "token_ids_logprob", _token_ids("token_ids_logprob", self.token_ids_logprob))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        # Asked for every request in every step, so it is decided once.
        edits = self.has_penalty or bool(self.logit_bias) or self.min_new_tokens > 0
        object.__setattr__(self, "edits_logits", edits)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises BadRequest when a token id does not exist in the model."""
        for field_name in ("stop_token_ids", "token_ids_logprob", "logit_bias"):
            for token_id in getattr(self, field_name):
                if token_id >= vocab_size:
                    raise BadRequest(field_name, token_id, f"the model's token ids are 0..{vocab_size - 1}")

    @property
    def wants_scores(self) -> bool:
        """Whether any logprob is to be reported."""
        return self.return_logprob or self.logprob_start_len >= 0

    @property
    def has_penalty(self) -> bool:
        """Whether the choice depends on which tokens there were before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def _check_int(field_name: str, value: Any, low: int, high: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(field_name, value, f"must be an integer from {low} to {high} {otherwise}".strip())


def _check_float(field_name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is in no range
        raise BadRequest(field_name, value, f"must be a number from {low} to {high}")


_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "return_logprob",
)


def _token_ids(field_name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_TOKEN_IDS:
        raise BadRequest(field_name, value, f"must be a list of at most {MAX_TOKEN_IDS} token ids")
    for token_id in value:
        _check_int(field_name, token_id, 0, 2**31 - 1)
    return tuple(value)


def _logit_bias(value: Any) -> dict[int, float]:
    """Token id -> bias; ids may be decimal text, as JSON objects have them."""
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIASES:
        raise BadRequest("logit_bias", value, f"must map at most {MAX_LOGIT_BIASES} token ids to numbers")
    biases = {}
    for token_id, bias in value.items():
        number = int(token_id) if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() else token_id
        _check_int("logit_bias", number, 0, 2**31 - 1)
        _check_float("logit_bias", bias, -100.0, 100.0)
        biases[number] = float(bias)
    return biases
