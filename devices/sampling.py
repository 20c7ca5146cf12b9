"""How a step's tokens are chosen, as a device sees it: the rows' settings, and what a device's own sampler does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from devices.pages import IntArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to the logits of sampled rows, before anything is drawn; sparse, one entry for a (row, token).

    Attributes:
        row, token_id: of each token that a penalty looks at, int32 [seen], rows ascending, no token twice in a row;
            `count` of them in the output, int32.
        repetition, presence, frequency: of each sampled row, float32 [sampled].
        bias_row, bias_token_id, bias: added afterwards, int32, int32, float32 [biases]; -inf forbids a token.
    """

    row: IntArray
    token_id: IntArray
    count: IntArray
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    bias_row: IntArray
    bias_token_id: IntArray
    bias: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Which tokens may be drawn in the sampled rows that keep a grammar; all are in the others.

    Attributes:
        row: those sampled rows, int32 [masked].
        words: int32 [masked, words]; bit `i % 32` of word `i // 32` says that token `i` may be drawn.
    """

    row: IntArray
    words: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draws:
    """How to choose a token of each row of logits; host, all [rows].

    Attributes:
        temperature: float32, 0 is greedy; top_k: int32, -1 is all; top_p, min_p: float32.
        uniform: float64 in [0, 1), the row's own number: with the logits it decides the choice.
        edits, allowed: what happens to the logits before, in this order.
    """

    temperature: npt.NDArray[np.float32]
    top_k: IntArray
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    uniform: npt.NDArray[np.float64]
    edits: LogitEdits | None = None
    allowed: AllowedTokens | None = None

    def of(self, rows: npt.NDArray[np.int64]) -> Draws:
        """Those of some rows, without what happens before."""
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


class Sampler(Protocol):
    """Chooses tokens where the logits are; a device without one leaves it to `engine.sampling`.

    What may be drawn, and how probable it is, is what `engine.sampling` says. A row's token depends on its logits and
    its own numbers, never on its neighbours or on the batch.
    """

    @property
    def max_top_k(self) -> int | None:
        """The largest top-k below the vocabulary's size that it computes; None: any."""
        ...

    def prepare(self, draws: Draws) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Stage `draws` with the step's other arrays (`Device.stage`), before there are logits.

        Returns:
            What chooses a token of each row of logits, float32 [rows, vocab_size], once the step was sent: int64
            [rows], and whether each row's logits were numbers, bool [rows]; the token of others means nothing.
        """
        ...

    def log_normaliser(self, logits: torch.Tensor) -> torch.Tensor:
        """What a logit is more than its logprob: `logsumexp` of each row, float32 [rows]."""
        ...
