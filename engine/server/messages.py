"""What the API process and the engine process say to each other: msgpack, one union each way.

Prompts and answers are token ids; text is the API process's business. Every request gets exactly one `Accepted` or
`Refused`, then `Tokens` until one of each of its answers carries `finish`; those of a step come in one `Progress`.
Every call gets one `Reply` or `Refused`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.request import Finish, TokenLogprob
from engine.sampling.params import SamplingParams
from session.branching import SessionParams


class Start(msgspec.Struct, tag=True, frozen=True):
    """Queue a prompt.

    Attributes:
        id: the request's; its further answers (`params.n`) are numbered by `Tokens.choice`.
        prompt_ids: int32 bytes, little endian.
        session: continue a session; `keep` tokens of a streaming one's history at first.
    """

    id: str
    prompt_ids: bytes
    params: SamplingParams
    priority: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    session: SessionParams | None = None
    keep: int | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request wherever it is; an unknown id is no error. None ends all."""

    id: str | None


class Call(msgspec.Struct, tag=True, frozen=True):
    """Do something else: the name of one of `engine_process.Commands` and its arguments."""

    id: str
    name: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the engine process."""


ToEngine = Start | Abort | Call | Stop


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """A request was queued. `prompt_tokens`: with the session's history."""

    id: str
    prompt_tokens: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request or a call is wrong; nothing happened. `kind`: of `SessionRefused`, else ""."""

    id: str
    field: str
    value: str
    rule: str
    kind: str = ""


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of one answer.

    Attributes:
        logprobs: of the new tokens, with `return_logprob`.
        prompt_logprobs: with the last message, when they were asked for.
        finish: with the last message; the usage fields are valid then.
        ttft_s: seconds from arrival to the first token, on the engine's clock.
    """

    id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost_to_alignment: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0


class Progress(msgspec.Struct, tag=True, frozen=True):
    """What one step has brought to all answers that moved."""

    answers: list[Tokens]


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The result of a call."""

    id: str
    value: Any


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded and has run a step."""

    info: dict[str, Any]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start or go on; the process ends. `is_config`: the user can mend it."""

    message: str
    is_config: bool


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The engine process is alive.

    Attributes:
        step_age_s: seconds that the current step has taken; 0.0 between steps.
        stats: those of `EngineCore.stats` after the latest step.
    """

    step_age_s: float
    stats: dict[str, int]


FromEngine = Accepted | Refused | Progress | Reply | Ready | Failed | Beat

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
