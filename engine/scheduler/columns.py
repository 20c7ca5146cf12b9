"""Writes a step: from chunks of requests to the columns of a `StepInput`, and logprobs back to their requests."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from devices.pages import IntArray
from devices.sampling import AllowedTokens, LogitEdits
from engine.request import Request, TokenLogprob
from engine.step import SamplingColumns, ScoreColumns, Scores, StepInput, refer
from mem_cache.rows import PageCopy, TableChange

Chunk = tuple[Request, int, int, bool]
"""`(request, num_new, end, is_sampled)`: `num_new` tokens of a request in one step, after which `end` tokens of its row
are written, and whether a token follows the last of them. A plain tuple: a step makes one for each of its requests."""


class Score(NamedTuple):
    """One logprob that a step reports: of the prompt's token at `position`, or of the request's next token (None)."""

    request: Request
    position: int | None


class Batch(NamedTuple):
    """What the next step has in common with this one, as long as it has the same requests, as many tokens of each, and
    samples the same. A request has one row from its admission on: who takes it away ends the batch as well.

    Attributes:
        requests, num_new, is_sampled: of the step; the others follow from them.
        sampled: the requests that it samples.
        rows, lengths, samples: of all requests, int32, int32 and bool [batch]; lengths are `num_new`.
        settings: the sampling of those that are sampled; each step says its positions (`SamplingColumns.at`).
        edits_logits, has_grammar: whether a sampled one does; has_scores: whether any wants logprobs.
    """

    requests: tuple[Request, ...]
    num_new: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    sampled: tuple[Request, ...]
    rows: IntArray
    lengths: IntArray
    samples: npt.NDArray[np.bool_]
    settings: SamplingColumns
    edits_logits: bool
    has_grammar: bool
    has_scores: bool

    @classmethod
    def of(cls, requests: tuple[Request, ...], num_new: tuple[int, ...], is_sampled: tuple[bool, ...]) -> Batch:
        sampled = tuple(compress(requests, is_sampled))
        return cls(
            requests,
            num_new,
            is_sampled,
            sampled,
            np.array([request.kv.row for request in requests], dtype=np.int32),
            np.array(num_new, dtype=np.int32),
            np.array(is_sampled, dtype=np.bool_),
            _sampling_columns(sampled),
            any(request.params.edits_logits for request in sampled),
            any(request.grammar is not None for request in sampled),
            any(request.scores is not None for request in requests),
        )

    def is_of(self, requests: tuple[Request, ...], num_new: tuple[int, ...], is_sampled: tuple[bool, ...]) -> bool:
        return requests == self.requests and num_new == self.num_new and is_sampled == self.is_sampled


def step_input(
    step_id: int,
    chunks: Sequence[Chunk],
    changes: tuple[TableChange, ...],
    copies: tuple[PageCopy, ...],
    unseen: Mapping[Request, int],
    before: Batch | None,
) -> tuple[StepInput, Batch, list[Score]]:
    """The message of chunks that are about to be scheduled, its batch, and what its scores will be of, in their order.

    Args:
        unseen: requests of the step before whose token nobody has seen, and its place among that step's tokens.
        before: that step's batch, if it still stands.
    """
    requests, num_new, ends, is_sampled = zip(*chunks, strict=True)
    parts = requests, num_new, is_sampled
    batch = before if before is not None and before.is_of(*parts) else Batch.of(*parts)
    sampled, end = batch.sampled, np.array(ends, dtype=np.int32)
    scores: ScoreColumns | None = None
    scored: list[Score] = []
    if batch.has_scores:
        scores, scored = _score_columns(chunks, sampled)
    step = StepInput(
        step_id=step_id,
        rows=batch.rows,
        starts=end - batch.lengths,
        num_new=batch.lengths,
        token_ids=_token_ids(chunks, unseen),
        is_sampled=batch.samples,
        sampling=batch.settings.at(_positions(end, batch)),
        table_changes=changes,
        page_copies=copies,
        edits=_edits(sampled) if batch.edits_logits else None,
        scores=scores,
        allowed=_allowed(sampled) if batch.has_grammar else None,
    )
    return step, batch, scored


def _token_ids(chunks: Sequence[Chunk], unseen: Mapping[Request, int]) -> IntArray:
    """The chunks' tokens, int32 [tokens]. One that was not seen yet is alone: what a prompt has is known."""
    ids: list[int] = []
    for request, num_new, end, _ in chunks:
        if num_new > 1 or end < request.num_known:
            ids += request.tokens[end - num_new : end].tolist()
        elif end == request.num_known:
            ids.append(request.last_id)
        else:
            ids.append(refer(unseen[request]))
    return np.array(ids, dtype=np.int32)


def _sampling_columns(sampled: Sequence[Request]) -> SamplingColumns:
    params = [request.params for request in sampled]
    cuts = np.array([(p.temperature, p.top_p, p.min_p) for p in params], dtype=np.float32).reshape(-1, 3)
    return SamplingColumns(
        temperature=cuts[:, 0],
        top_k=np.array([p.top_k for p in params], dtype=np.int32),
        top_p=cuts[:, 1],
        min_p=cuts[:, 2],
        seed=np.array([request.seed for request in sampled], dtype=np.uint64),
        position=np.zeros(len(params), dtype=np.int64),
    )


def _positions(end: IntArray, batch: Batch) -> npt.NDArray[np.int64]:
    """Where the sampled tokens will stand: behind the last one of their chunk."""
    return (end if len(batch.sampled) == len(end) else end[batch.samples]).astype(np.int64)


def _edits(sampled: Sequence[Request]) -> LogitEdits | None:
    """Penalties, biases and forbidden stops; None when there are none now."""
    seen: list[tuple[int, int, int]] = []
    biases: list[tuple[int, int, float]] = []
    for row, request in enumerate(sampled):
        params = request.params
        if params.has_penalty:
            seen += [(row, token_id, count) for token_id, count in request.output_counts.items()]
        biases += [(row, token_id, bias) for token_id, bias in params.logit_bias.items()]
        if request.num_output + request.num_ahead < params.min_new_tokens and request.grammar is None:
            biases += [(row, token_id, -np.inf) for token_id in request.stop_ids]
    if not seen and not biases:
        return None
    rows = np.array(seen, dtype=np.int32).reshape(-1, 3)
    bias_places = np.array([(row, token_id) for row, token_id, _ in biases], dtype=np.int32).reshape(-1, 2)
    return LogitEdits(
        row=rows[:, 0],
        token_id=rows[:, 1],
        count=rows[:, 2],
        repetition=np.array([request.params.repetition_penalty for request in sampled], dtype=np.float32),
        presence=np.array([request.params.presence_penalty for request in sampled], dtype=np.float32),
        frequency=np.array([request.params.frequency_penalty for request in sampled], dtype=np.float32),
        bias_row=bias_places[:, 0],
        bias_token_id=bias_places[:, 1],
        bias=np.array([bias for _, _, bias in biases], dtype=np.float32),
    )


def _allowed(sampled: Sequence[Request]) -> AllowedTokens:
    """What the grammars allow, of which there is one at least."""
    masked = [
        (row, request.grammar.allowed(request.tokens[request.prompt_len :]))
        for row, request in enumerate(sampled)
        if request.grammar is not None
    ]
    rows, words = zip(*masked, strict=True)
    return AllowedTokens(np.array(rows, dtype=np.int32), np.stack(words))


def _score_columns(chunks: Sequence[Chunk], sampled: Sequence[Request]) -> tuple[ScoreColumns, list[Score]]:
    """Prompt tokens that follow one of the step's tokens, then the tokens to be sampled, where they are wanted."""
    scored: list[Score] = []
    places: list[int] = []
    first = 0  # place of the chunk's first token among the step's
    for request, num_new, end, _ in chunks:
        start = end - num_new
        for position in range(max(request.next_scored, start + 1), min(end + 1, request.prompt_len)):
            scored.append(Score(request, position))
            places.append(first + position - 1 - start)
        first += num_new
    targets = [int(request.tokens[position]) for request, position in scored if position is not None]
    rows = [row for row, request in enumerate(sampled) if request.params.return_logprob]
    scored += [Score(sampled[row], None) for row in rows]
    extras = [(i, token_id) for i, (request, _) in enumerate(scored) for token_id in request.params.token_ids_logprob]
    columns = ScoreColumns(
        place=np.array(places, dtype=np.int64),
        target=np.array(targets, dtype=np.int32),
        sampled_row=np.array(rows, dtype=np.int32),
        top_n=max((request.params.top_logprobs_num for request, _ in scored), default=0),
        extra_score=np.array([score for score, _ in extras], dtype=np.int32),
        extra_token_id=np.array([token_id for _, token_id in extras], dtype=np.int32),
    )
    return columns, scored


def deliver_scores(
    scored: Sequence[Score], scores: Scores, new_token: Mapping[Request, int], unwanted: Container[Request]
) -> None:
    """Append each logprob to its request.

    Args:
        new_token: the step's token of each request that has one.
        unwanted: requests that the step is not for any more.
    """
    extra = iter(scores.extra.tolist())
    rows = zip(scored, scores.chosen.tolist(), scores.top_ids.tolist(), scores.top.tolist(), strict=True)
    for (request, position), chosen, top_ids, top in rows:
        params, own = request.params, request.scores
        extras = tuple((token_id, next(extra)) for token_id in params.token_ids_logprob)
        best = tuple(zip(top_ids, top, strict=True))[: params.top_logprobs_num]
        if own is None or request in unwanted:
            continue
        if position is not None:
            own.prompt.append(TokenLogprob(int(request.tokens[position]), chosen, best, extras))
        elif request in new_token:
            own.output.append(TokenLogprob(new_token[request], chosen, best, extras))
