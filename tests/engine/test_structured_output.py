"""What a grammar forces: every answer keeps it, whatever runs beside it and whatever happens to the request."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import make_llm
from tiny_models import save_tiny_llama

from engine import LLM, SamplingParams
from engine.errors import BadRequest
from engine.outputs import GenerationResult
from engine.sampling.grammar import MAX_GRAMMAR_BYTES, Grammar
from engine.step import StepInput, decode, encode
from engine.text.tools.choice import after_thinking, forced_calls, tool_use
from engine.text.tools.formats import tool_format
from engine.text.tools.parser import ToolCallParser

pytest.importorskip("xgrammar")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "age", "kind"],
}
SCHEMA = Grammar.of_schema(PERSON)
DATE = Grammar("regex", r"20\d\d-[01]\d-[0-3]\d")
LIST = Grammar("ebnf", 'root ::= "[" item ("," item){2,4} "]"\nitem ::= "x" | "yz"')


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return make_llm(path)


def params(grammar: Grammar | None, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 1, "max_new_tokens": 200, "grammar": grammar, **others})


def check_person(result: GenerationResult) -> None:
    assert result.finish_reason == "stop"
    check_fields(json.loads(result.text))


def check_fields(person: Any) -> None:
    assert list(person) == ["name", "age", "kind"]
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 120
    assert person["kind"] in ("a", "bc")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.01}], ids=str)
def test_an_answer_keeps_its_grammar(llm, temperature, cut):
    for seed in range(2):
        others = {"temperature": temperature, "seed": seed, **cut}
        check_person(llm.generate("hello", params(SCHEMA, **others)))
        assert re.fullmatch(DATE.text, llm.generate("hello", params(DATE, **others)).text)
        assert re.fullmatch(r"\[(x|yz)(,(x|yz)){2,4}\]", llm.generate("hello", params(LIST, **others)).text)


def test_an_object_of_any_kind(llm):
    limited = params(Grammar("json_object"), logit_bias={llm.tokenizer.encode("}")[0]: 20.0})
    for seed in range(5):
        result = llm.generate("hi", SamplingParams(**{**fields(limited), "seed": seed}))
        assert isinstance(json.loads(result.text), dict)


def fields(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "seed", "max_new_tokens", "grammar", "logit_bias")
    return {name: getattr(params, name) for name in names}


def test_others_in_the_batch_are_what_they_are_alone(llm):
    plain = params(None, max_new_tokens=40, temperature=0.7)
    alone = llm.generate("hello", plain).token_ids
    person = llm.generate("hello", params(SCHEMA)).token_ids
    mixed = llm.generate(["hello"] * 4, [plain, params(SCHEMA), params(DATE), plain])
    assert [mixed[0].token_ids, mixed[3].token_ids] == [alone, alone]
    assert mixed[1].token_ids == person


def test_each_of_several_answers_has_its_own_place(llm):
    result = llm.generate("hello", params(SCHEMA, n=5))
    answers = [result, *result.alternatives]
    for answer in answers:
        check_person(answer)
    assert len({answer.text for answer in answers}) > 1


def test_retraction_changes_nothing(path):
    grammars = [SCHEMA, DATE, LIST, None] * 2
    prompts = [[5 + i] * 40 for i in range(len(grammars))]
    wanted = [params(grammar, seed=i, max_new_tokens=60) for i, grammar in enumerate(grammars)]
    calm = make_llm(path).generate(prompts, wanted)
    tight = make_llm(path, max_total_tokens=192, schedule_conservativeness=0.01)
    short = tight.generate(prompts, wanted)
    assert tight.stats()["num_retracted_total"] > 0
    assert [one.token_ids for one in short] == [one.token_ids for one in calm]


def test_a_state_is_replayed_where_the_output_is_another(llm):
    ids = np.array(llm.generate("hello", params(DATE, temperature=0.0)).token_ids[:-1], dtype=np.int32)
    followed = llm.core.grammars.state(DATE, llm.core.eos_token_ids, 0)
    masks = [followed.allowed(ids[:0])]
    for i in range(len(ids)):
        followed.take(int(ids[i]))
        masks.append(followed.allowed(ids[: i + 1]))
    for i in (*range(len(ids) + 1), 0, len(ids), 2):
        fresh = llm.core.grammars.state(DATE, llm.core.eos_token_ids, 0)
        assert (fresh.allowed(ids[:i]) == masks[i]).all()
        assert (followed.allowed(ids[:i]) == masks[i]).all()


def test_a_grammars_end_ends_the_answer_also_when_the_models_end_does_not(llm):
    for others in ({"ignore_eos": True}, {"min_new_tokens": 100}, {"stop_token_ids": [5]}):
        result = llm.generate("hello", params(DATE, **others))
        assert (result.finish_reason, len(result.text)) == ("stop", 10)


def test_a_least_length_holds_where_the_grammar_goes_on(llm):
    longer = Grammar("regex", "a{1,60}")
    short = llm.generate("x", params(longer, logit_bias={2: 100.0}))
    long = llm.generate("x", params(longer, logit_bias={2: 100.0}, min_new_tokens=20))
    assert (len(short.token_ids), len(long.token_ids)) == (2, 21)


def test_stop_strings_and_lengths_cut_as_ever(llm):
    text = llm.generate("hello", params(DATE)).text
    cut = llm.generate("hello", params(DATE, stop=[text[4:6]]))
    assert (cut.text, cut.finish_reason) == (text[:4], "stop")
    assert llm.generate("hello", params(DATE, max_new_tokens=3)).finish_reason == "length"


def test_logprobs_are_the_models_own(llm):
    scored = {"return_logprob": True, "top_logprobs_num": 3, "temperature": 0.0}
    free = llm.generate("hello", params(None, max_new_tokens=1, **scored))
    kept = llm.generate("hello", params(DATE, **scored))
    for (one, logprob), (other, its) in zip(kept.logprobs[0].top, free.logprobs[0].top, strict=True):
        assert (one, logprob) == (other, pytest.approx(its, abs=1e-5))
    assert kept.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_session_goes_on_after_a_grammar(llm):
    with llm.open_session() as session:
        for grammar in (SCHEMA, DATE, SCHEMA):
            answer = session.generate("more", params(grammar))
            assert answer.finish_reason == "stop"
        check_person(answer)
    assert llm.audit() == []


BAD = [
    ({"type": "strin"}, "Unsupported type"),
    ({"$ref": "#/nowhere"}, "Cannot find"),
    ({"$ref": "#"}, "Circular"),
    ({"type": "string", "pattern": "^(?!a).*$"}, "Lookahead"),
    (False, "cannot accept"),
]


@pytest.mark.parametrize(("schema", "reason"), BAD, ids=str)
def test_a_bad_schema_is_refused_with_the_compilers_reason(llm, schema, reason):
    with pytest.raises(BadRequest, match=reason):
        llm.generate("x", params(Grammar.of_schema(schema)))
    assert re.fullmatch(DATE.text, llm.generate("hello", params(DATE)).text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [("regex", "(?=a)b", "Lookahead"), ("regex", "(a", "parenthesis"), ("ebnf", 'root = "a"', "root rule")],
)
def test_a_bad_expression_is_refused_with_the_compilers_reason(llm, kind, text, reason):
    with pytest.raises(BadRequest, match=reason):
        llm.generate("x", params(Grammar(kind, text)))


def test_hard_schemas_of_the_cases_are_compiled(llm):
    """The large maximum and the long enum of B098."""
    for schema in ({"type": "integer", "maximum": 20_000_000_000}, {"enum": [f"value {i}" for i in range(5000)]}):
        llm.generate("x", params(Grammar.of_schema(schema), max_new_tokens=4))


def test_a_compilation_without_end_or_a_crash_costs_that_request_alone(llm):
    compiler = llm.core.grammars
    llm.generate("x", params(DATE))
    worker, compiler.time_limit_s = compiler._worker, 0.3
    started = time.monotonic()
    with pytest.raises(BadRequest, match="took more than"):
        llm.generate("x", params(Grammar("regex", "[^x]{1,90000}" * 50)))
    assert time.monotonic() - started < 5
    compiler.time_limit_s = 10.0
    assert worker.returncode is not None, "it was killed"
    hard = Grammar("ebnf", "root ::= " + "(" * 60000 + '"a"' + ")" * 60000)
    with pytest.raises(BadRequest):
        llm.generate("x", params(hard))
    assert re.fullmatch("b|c", llm.generate("x", params(Grammar("regex", "b|c"))).text)


def test_limits_of_size_and_depth_come_before_the_compiler():
    deep: Any = {"type": "string"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    for make in (
        lambda: Grammar.of_schema(deep),
        lambda: Grammar.of_schema("[" * 100_000),
        lambda: Grammar.of_schema("{"),
        lambda: Grammar.of_schema([1]),
        lambda: Grammar.of_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}),
        lambda: Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        lambda: Grammar("regex", ""),
        lambda: Grammar("ebnf", "\ud800"),
        lambda: Grammar("lark", "x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequest):
            make()


def test_a_text_that_no_token_continues_ends_with_an_error(llm):
    """A grammar may lead where it allows nothing."""
    state = llm.core.grammars.state(DATE, llm.core.eos_token_ids, 0)
    state.allowed(np.zeros(0, dtype=np.int32))[:] = 0
    state.problem = "no way on"
    plain, llm.core.grammars.state = llm.core.grammars.state, lambda *_: state
    try:
        beside, ended = llm.generate(["hello"] * 2, [params(None, max_new_tokens=8), params(DATE)])
    finally:
        llm.core.grammars.state = plain
    assert (ended.finish_reason, ended.token_ids, ended.message) == ("error", [], "no way on")
    assert len(beside.token_ids) == 8


def test_an_ambiguous_grammar_ends_before_it_holds_everybody_up(llm):
    started = time.monotonic()
    hard = Grammar("ebnf", 'root ::= root root root | root root | "a" | ""')
    result = llm.generate("x", params(hard, max_new_tokens=400, logit_bias={2: -100.0}))
    assert result.finish_reason == "error"
    assert "ambiguous" in result.message
    assert time.monotonic() - started < 20


def test_masks_ride_in_the_steps(path):
    """A packed step makes the same tokens elsewhere; one without grammars carries nothing."""
    llm = make_llm(path)
    steps: list[StepInput] = []
    plain = llm.core.runner.launch

    def launch(step: StepInput) -> None:
        steps.append(decode(encode(step), StepInput))
        plain(steps[-1])

    llm.core.runner.launch = launch
    mixed = llm.generate(["hello"] * 2, [params(None, max_new_tokens=30), params(DATE)])
    assert re.fullmatch(DATE.text, mixed[1].text)
    assert {step.allowed is None for step in steps} == {True, False}
    assert max(len(step.allowed.row) for step in steps if step.allowed is not None) == 1


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("template", ["", "```json", "<|python_tag|>"], ids=["hermes", "deepseek", "llama3"])
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "llama3", "deepseek"])
def test_forced_calls_are_read_back_in_each_format(llm, parser, template):
    style = tool_format(parser, template)
    for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
        use = tool_use(TOOLS, choice, is_parallel=False)
        grammar = forced_calls(use, style)
        reader = ToolCallParser(style, use.schemas)
        result = llm.generate("x", params(grammar, max_new_tokens=300))
        assert result.finish_reason == "stop"
        first, rest = reader.feed(result.text), reader.finish()
        assert first.content + rest.content == ""
        [call] = first.calls + rest.calls
        value = json.loads(call.arguments)
        assert call.name == "weather" if choice != "required" else call.name in use.names
        if call.name == "weather":
            check_fields(value)
        else:
            assert value == {}


CALL = {"begin": "<call>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "end": "</call>"}
TAG = {"type": "tag", "begin": "<date>", "content": {"type": "regex", "pattern": DATE.text}, "end": "</date>"}


def problem_of(llm: LLM, grammar: Grammar, text: str) -> str:
    """Why the grammar refuses a text; empty when it is a whole one."""
    state = llm.core.grammars.state(grammar, llm.core.eos_token_ids, 0)
    for token_id in [*llm.tokenizer.encode(text), *llm.core.eos_token_ids]:
        state.take(token_id)
        if state.problem:
            break
    return state.problem or ("" if state.is_complete else "goes on")


def test_structural_tags_of_both_forms(llm):
    for form in (
        {"structures": [CALL], "triggers": ["<call"]},
        json.dumps({"structures": [CALL], "triggers": ["<ca"]}),
    ):
        grammar = Grammar.of_structural_tag(form)
        for text in ("", "plain <text", 'so <call>{"a": 12}</call> and <call>{}</call>.'):
            assert problem_of(llm, grammar, text) == ""
        for text in ('<call>{"a": "x"}</call>', '<call>{"b": 1}</call>', "<call>[]</call>"):
            assert "forbids" in problem_of(llm, grammar, text)
    result = llm.generate("x", params(Grammar.of_structural_tag({"type": "structural_tag", "format": TAG})))
    assert re.fullmatch(f"<date>{DATE.text}</date>", result.text)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (3, "format, or with structures"),
        ({"structures": []}, "format, or with structures"),
        ({"structures": [{"begin": "<a>"}], "triggers": ["<a"]}, "begin, schema and end"),
        ({"structures": 3, "triggers": ["<a"]}, "begin, schema and end"),
        ("{", "is not JSON"),
        ({"format": {"type": "regex", "pattern": "a" * MAX_GRAMMAR_BYTES}}, "bytes"),
    ],
)
def test_structural_tags_that_are_none(tag, says):
    with pytest.raises(BadRequest, match=says):
        Grammar.of_structural_tag(tag)


def test_a_grammar_behind_thinking(llm):
    for grammar, text in (
        (DATE, "2011-11-11"),
        (LIST, "[x,yz,x]"),
        (SCHEMA, '{"name": "", "age": 3, "kind": "a"}'),
        (Grammar("json_object"), '{"any": [1]}'),
    ):
        for thinking in ("</think>", "hm {</think>\n\n"):
            state = llm.core.grammars.state(after_thinking(grammar), llm.core.eos_token_ids, 0)
            for token_id in [*llm.tokenizer.encode(thinking + text), *llm.core.eos_token_ids]:
                state.take(token_id)
                assert not state.problem
            assert state.is_complete
        state = llm.core.grammars.state(after_thinking(grammar), llm.core.eos_token_ids, 0)
        for token_id in llm.tokenizer.encode("</think>!"):
            state.take(token_id)
        assert "forbids" in state.problem
