"""Chat templates: a conversation becomes the text the model was trained to continue.

The template is the model's own program (Jinja, run in `transformers`' sandbox). It alone decides about BOS, default
system turns and turn markers; nothing is added around what it writes. Whatever goes wrong in it is about one request,
so it leaves here as `BadRequest`. `require_text` is the rule for every text a request carries.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a caller may hand to the renderer by name; every other parameter of it would change what is rendered for whom.
_OPEN_PARAMETERS = frozenset({"tools", "documents", "continue_final_message"})
_PROBE_REPLY = "probe-reply"


def require_text(field: str, value: Any) -> str:
    """`value` when it is text that has a UTF-8 form.

    Raises:
        BadRequest: not a string, or one with a lone surrogate (JSON may carry those, UTF-8 cannot).
    """
    if not isinstance(value, str):
        raise BadRequest(field, value, f"must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            field, value, f"is not valid Unicode: lone surrogate at character {error.start}; send the whole character"
        ) from None
    return value


class ChatTemplate:
    """The chat template that came with a model, if any."""

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self._hf = hf
        self._reserved = frozenset(inspect.signature(hf.apply_chat_template).parameters) - _OPEN_PARAMETERS

    @property
    def source(self) -> str:
        """The program's text; of several templates all, one after another."""
        template: Any = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the template writes it.

        Args:
            messages: non-empty list of `{"role": str, "content": str, ...}`; content may lack beside `tool_calls`.
            add_generation_prompt: end with the header of the reply that the model is to write.
            kwargs: `tools`, `documents`, `continue_final_message`, and variables of the template (`enable_thinking`).
        Raises:
            BadRequest: malformed messages, a variable that is not the template's to take, no template in the model,
                or an error raised by the template, with its own words.
        """
        _require_messages(messages)
        for name in kwargs:
            if name in self._reserved:
                raise BadRequest("chat_template_kwargs", name, "is not a variable of the chat template; remove it")
        if not self._hf.chat_template:
            raise BadRequest(
                "messages", messages, "this model has no chat template; use generate() with a plain prompt instead"
            )
        try:
            text: str = self._hf.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
            )
        except Exception as error:  # the model's program on a user's data: whatever it raises is about this request
            raise BadRequest("messages", messages, f"the model's chat template refused them: {error}") from error
        return require_text("messages", text)

    def text_after_reply(self) -> str:
        """What the template writes behind an assistant's reply: the model ends its own turn the same way.

        Empty when there is no template, or when it cannot render a question with an answer.
        """
        turns = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": _PROBE_REPLY}]
        try:
            _, reply, rest = self.render(turns, add_generation_prompt=False).rpartition(_PROBE_REPLY)
        except BadRequest:
            return ""
        return rest if reply else ""


def _require_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest("messages", messages, "must be a non-empty list of {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"messages[{index}]", message, "must be an object with 'role' and 'content'")
        require_text(f"messages[{index}].role", message.get("role"))
        if message.get("content") is not None or not message.get("tool_calls"):
            require_text(f"messages[{index}].content", message.get("content"))
