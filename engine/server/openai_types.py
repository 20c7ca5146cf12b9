"""Bodies of the OpenAI requests, with the extra fields that SGLang and vLLM clients send.

Ranges are `SamplingParams`' business; here is only which fields there are, their types and their names there. Fields
that clients send and that change nothing here (`user`, `metadata`, `store`, ...) are let through.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import BadRequest
from engine.sampling.grammar import Grammar
from engine.sampling.params import SamplingParams
from engine.server.body_types import FIRST_ONLY, Ids, Numbers, Objects, Texts

OPENAI_DEFAULT_MAX_TOKENS = 16
"""Of the completions endpoint; a chat answer may fill the context."""

MAX_CHOICES_WITH_PROMPTS = 256
"""Prompts times answers of one completions request."""


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk with the usage before the end."""

    include_usage: bool = False


class Sampled(BaseModel):
    """What both endpoints share."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=False)

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Texts | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    # Extras with the names that SGLang and vLLM use.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def grammar(self) -> Grammar | None:
        """What the text must be. Raises BadRequest: more than one form is asked for, or one is unknown."""
        found = [
            Grammar("regex", self.regex) if self.regex is not None else None,
            Grammar("ebnf", self.ebnf) if self.ebnf is not None else None,
            _grammar_of_format(self.response_format) if self.response_format is not None else None,
        ]
        grammars = [grammar for grammar in found if grammar is not None]
        if len(grammars) > 1:
            kinds = ", ".join(grammar.kind for grammar in grammars)
            raise BadRequest("response_format", kinds, "give one of response_format, regex and ebnf")
        return grammars[0] if grammars else None

    def sampling(self, max_new_tokens: int, **others: Any) -> SamplingParams:
        """Raises BadRequest that names the field as `SamplingParams` does."""
        given: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop,
            "seed": None if self.seed is None else self.seed % 2**63,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_new_tokens": self.min_tokens,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        values = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_new_tokens=max_new_tokens, **values, **others)


def _grammar_of_format(wanted: dict[str, Any]) -> Grammar | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "structural_tag":
        return Grammar.of_structural_tag(wanted)
    if kind != "json_schema":
        raise BadRequest("response_format.type", kind, "must be text, json_object, json_schema or structural_tag")
    inner = wanted.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise BadRequest("response_format.json_schema", inner, "must be an object with name and schema")
    return Grammar.of_schema(inner["schema"])


class ChatRequest(Sampled):
    """Body of /v1/chat/completions."""

    messages: Objects
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check_supported(self) -> None:
        """Raises BadRequest for fields that contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs", self.top_logprobs, "needs logprobs=true")


class CompletionRequest(Sampled):
    """Body of /v1/completions."""

    prompt: str | Texts | Ids | Annotated[list[Ids], FIRST_ONLY]
    max_tokens: int | None = OPENAI_DEFAULT_MAX_TOKENS
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or many, each a text or a list of token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise BadRequest("prompt", prompt, "is empty; give at least one token")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) * max(1, self.n) > MAX_CHOICES_WITH_PROMPTS:
            rule = f"prompts times n={self.n} answers are more than {MAX_CHOICES_WITH_PROMPTS}"
            raise BadRequest("prompt", len(prompt), rule)
        return list(prompt)

    def check_supported(self) -> None:
        """Raises BadRequest for what this version does not do."""
        if self.suffix:
            raise BadRequest("suffix", self.suffix, "text after the completion is not in this version")
        if self.best_of is not None and self.best_of != self.n:
            raise BadRequest("best_of", self.best_of, f"must be n={self.n}: all answers are returned")
