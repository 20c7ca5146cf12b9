"""A step as one message: everything an executor needs, nothing it could disagree about.

The scheduler writes a `StepInput`, every rank executes the same one, a `StepOutput` comes back. A step is
`(request, number of tokens)` pairs: prefill, chunk and decode differ in that number alone. Both are columns over the
batch, so they cost a handful of arrays, and both pack into bytes for another process, a replay or a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from devices.pages import IntArray
from devices.sampling import AllowedTokens, LogitEdits
from mem_cache.rows import PageCopy, TableChange


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling of the requests that are sampled in this step, in the order of the batch; all [sampled].

    Attributes:
        temperature: float32, 0 is greedy; top_k: int32, -1 is all; top_p, min_p: float32.
        seed: uint64; position: int64, of the token to choose: with the seed it decides the choice.
    """

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> SamplingColumns:
        """Those of some rows."""
        return SamplingColumns(*(getattr(self, name)[rows] for name in SamplingColumns.__slots__))

    def at(self, position: npt.NDArray[np.int64]) -> SamplingColumns:
        """The same settings for tokens at other positions."""
        return SamplingColumns(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, position)


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """Which logprobs are wanted: first of prompt tokens, then of tokens that this step samples.

    Attributes:
        place: index into the step's tokens whose logits score a prompt token, int64 [prompt scores].
        target: that prompt token's id, int32 [prompt scores].
        sampled_row: sampled rows whose new token is scored, int32 [sampled scores].
        top_n: best tokens reported beside each, for all scores.
        extra_score, extra_token_id: further tokens, and the score they belong to, int32 [extras].
    """

    place: npt.NDArray[np.int64]
    target: IntArray
    sampled_row: IntArray
    top_n: int
    extra_score: IntArray
    extra_token_id: IntArray


@dataclass(frozen=True, slots=True)
class StepInput:
    """One launched step.

    Attributes:
        step_id: counts launches.
        rows: row of each request, int32 [batch].
        starts: position of each request's first new token, int32 [batch].
        num_new: new tokens of each request, int32 [batch].
        token_ids: the new tokens, int32 [sum(num_new)], request after request; `-1 - i` stands for the i-th token that
            the step before this one sampled, which the host need not have seen (`refer`).
        is_sampled: whether a token follows each request's last new one, bool [batch] (not in the middle of a prompt).
        sampling: how to choose those tokens.
        table_changes: what was written into page tables since the last step, in order.
        page_copies: pages whose content other pages take over before anything is computed, in order.
        edits, scores, allowed: None when no request of the step wants them.
    """

    step_id: int
    rows: IntArray
    starts: IntArray
    num_new: IntArray
    token_ids: IntArray
    is_sampled: npt.NDArray[np.bool_]
    sampling: SamplingColumns
    table_changes: tuple[TableChange, ...]
    page_copies: tuple[PageCopy, ...] = ()
    edits: LogitEdits | None = None
    scores: ScoreColumns | None = None
    allowed: AllowedTokens | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs, in the order of `ScoreColumns`.

    Attributes:
        chosen: of the prompt token or the sampled one, float32 [scores].
        top_ids, top: the best tokens and their logprobs, best first, int32 and float32 [scores, top_n].
        extra: float32 [extras].
    """

    chosen: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]
    extra: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced: 0, 1 or many tokens for each request.

    Attributes:
        num_tokens: tokens of each request, int32 [batch].
        token_ids: int32 [sum(num_tokens)], request after request.
        is_finite: whether each request's results were numbers, bool [batch]; a request whose were not has no token.
    """

    step_id: int
    num_tokens: IntArray
    token_ids: IntArray
    is_finite: npt.NDArray[np.bool_]
    scores: Scores | None = None


class Executor(Protocol):
    """Runs steps one after another: a model on a device, or a simulation of one.

    Attributes:
        prepare_s, device_s: seconds that the last collected step spent on its inputs, and on its results.
    """

    prepare_s: float
    device_s: float

    @property
    def counts(self) -> Mapping[str, int]:
        """What it counted since it was made, for `EngineCore.stats`."""
        ...

    def launch(self, step: StepInput) -> None:
        """Begin a step, behind those that were launched before."""
        ...

    def collect(self) -> StepOutput:
        """The result of the oldest launched step, waited for."""
        ...


def refer(sampled: int) -> int:
    """The token id that stands for the `sampled`-th token of the step before."""
    return -1 - sampled


class _PackedArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_Message = TypeVar("_Message", StepInput, StepOutput)


def encode(message: StepInput | StepOutput) -> bytes:
    """Pack a step into bytes (msgpack)."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Unpack what `encode` packed. Raises msgspec.ValidationError when the bytes are another message."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> _PackedArray:
    if isinstance(value, np.ndarray):
        return _PackedArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    raise NotImplementedError(f"{type(value)} does not belong in a step")


def _decode_array(kind: type, value: Any) -> Any:
    packed = msgspec.convert(value, _PackedArray)
    return np.frombuffer(bytearray(packed.data), dtype=packed.dtype).reshape(packed.shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
