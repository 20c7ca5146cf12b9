"""A conversation becomes the ids its model was trained on, or a refusal that says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import Kind, tiny_hf, tiny_tokenizer

from engine.errors import BadRequest
from engine.text.tokenizer import Tokenizer

TURNS = [{"role": "user", "content": "hi"}]


def _rendered(tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> str:
    return tokenizer.decode(tokenizer.render_chat(*args, **kwargs), skip_special_tokens=False)


def _with_template(template: str | None, kind: Kind = "byte_level") -> Tokenizer:
    return Tokenizer(tiny_hf(kind, chat_template=template))


def test_a_chat_is_written_as_its_template_says_with_special_tokens_whole() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    turns = [{"role": "system", "content": "be kind"}, *TURNS]
    head = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert _rendered(tokenizer, turns) == f"{head}<|im_start|>assistant\n"
    assert _rendered(tokenizer, turns, add_generation_prompt=False) == head
    assert [i for i in tokenizer.render_chat(turns) if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(("template", "num_bos"), [("{{ bos_token }}", 1), ("", 0)])
def test_the_template_alone_decides_about_bos(template: str, num_bos: int) -> None:
    tokenizer = _with_template(template + "{{ messages[0].content }}", "sentencepiece")
    assert tokenizer.encode("hi").count(tokenizer.bos_token_id) == 1
    assert tokenizer.render_chat(TURNS).count(tokenizer.bos_token_id) == num_bos


def test_variables_of_the_template_tools_and_extra_keys_of_a_message_reach_it() -> None:
    tokenizer = _with_template("{{ messages[0].name }} {{ enable_thinking }} {{ tools[0].function.name }}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    turns = [{"role": "user", "content": "hi", "name": "Ann"}]
    assert _rendered(tokenizer, turns, enable_thinking=False, tools=tools) == "Ann False look"


def test_a_final_message_can_be_continued() -> None:
    turns = [*TURNS, {"role": "assistant", "content": "well"}]
    text = _rendered(tiny_tokenizer("byte_level"), turns, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nwell")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([*TURNS, None], "messages[1]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([*TURNS, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content"),
    ],
)
def test_a_malformed_conversation_is_refused_by_the_name_of_its_field(messages: Any, field: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        tiny_tokenizer("byte_level").render_chat(messages)
    assert refusal.value.field == field
    assert "template" not in refusal.value.rule  # refused before the template saw it


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "return_dict", "tokenizer_kwargs"])
def test_a_request_cannot_reach_behind_the_template(name: str) -> None:
    with pytest.raises(BadRequest, match=name) as refusal:
        tiny_tokenizer("byte_level").render_chat(TURNS, **{name: "{{ 1 }}"})
    assert refusal.value.field == "chat_template_kwargs"


def test_a_model_without_a_template_says_so_and_what_to_do() -> None:
    with pytest.raises(BadRequest, match=r"no chat template.*generate\(\)"):
        _with_template(None).render_chat(TURNS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_an_error_in_the_template_is_the_requests_and_keeps_its_words(template: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refusal:
        _with_template(template).render_chat(TURNS)
    assert refusal.value.field == "messages"


def test_a_variable_with_half_a_character_is_refused_after_rendering() -> None:
    with pytest.raises(BadRequest, match="surrogate") as refusal:
        _with_template("{{ note }}").render_chat(TURNS, note="\ud83d")
    assert refusal.value.field == "messages"
