"""A conversation as its user holds it: text in, text out, each turn computing only what is new.

    with llm.open_session() as session:
        print(session.chat("Name three rivers.").text)
        print(session.chat("Which is the longest?").text)

It adds text to `session.session.Session`, which knows token ids only. A chat turn appends what the template writes
behind the last answer. Where that cannot be (the answer was cut by a stop string, the template rewrites older turns),
the conversation is tokenised anew and the history rewound to the last token that is still right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from devices.pages import IntArray
from engine.errors import BadRequest, session_rules
from engine.outputs import GenerationResult, StreamPiece
from engine.sampling.params import SamplingParams
from session.branching import SessionParams
from session.state import Phase

if TYPE_CHECKING:
    from types import TracebackType

    from engine.llm import LLM
    from session.session import Session, SessionStats

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _ChatTurn:
    """A finished chat turn.

    Attributes:
        messages: what it added to the conversation, the answer last.
        end: length of the history after it.
        text: the conversation as the template wrote it up to the answer, then the answer as it was shown.
        said: text of the token that ended the answer, "" when its length did.
        is_whole: whether the history holds exactly the tokens of `text` and `said`.
    """

    messages: tuple[Message, ...]
    end: int
    text: str
    said: str
    is_whole: bool

    def cut(self, length: int) -> _ChatTurn:
        """The turn when the history behind `length` was forgotten and is tokenised anew."""
        return self if self.end <= length else replace(self, end=length, is_whole=False)


class ChatSession:
    """Made by `LLM.open_session`. One turn at a time; closed at the end of its `with`.

    Attributes:
        id: its name in the engine.
    """

    def __init__(self, llm: LLM, session: Session, turns: Sequence[_ChatTurn] = (), *, is_plain: bool = False) -> None:
        """`turns`: of the chat so far. `is_plain`: the history was made by `generate`."""
        self.id = session.id
        self._llm = llm
        self._session = session
        self._turns = list(turns)
        self._is_plain = is_plain

    @property
    def stats(self) -> SessionStats:
        """Counts since it was opened; see `session.session.SessionStats`."""
        return self._session.stats

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV its row holds now."""
        return self._session.held_tokens

    @property
    def token_ids(self) -> list[int]:
        """The history: prompts and answers of finished turns."""
        ids: list[int] = self._session.log.tokens.tolist()
        return ids

    @property
    def num_turns(self) -> int:
        """Finished turns in the history."""
        return len(self._turns or self._session.log.turns)

    @property
    def messages(self) -> list[Message]:
        """The chat so far."""
        return [message for turn in self._turns for message in turn.messages]

    # Turns.

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, stream: Literal[False] = False
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> Iterator[StreamPiece]: ...

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, stream: bool = False
    ) -> GenerationResult | Iterator[StreamPiece]:
        """Append a text or token ids to the history and continue it.

        BOS is added to the first turn only. Arguments, errors and results as those of `LLM.generate`.
        """
        pieces = self._llm.generate(prompt, params, stream=True, session_params=SessionParams(id=self.id))
        self._is_plain = True
        return pieces if stream else _last(pieces)

    @overload
    def chat(
        self,
        messages: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **template_kwargs: Any,
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **template_kwargs: Any,
    ) -> Iterator[StreamPiece]: ...

    def chat(
        self,
        messages: str | Message | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **template_kwargs: Any,
    ) -> GenerationResult | Iterator[StreamPiece]:
        """Say something and have it answered through the model's chat template.

        Args:
            messages: what is new: the user's text, a message, or several (a system message first, tool results).
            template_kwargs: handed to the template.
        Raises:
            BadRequest: malformed messages, or turns of `generate` in the same session, which no template can render.
        """
        new = _messages(messages)
        if self._is_plain and len(self._session.log):
            raise BadRequest("messages", messages, "this session continues plain text; chat in a session of its own")
        text = self._llm.tokenizer.chat_text([*self.messages, *new], **template_kwargs)
        keep, ids = self._continuation(text)
        params = params or SamplingParams()
        pieces = self._llm.start_turn(self.id, ids, params, keep=keep, streams=stream, is_chat=True)
        self._turns = [turn.cut(keep) for turn in self._turns]
        self._is_plain = False
        recorded = self._recorded(pieces, text, new)
        return recorded if stream else _last(recorded)

    def _continuation(self, text: str) -> tuple[int, IntArray]:
        """How much of the history a conversation keeps, and the token ids that it adds, int32 [n]."""
        log = self._session.log
        last = self._turns[-1] if self._turns else None
        if last is not None and last.is_whole and last.end == len(log) and text.startswith(last.text + last.said):
            return len(log), self._llm.token_ids(text[len(last.text + last.said) :], add_special_tokens=False)
        ids = self._llm.token_ids(text, add_special_tokens=False)
        n = min(len(log), len(ids) - 1)
        differs = np.flatnonzero(log.tokens[:n] != ids[:n])
        keep = int(differs[0]) if len(differs) else n
        return keep, ids[keep:]

    def _recorded(self, pieces: Iterator[StreamPiece], text: str, new: Sequence[Message]) -> Iterator[StreamPiece]:
        """Pass the pieces of a chat turn on; when it has become history, remember its messages."""
        for piece in pieces:
            result = piece.result
            if result is not None and result.finish_reason in ("stop", "length"):
                answer = {"role": "assistant", "content": result.text}
                is_ended = isinstance(result.stop_reason, int)
                said = result.token_ids[:-1] if is_ended else result.token_ids
                tokenizer = self._llm.tokenizer
                turn = _ChatTurn(
                    messages=(*new, answer),
                    end=len(self._session.log),
                    text=text + result.text,
                    said=tokenizer.token_bytes(result.token_ids[-1]).decode(errors="replace") if is_ended else "",
                    is_whole=tokenizer.decode(said, skip_special_tokens=False) == result.text,
                )
                self._turns.append(turn)
            yield piece

    # Between turns.

    def fork(
        self, *, tokens: int | None = None, turns: int | None = None, session_id: str | None = None
    ) -> ChatSession:
        """A new session that starts from the first `tokens` tokens or `turns` turns of this one; from all of it else.

        Full pages are shared, nothing is computed, and this session is not touched.

        Raises SessionRefused: the history is shorter, or `max_sessions` are open.
        """
        with session_rules():
            length = self._length("fork", tokens, turns)
            child = self._llm.core.sessions.fork(self.id, length=length, new_id=session_id)
        return ChatSession(self._llm, child, self._turns_of(length, turns), is_plain=self._is_plain)

    def rewind(self, *, tokens: int | None = None, turns: int | None = None) -> None:
        """Forget everything behind the first `tokens` tokens or `turns` turns.

        Raises SessionRefused: the history is shorter, or a turn is under way.
        """
        if tokens is None and turns is None:
            raise BadRequest("rewind", None, "needs tokens=... or turns=...: how much of the history to keep")
        with session_rules():
            length = self._length("rewind", tokens, turns)
            self._llm.core.sessions.rewind(self.id, length)
        self._turns = self._turns_of(length, turns)

    def hold(self, seconds: float, priority: float = 1.0) -> None:
        """Ask that its KV be kept rather than that of other idle sessions; the wish fades over `seconds`."""
        with session_rules():
            self._llm.core.sessions.hold(self.id, seconds, priority)

    def close(self, *, abort: bool = False) -> bool:
        """End the session, now or at the end of its turn (`abort` ends the turn); twice is no error.

        Returns whether it is closed already.
        """
        return self._session.state.phase is Phase.CLOSED or self._llm.core.close_session(self.id, abort=abort)

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(abort=True)

    def _length(self, what: str, tokens: int | None, turns: int | None) -> int:
        if tokens is not None and turns is not None:
            raise BadRequest(what, (tokens, turns), "takes tokens=... or turns=..., not both")
        for name, value in (("tokens", tokens), ("turns", turns)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadRequest(name, value, "must be a whole number")
        log = self._session.log
        if turns is None:
            return len(log) if tokens is None else tokens
        if self._turns and 0 < turns <= len(self._turns):
            return self._turns[turns - 1].end
        return log.end_of_turn(turns)

    def _turns_of(self, length: int, turns: int | None) -> list[_ChatTurn]:
        """Chat turns that remain when `_length` is kept."""
        return self._turns[:turns] if turns is not None else [turn for turn in self._turns if turn.end <= length]


def _messages(messages: str | Message | Sequence[Message]) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [messages] if isinstance(messages, Mapping) else list(messages)


def _last(pieces: Iterator[StreamPiece]) -> GenerationResult:
    """The result that the last piece carries."""
    *_, last = pieces
    assert last.result is not None
    return last.result
