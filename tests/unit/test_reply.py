"""Replies taken apart: the same however the text was cut, nothing lost, and no markup in what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadRequest
from engine.text.markers import num_held
from engine.text.reasoning import ReasoningSplitter, begins_inside
from engine.text.reply import ReplyParser, ReplyPart
from engine.text.tools.formats import tool_format
from engine.text.tools.parser import ToolCallParser
from engine.text.tools.style import ToolFormat

HERMES, LLAMA3 = tool_format("hermes", ""), tool_format("llama3", "")
DEEPSEEK, DEEPSEEK_31 = tool_format("deepseek", "```json"), tool_format("deepseek", "")
QWEN3 = tool_format("qwen3_coder", "")
FIND = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "deep": {"type": "array"},
        "kind": {"$ref": "#/$defs/kind"},
        "top": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "score": {"type": "number"},
        "id": {"type": ["string", "integer"]},
        "short": {"type": "string", "maxLength": 2},
    },
    "$defs": {"kind": {"enum": ["file", "7"]}},
}
SCHEMAS = {"add": {"properties": {"a": {"type": "integer"}}}, "find": FIND}
B, E = "<tool_call>", "</tool_call>"
DB, DE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL_B, ALL_E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ADD = '{"name": "add", "arguments": {"a": 1}}'
TRICKY = json.dumps({"name": "find", "arguments": {"q": 'a } " </tool_call> \\ 漢🙂', "deep": [{"x": {}}]}})

XML_ADD = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
XML_CODE = 'if a:\n    print("</function> </tool_call>")  # <parameter=b> 漢🙂\n'
"""A text with all the markup that it may hold, and whitespace of its own at both ends."""
XML_FIND = f"<function=find>\n<parameter=q>\n  {XML_CODE}\n</parameter>\n"
XML_FIND += "<parameter=deep>\n[1, {}]\n</parameter>\n</function>"


def xml(**values: str) -> str:
    """A call of `find`."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{B}\n<function=find>\n{written}</function>\n{E}"


TRICKY_SAYS = json.dumps(json.loads(TRICKY)["arguments"], ensure_ascii=False)

Case = tuple[ToolFormat, str, str, list[tuple[str, str]]]
CASES: list[Case] = [
    (HERMES, "no call at all\n ", "no call at all\n ", []),
    (HERMES, "  ", "  ", []),
    (HERMES, f"{B}\n{ADD}\n{E}", "", [("add", '{"a": 1}')]),
    (HERMES, f"Let me see.\n\n{B}{ADD}{E}\n", "Let me see.", [("add", '{"a": 1}')]),
    (HERMES, f"{B}{ADD}{E}\n{B}\n{TRICKY}\n{E} after", " after", [("add", '{"a": 1}'), ("find", TRICKY_SAYS)]),
    (HERMES, f"{B}{ADD}{B}{ADD}", "", [("add", '{"a": 1}')] * 2),
    (HERMES, f"a < b, <tool, {B[:-1]} and </tool_call", f"a < b, <tool, {B[:-1]} and </tool_call", []),
    (HERMES, f"x{B}not json{E}y", "xnot jsony", []),
    (HERMES, f'{B}{{"name": "rm", "arguments": {{}}}}{E}', '{"name": "rm", "arguments": {}}', []),
    (HERMES, f'{B}{{"name": "add", "arguments": {{"a": 12', "", [("add", '{"a": 12')]),
    (HERMES, f'{B}{{"name": "ad', '{"name": "ad', []),
    (HERMES, f'{B}{{"name": "rm", "arguments": {{"a', '{"name": "rm", "arguments": {"a', []),
    (HERMES, f"x {B}", "x", []),
    (HERMES, f"{B}{ADD}</tool", "", [("add", '{"a": 1}')]),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, ' \n{"name": "add", "parameters": {}}; {"name": "find", "parameters": {"q": "}"}}', "", [("add", "{}"),
        ("find", '{"q": "}"}')]),
    (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, 'sure <|python_tag|>{"name": "add", "parameters": {}}', "sure", [("add", "{}")]),
    (LLAMA3, ' {"answer": 42} is JSON', ' {"answer": 42} is JSON', []),
    (LLAMA3, 'it is {"name": "add", "parameters": {}}', 'it is {"name": "add", "parameters": {}}', []),
    (LLAMA3, '{"name": "add", "parameters": {"a', "", [("add", '{"a')]),
    (DEEPSEEK, f'hm{ALL_B}{DB}function{SEP}add\n```json\n{{"a": 1}}\n```{DE}\n{DB}function{SEP}find\n```json\n{{}}\n```'
        f"{DE}{ALL_E}", "hm", [("add", '{"a": 1}'), ("find", "{}")]),
    (DEEPSEEK_31, f'{ALL_B}{DB}add{SEP}{{"a": 1}}{DE}{DB}find{SEP}{{}}{DE}{ALL_E}', "", [("add", '{"a": 1}'),
        ("find", "{}")]),
    (DEEPSEEK_31, f'{ALL_B}{DB}add{SEP}{{"a": ', "", [("add", '{"a":')]),
    (DEEPSEEK_31, f"{ALL_B}{DB}rm{SEP}{{}}{DE}{ALL_E}", f"rm{SEP}{{}}", []),
    (QWEN3, f"{B}\n{XML_ADD}\n{E}", "", [("add", '{"a": 1}')]),
    (QWEN3, f"I add.\n\n{XML_ADD}\n{E}", "I add.", [("add", '{"a": 1}')]),
    (QWEN3, f"{B}{XML_ADD}{E}\n{B}\n{XML_FIND}\n{E} so", " so", [("add", '{"a": 1}'),
        ("find", json.dumps({"q": f"  {XML_CODE}", "deep": [1, {}]}, ensure_ascii=False))]),
    (QWEN3, f"{B}\n<function=find>\n</function>\n{E}", "", [("find", "{}")]),
    (QWEN3, f"{B}<function=add><parameter=a>1</parameter></function>{E}", "", [("add", '{"a": 1}')]),
    (QWEN3, f"a < b, <func, <tool and {E[:-1]}", f"a < b, <func, <tool and {E[:-1]}", []),
    (QWEN3, f"x{B}\nnot XML\n{E}y", "x\nnot XMLy", []),
    (QWEN3, "<function=rm>\n<parameter=a>\n1\n</parameter>\n</function>", "rm>\n<parameter=a>\n1\n</parameter>", []),
    (QWEN3, "<function=add>\nso\n<parameter=a>\n1\n</parameter>\n</function>",
        "add>\nso\n<parameter=a>\n1\n</parameter>", []),
    (QWEN3, f"{B}\n<function=ad", "ad", []),
    (QWEN3, f"{B}\n<function=find>", "", [("find", "{}")]),
    (QWEN3, f"{B}\n<function=find>\n<param", "", [("find", "{}")]),
    (QWEN3, f"{B}\n<function=find>\n<parameter=q", "", [("find", "{")]),
    (QWEN3, f"{B}\n<function=find>\n<parameter=q>\nhal\n</par", "", [("find", '{"q": "hal')]),
    (QWEN3, f"{xml(q='x')[:-25]}<parameter=top>\n1", "", [("find", '{"q": "x", "top": 1')]),
    (QWEN3, f"{xml(q='x')[:-25]}\n</func", "", [("find", '{"q": "x"}')]),
    (QWEN3, xml(q="x")[:-12], "", [("find", '{"q": "x"}')]),
    (QWEN3, xml(q="x")[:-3], "", [("find", '{"q": "x"}')]),
    (QWEN3, f"{xml(q='x')} a <", " a <", [("find", '{"q": "x"}')]),
    (QWEN3, f"{B}\n<function=find>\n<parameter=q>\nno end\n</function>\n{E}", "", [("find", '{"q": "no end"}')]),
]  # fmt: skip


def parsed(make: Callable[[], ReplyParser], pieces: Sequence[str]) -> ReplyPart:
    """What a stream of these pieces shows, joined; each piece shows only text that stays."""
    parser, whole = make(), ReplyPart()
    for piece in pieces:
        whole += parser.feed(piece)
    whole += parser.feed("", is_last=True)
    return whole


def cuts(text: str) -> list[list[str]]:
    """The text at once, character by character, and cut at every place and at many pairs of places."""
    places = range(1, len(text))
    pairs = list(combinations(places, 2))
    some = [*((place,) for place in places), *pairs[:: max(1, len(pairs) // 300)]]
    return [[text], list(text), *([text[i:j] for i, j in zip((0, *cut), (*cut, None), strict=True)] for cut in some)]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES, ids=lambda value: str(value)[:30])
def test_calls_are_found_however_the_text_is_cut(style, text, content, calls):
    for pieces in cuts(text):
        part = parsed(lambda: ReplyParser(None, ToolCallParser(style, SCHEMAS)), pieces)
        found = [(call.name, call.arguments) for call in part.calls]
        assert (part.content, found) == (content, calls), pieces


VALUES = [
    ("q", "12", "12"), ("q", " {} ", " {} "), ("q", "\n\n", "\n\n"), ("q", "", ""), ("other", "5", "5"),
    ("other", '{"a": [1]}', {"a": [1]}), ("other", '"5"', '"5"'), ("top", " 12 ", 12), ("top", "null", None),
    ("top", "None", None), ("top", "twelve", "twelve"), ("top", "1.5", "1.5"), ("exact", "True", True),
    ("exact", "false", False), ("exact", "0", "0"), ("score", "1", 1), ("score", "-2.5e3", -2.5e3),
    ("score", "NaN", "NaN"), ("score", "1e999", "1e999"), ("kind", "7", "7"), ("kind", "\nfile ", "file"),
    ("id", "7", 7), ("id", "x7", "x7"), ("deep", "[" * 9000, "[" * 9000), ("deep", '["a", null]', ["a", None]),
    ("deep", "{}", "{}"), ("short", " ab ", "ab"), ("short", " a", " a"), ("top", "9" * 5000, "9" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("key", "written", "value"), VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_without_a_type_has_that_of_the_schema(key, written, value):
    part = parsed(lambda: ReplyParser(None, ToolCallParser(QWEN3, SCHEMAS)), [xml(**{key: written})])
    [call] = part.calls
    assert (call.name, json.loads(call.arguments), part.content) == ("find", {key: value}, "")


def test_what_is_written_for_a_template_without_tools_is_read_back():
    given = {"q": f"  {XML_CODE}\n", "deep": [{"x": "</function>"}], "top": None, "exact": True, "score": 0.5}
    begin, end = QWEN3.forced("find")
    text = begin + QWEN3.written(json.dumps(given)) + end
    [call] = parsed(lambda: ReplyParser(None, ToolCallParser(QWEN3, SCHEMAS)), list(text)).calls
    assert json.loads(call.arguments) == given
    assert QWEN3.written("no JSON") == "no JSON"
    assert QWEN3.written(QWEN3.example) == "<parameter=PARAMETER>\nVALUE\n</parameter>"


def test_a_template_says_how_calls_are_written():
    assert tool_format("auto", "<tool_call>\n<function=x>\n<parameter=y>") is QWEN3
    assert tool_format("auto", "<tool_call> arguments") is HERMES
    with pytest.raises(BadRequest, match="--tool-call-parser"):
        tool_format("auto", '<function=x>{"a": 1}</function>')


THOUGHTS = [
    (False, "<think>\nhm, <b>\n</think>\n\nyes </think> <think>", "hm, <b>", "yes </think> <think>"),
    (False, " \n<think>a</think>b", "a", "b"),
    (False, "plain <think>x</think>", "", "plain <think>x</think>"),
    (False, "<think></think>\n\nyes", "", "yes"),
    (False, "<think>\nnever ends </thin", "never ends </thin", ""),
    (False, "<thin", "", "<thin"),
    (False, "", "", ""),
    (False, "  x", "", "  x"),
    (True, "so\n\n</think>\nyes ", "so", "yes "),
    (True, "<think>\nso</think>yes", "so", "yes"),
    (True, "still thinking\n", "still thinking\n", ""),
    (True, "<thi", "<thi", ""),
]


@pytest.mark.parametrize(("is_inside", "text", "reasoning", "content"), THOUGHTS)
def test_thinking_is_split_however_the_text_is_cut(is_inside, text, reasoning, content):
    for pieces in cuts(text):
        part = parsed(lambda: ReplyParser(ReasoningSplitter(is_inside=is_inside), None), pieces)
        assert (part.reasoning, part.content) == (reasoning, content), pieces


def test_calls_behind_thinking_and_none_inside_it():
    text = f"<think>\nI could {B}{ADD}{E}\n</think>\n\nNow: {B}{ADD}{E}"
    for pieces in cuts(text):
        make = lambda: ReplyParser(ReasoningSplitter(is_inside=False), ToolCallParser(HERMES, SCHEMAS))  # noqa: E731
        part = parsed(make, pieces)
        assert (part.reasoning, part.content, len(part.calls)) == (f"I could {B}{ADD}{E}", "Now:", 1)


ATOMS = [B, E, ADD, TRICKY, "<", "{", "}", '"', "\n", " ", "x", "漢", "<think>", "</think>", "<|python_tag|>", ";"]
ATOMS += [XML_ADD, XML_FIND, "<function=find>", "<parameter=q>", "</parameter>", "</function>", "</func"]
ATOMS += [ALL_B, DB, DE, ALL_E, f"function{SEP}add\n```json\n", "{}", "\n```", f"find{SEP}"]


@given(
    style=st.sampled_from([HERMES, LLAMA3, DEEPSEEK, DEEPSEEK_31, QWEN3]),
    atoms=st.lists(st.sampled_from(ATOMS), max_size=12),
    is_inside=st.booleans(),
    data=st.data(),
)
def test_any_text_is_taken_apart_the_same_in_any_pieces(style, atoms, is_inside, data):
    text = "".join(atoms)

    def make() -> ReplyParser:
        return ReplyParser(ReasoningSplitter(is_inside=is_inside), ToolCallParser(style, SCHEMAS))

    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip((0, *places), (*places, None), strict=True)]
    whole = parsed(make, [text])
    assert parsed(make, pieces) == parsed(make, list(text)) == whole
    assert not any(marker in whole.content for marker in style.markers)


def test_where_a_reply_begins():
    assert begins_inside("qwen3", "...<think>\n")
    assert not begins_inside("qwen3", "assistant\n")
    assert not begins_inside("deepseek", "<｜Assistant｜></think>")
    assert begins_inside("deepseek", "<｜Assistant｜>")


def test_what_may_be_the_beginning_of_a_marker():
    assert [num_held(text, ("<ab>", "b<")) for text in ("", "x<", "x<a", "<ab>", "b", "ab<a", "<<")] == [
        0, 1, 2, 0, 1, 2, 1,
    ]  # fmt: skip
