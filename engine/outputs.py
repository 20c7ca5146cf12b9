"""What a caller gets back: a result for each request, or a stream of pieces that ends with it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Finish, FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: with the history, for a session's turn.
        cached_tokens: of the prompt, that were not computed.
        lost_to_alignment: of the prompt, whose KV the session had and the device could not continue from.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    lost_to_alignment: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds.

    Attributes:
        queue_s: from arrival to the first step.
        time_to_first_token_s, total_s: from arrival.
        decode_tokens_per_s: of the tokens after the first; 0.0 with fewer than two.
    """

    queue_s: float
    time_to_first_token_s: float
    total_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    Attributes:
        text: the answer, cut before a stop string; a token that stopped it by its id is not in the text.
        token_ids: every generated token, the stopping one included.
        finish_reason: "stop", "length", "abort", "capacity" or "error"; see `engine.request.Finish`.
        stop_reason: the stop string or token id that was met, else None.
        logprobs: of each generated token, with `return_logprob`.
        prompt_logprobs: of the prompt's tokens from `logprob_start_len` on, when that is not -1; None for the first.
        alternatives: the other answers when `n` is above 1.
        message: more about an "error" or a "capacity" end.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    message: str
    usage: Usage
    timings: RequestTimings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    alternatives: tuple[GenerationResult, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What is new of one request.

    Attributes:
        index: which of the prompts given to `generate`.
        choice: which of its `n` answers.
        text: new text that no later token can change; may be empty.
        token_ids: new tokens.
        result: the whole, with the last piece.
    """

    index: int
    choice: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None


def result_of(request: Request, text: str) -> GenerationResult:
    """The result of a finished request."""
    finish: Finish | None = request.finish
    assert finish is not None
    timings, first = request.timings, request.timings.first_token_s
    scores = request.scores
    decoded, decode_s = request.num_output - 1, timings.finished_s - first
    return GenerationResult(
        request_id=request.id,
        text=text,
        token_ids=request.output_ids,
        finish_reason=finish.reason,
        stop_reason=finish.matched,
        message=finish.message,
        usage=Usage(request.prompt_len, request.num_output, request.cached_tokens or 0, request.lost_to_alignment),
        timings=RequestTimings(
            queue_s=max(0.0, timings.scheduled_s - timings.arrival_s),
            time_to_first_token_s=max(0.0, first - timings.arrival_s),
            total_s=timings.finished_s - timings.arrival_s,
            decode_tokens_per_s=decoded / decode_s if decoded > 0 and decode_s > 0 else 0.0,
        ),
        logprobs=scores.output if scores is not None and request.params.return_logprob else None,
        prompt_logprobs=scores.prompt if scores is not None and request.params.logprob_start_len >= 0 else None,
    )
