"""What a caller sees of `LLM`: results, streams, refusals, and numbers about the engine."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, add, assert_idle, make_llm, prompts_with_shared_heads, run

from engine import LLM, SamplingParams
from engine.errors import BadRequest, ConfigError, ModelLoadError
from engine.outputs import GenerationResult, StreamPiece
from mem_cache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, namespace_hash

TEXTS = ["hello the world", "你好🙂é👩\u200d👩\u200d👧 한국어", "123 and\n\nin the", "👧"]
SHORT = replace(GREEDY, max_new_tokens=6)
CONTEXT = 64


def ids(seed: int, n: int) -> list[int]:
    """A random prompt of `n` tokens."""
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> LLM:
    """One engine for the tests that leave it idle; the next fixture empties its cache."""
    return make_llm(tiny_path, page_size=16, max_total_tokens=512)


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.flush_cache()
    return shared


# Prompts and parameters.


def test_a_prompt_is_a_text_or_ids_and_one_or_many(llm: LLM) -> None:
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    single = [llm.generate(text, SHORT) for text in TEXTS]
    assert all(isinstance(result, GenerationResult) for result in single)
    expected = [(result.text, result.token_ids) for result in single]
    forms: list[Any] = [
        [llm.generate(prompt, SHORT) for prompt in prompts],
        [llm.generate(tuple(prompt), SHORT) for prompt in prompts],
        llm.generate(TEXTS, SHORT),
        llm.generate(prompts, SHORT),
    ]
    for results in forms:
        assert [(result.text, result.token_ids) for result in results] == expected
        assert [result.usage.prompt_tokens for result in results] == [len(prompt) for prompt in prompts]
    assert isinstance(llm.generate(TEXTS[:1], SHORT), list)
    assert isinstance(llm.generate(prompts[:1], SHORT), list)
    assert_idle(llm)


def test_a_result_belongs_to_its_prompt_whatever_ends_first(llm: LLM) -> None:
    params = [replace(GREEDY, max_new_tokens=n) for n in (9, 1, 5)]
    results = llm.generate([ids(seed, 20) for seed in range(3)], params)
    assert [result.usage.completion_tokens for result in results] == [9, 1, 5]
    assert [result.token_ids for result in results] == [
        llm.generate(ids(seed, 20), one).token_ids for seed, one in enumerate(params)
    ]
    assert len({result.request_id for result in results}) == 3


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    assert llm.generate(ids(0, 5), [SHORT]).usage.completion_tokens == 6
    assert llm.generate(ids(0, 5)).usage.completion_tokens <= 128
    for wrong in ([SHORT], [SHORT] * 3, []):
        with pytest.raises(BadRequest, match=f"params={len(wrong)}: .* one for each of 2"):
            llm.generate([ids(0, 5), ids(1, 5)], wrong)
    for no_params in ({"temperature": 0}, "greedy", 5, [SHORT, None], [{"temperature": 0}, SHORT]):
        with pytest.raises(BadRequest, match=r"params=.* must be SamplingParams"):
            llm.generate([ids(0, 5), ids(1, 5)], no_params)  # type: ignore[call-overload]
    assert_idle(llm)


def test_a_seed_makes_a_choice_that_neighbours_do_not_change(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_new_tokens=12, ignore_eos=True)
    alone = llm.generate(ids(3, 20), params)
    crowd = llm.generate([ids(4, 30), ids(3, 20), ids(5, 10)], params)
    assert crowd[1].token_ids == alone.token_ids
    assert llm.generate(ids(3, 20), replace(params, seed=12)).token_ids != alone.token_ids


def test_without_a_seed_the_engines_seed_decides(tiny_path: Path) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True)
    runs = []
    for seed in (7, 7, 8):
        llm = make_llm(tiny_path, random_seed=seed, max_total_tokens=128)
        runs.append([llm.generate(ids(1, 10), params).token_ids for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "each request draws its own"


# Streams.


def collect(pieces: Any, n: int = 1) -> tuple[list[str], list[list[int]], list[GenerationResult | None]]:
    """Join pieces by prompt; a result comes with the last piece of its prompt, once."""
    texts, tokens = [""] * n, [[] for _ in range(n)]
    results: list[GenerationResult | None] = [None] * n
    for piece in pieces:
        assert isinstance(piece, StreamPiece)
        assert results[piece.index] is None, "nothing comes after the result"
        piece.text.encode()
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        results[piece.index] = piece.result
    return texts, tokens, results


STREAMED = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.3, seed=3, max_new_tokens=60),
    "with-specials": SamplingParams(temperature=1.3, seed=3, max_new_tokens=60, skip_special_tokens=False),
}


@pytest.mark.parametrize("params", STREAMED.values(), ids=STREAMED)
def test_a_streams_pieces_join_to_the_result_and_to_the_decoded_ids(llm: LLM, params: SamplingParams) -> None:
    whole = llm.generate(TEXTS, params)
    texts, tokens, results = collect(llm.generate(TEXTS, params, stream=True), len(TEXTS))
    for text, token_ids, result, plain in zip(texts, tokens, results, whole, strict=True):
        assert result is not None
        assert text == result.text == plain.text
        assert token_ids == result.token_ids == plain.token_ids
        shown = token_ids[:-1] if result.stop_reason is not None else token_ids
        assert text == llm.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    assert any("\ufffd" in text for text in texts), "a random model writes broken characters too"
    assert_idle(llm)


def test_a_character_is_shown_when_its_last_byte_is_there(llm: LLM) -> None:
    """The model is made to write multi-byte text, byte by byte."""
    text = "é你好🙂 한국어👩\u200d👩\u200d👧!"
    script = [llm.tokenizer.encode(char) for char in text]
    flat = [token for tokens in script for token in tokens]
    assert len(flat) > 2 * len(text)
    forced = _force(llm, flat)
    try:
        pieces = list(llm.generate(ids(1, 5), replace(GREEDY, max_new_tokens=len(flat)), stream=True))
    finally:
        forced()
    texts, tokens, results = collect(pieces)
    assert tokens[0] == flat
    assert texts[0] == text
    assert results[0] is not None
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert max(len(piece.text) for piece in pieces) == 1, "nothing waits longer than for its own bytes"


def _force(llm: LLM, tokens: list[int]) -> Callable[[], None]:
    """Make the next decode choose `tokens` in turn; returns what ends it."""
    forward, left = llm.core.runner.model.logits, iter(tokens)

    def forced(*args: Any) -> Any:
        logits = forward(*args)
        if len(logits):
            logits[:] = 0.0
            logits[:, next(left)] = 1.0
        return logits

    llm.core.runner.model.logits = forced  # type: ignore[method-assign]

    def restore() -> None:
        del llm.core.runner.model.logits

    return restore


def test_a_stream_shows_no_part_of_a_stop_string(llm: LLM) -> None:
    prompt = ids(1, 5)
    forced = _force(llm, llm.tokenizer.encode("one two thr") + llm.tokenizer.encode("ee four five"))
    try:
        params = replace(GREEDY, stop=["three f", "never"])
        texts, tokens, results = collect(llm.generate(prompt, params, stream=True))
    finally:
        forced()
    assert texts == ["one two "]
    assert results[0] is not None
    assert (results[0].text, results[0].finish_reason, results[0].stop_reason) == ("one two ", "stop", "three f")
    assert llm.tokenizer.decode(tokens[0]).startswith("one two three f")
    assert tokens[0] == results[0].token_ids


def test_streams_of_two_callers_take_turns(llm: LLM) -> None:
    prompts = [ids(1, 20), ids(2, 33)]
    expected = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    first, second = (llm.generate(prompt, GREEDY, stream=True) for prompt in prompts)
    one: list[int] = []
    two: list[int] = []
    for _ in range(10):
        one += next(first).token_ids
        two += next(second).token_ids
        two += next(second).token_ids
    between = llm.generate(ids(3, 10), SHORT)
    assert between.usage.completion_tokens == 6
    for piece in second:
        two += piece.token_ids
    for piece in first:
        one += piece.token_ids
    assert [one, two] == expected
    assert_idle(llm)


def test_one_caller_drives_anothers_stream_and_nothing_of_it_is_lost(llm: LLM) -> None:
    expected = llm.generate(ids(1, 20), GREEDY)
    stream = llm.generate(ids(1, 20), GREEDY, stream=True)
    llm.generate(ids(2, 20), replace(GREEDY, max_new_tokens=60))
    assert not llm.core.has_work, "it was finished meanwhile"
    texts, tokens, results = collect(stream)
    assert (texts[0], tokens[0]) == (expected.text, expected.token_ids)
    assert results[0] is not None


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("leave", ["close", "drop", "raise"])
def test_leaving_a_stream_early_aborts_its_requests_and_no_others(llm: LLM, taken: int, leave: str) -> None:
    other = add(llm, ids(9, 20))
    stream = llm.generate([ids(1, 20), ids(2, 30)], GREEDY, stream=True)
    for _ in range(taken):
        next(stream)
    assert len(llm.core.scheduler) == 3
    if leave == "close":
        stream.close()  # type: ignore[attr-defined]
    elif leave == "raise":
        with suppress(KeyError):
            _fail_inside(stream)
    del stream
    assert len(llm.core.scheduler) == 1
    assert llm._delivery._live == {}
    while llm.core.has_work:
        llm.core.step()
    assert other.num_output == 24
    assert_idle(llm)


def _fail_inside(stream: Any) -> None:
    for _ in stream:
        raise KeyError


def test_a_request_that_is_aborted_from_outside_ends_its_stream(llm: LLM) -> None:
    stream = llm.generate(ids(1, 20), GREEDY, stream=True)
    pieces = [next(stream) for _ in range(4)]
    [request] = llm.core.scheduler.running
    assert llm.abort(request.id)
    assert not llm.abort(request.id)
    rest = list(stream)
    result = rest[-1].result
    assert result is not None
    assert (result.finish_reason, result.usage.completion_tokens) == ("abort", 4)
    assert [t for piece in pieces + rest for t in piece.token_ids] == result.token_ids
    assert "".join(piece.text for piece in pieces + rest) == result.text
    assert not llm.abort("nobody")
    assert_idle(llm)


def test_a_stop_by_eos_shows_no_text_of_it(llm: LLM) -> None:
    forced = _force(llm, [*llm.tokenizer.encode("done"), 2])
    try:
        result = llm.generate(ids(1, 5), replace(GREEDY, ignore_eos=False, skip_special_tokens=False))
    finally:
        forced()
    assert (result.text, result.finish_reason, result.stop_reason) == ("done", "stop", 2)
    assert result.token_ids[-1] == 2


# Chat.


def test_chat_continues_the_models_own_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi 🙂"}]
    result = llm.chat(messages, SHORT)
    prompt = llm.tokenizer.render_chat(messages)
    assert result.token_ids == llm.generate(prompt, SHORT).token_ids
    assert result.usage.prompt_tokens == len(prompt)
    texts, _, _ = collect(llm.chat(messages, SHORT, stream=True))
    assert texts == [result.text]
    assert_idle(llm)


def test_the_next_turn_of_a_chat_reuses_the_one_before(llm: LLM) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "the first question of all"}]
    first = llm.chat(messages, SHORT)
    longer = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
    second = llm.chat(longer, SHORT)
    same = 0
    for a, b in zip(llm.tokenizer.render_chat(messages), llm.tokenizer.render_chat(longer), strict=False):
        if a != b:
            break
        same += 1
    assert second.usage.cached_tokens >= same - same % 16 > 0
    assert first.usage.cached_tokens == 0


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{"role": "user"}], [{"content": "x"}], [5], [{"role": "user", "content": None}]]
)
def test_malformed_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(BadRequest, match="messages"):
        llm.chat(messages, SHORT)
    with pytest.raises(BadRequest, match="messages"):
        llm.chat(messages, SHORT, stream=True)
    assert_idle(llm)


def test_an_unknown_template_argument_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="tokenize"):
        llm.chat([{"role": "user", "content": "x"}], SHORT, tokenize=True)


# Bad input: a typed error with the value in it, and the engine lives on.

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", r"prompt=\[\]: is empty"),
    "no ids": ([], r"prompt=\[\]: is empty"),
    "an empty list inside": ([[]], r"prompt=\[\]: is empty"),
    "an empty text inside": ([""], r"prompt=\[\]: is empty"),
    "negative id": ([-1], "prompt=-1: .* 0..299"),
    "first id behind the vocabulary": ([300], "prompt=300: .* 0..299"),
    "padded id": ([5, 303], "prompt=303"),
    "id that overflows int32": ([2**31], "prompt=2147483648"),
    "id that overflows int64": ([2**70], "prompt=1180591620717411303424"),
    "text among ids": ([[1, "a"]], "prompt=.*must be"),
    "float": ([1.5], "prompt=1.5"),
    "truth": ([True], "prompt=True"),
    "nothing": ([None], "prompt=None"),
    "lists too deep": ([[[1]]], r"prompt=\[\[1\]\]"),
    "ids and text in one": ([[5], ["a"]], r"prompt=\['a'\]"),
    "None": (None, "prompts=None"),
    "number": (5, "prompts=5"),
    "bytes": (b"ab", "prompt=97"),
    "dictionary": ({"a": 1}, "prompts="),
    "lone surrogate": ("\ud83d", "prompt=.*lone surrogate"),
    "longer than the context": ([5] * (CONTEXT + 1), f"prompt={CONTEXT + 1}: .*context is {CONTEXT}"),
    "as long as the context": ([5] * CONTEXT, f"prompt={CONTEXT}: .*context is {CONTEXT} tokens; shorten"),
}


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> LLM:
    return make_llm(tiny_path, page_size=16, max_total_tokens=256, context_length=CONTEXT)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_prompt_is_refused_and_others_live_on(small: LLM, prompt: Any, message: str, stream: bool) -> None:
    small.flush_cache()
    expected = small.generate(ids(1, 20), SHORT).token_ids
    running = add(small, ids(1, 20), SHORT)
    for _ in range(3):
        small.core.step()
    with pytest.raises(BadRequest, match=message):
        small.generate(prompt, SHORT, stream=stream)
    assert len(small.core.scheduler) == 1
    assert small.generate(ids(1, 20), SHORT).token_ids == expected
    assert running.output_ids == expected
    assert_idle(small)


def test_a_prompt_of_one_token_less_than_the_context_gets_one_token(small: LLM) -> None:
    result = small.generate([5] * (CONTEXT - 1), GREEDY)
    assert (result.finish_reason, result.usage.completion_tokens) == ("length", 1)
    assert small.generate([299], SHORT).usage.completion_tokens == 6
    assert_idle(small)


def test_a_prompt_longer_than_the_pool_is_refused_with_the_pools_size(tiny_path: Path) -> None:
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=48)
    for n in (49, 100):
        with pytest.raises(BadRequest, match=f"prompt={n}: .*holds 48; raise --max-total-tokens"):
            llm.generate(ids(1, n), SHORT)
    assert llm.generate(ids(1, 48), replace(SHORT, max_new_tokens=1)).finish_reason == "length"
    assert_idle(llm)


def test_one_bad_prompt_in_a_list_starts_none(small: LLM) -> None:
    small.flush_cache()
    good = ids(1, 20)
    lists: list[tuple[list[Any], Any]] = [
        ([good, [300], good], SHORT),
        ([good, []], SHORT),
        ([good, [5] * CONTEXT], SHORT),
        (["fine", ""], SHORT),
        ([good, good], [SHORT, replace(SHORT, stop_token_ids=[300])]),
    ]
    for stream in (False, True):
        for prompts, params in lists:
            with pytest.raises(BadRequest):
                small.generate(prompts, params, stream=stream)
            assert not small.core.has_work
            assert_idle(small)
    assert small.stats()["tree_evictable_pages"] == 0, "nothing was computed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("top_p", math.nan),
        ("top_p", 1.5),
        ("top_k", 0),
        ("max_new_tokens", 0),
        ("seed", -1),
    ],
)
def test_sampling_values_out_of_range_name_field_and_value(small: LLM, field: str, value: Any) -> None:
    running = add(small, ids(1, 20), SHORT)
    small.core.step()
    with pytest.raises(BadRequest, match=f"^{field}={value}: must be"):
        small.generate(ids(1, 5), SamplingParams(**{field: value}))
    while small.core.has_work:
        small.core.step()
    assert running.num_output == 6
    assert_idle(small)


# An engine that cannot be.


def copied(tiny_path: Path, tmp_path: Path, **changes: Any) -> Path:
    """The tiny model with other values in its `config.json`."""
    path = shutil.copytree(tiny_path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "no-such-model"):
        with pytest.raises(ModelLoadError, match=f"{name}.*smollm2-135m-instruct"):
            LLM(name, device="cpu")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'FooForCausalLM'\]: needs an architecture .*LlamaForCausalLM"):
        make_llm(copied(tiny_path, tmp_path, architectures=["FooForCausalLM"]))


def test_an_unknown_rope_is_refused_with_the_known_ones(tiny_path: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "spiral", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(ModelLoadError, match=r"rope_type='spiral'.*default, linear, dynamic, yarn, llama3, longrope"):
        make_llm(copied(tiny_path, tmp_path, rope_parameters=rope))


def test_weights_that_are_not_there_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    path = copied(tiny_path, tmp_path)
    for file in path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="safetensors"):
        make_llm(path)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "page size": ({"page_size": 24}, r"page_size=24 .*'cpu'.* 1, 16, 32, 64, 128; use --page-size"),
    "unknown device": ({"device": "tpu"}, "'tpu' is unknown; the devices are: .*cpu"),
    "absent device": ({"device": "npu"}, "'npu' was asked for and cannot open: "),
    "dtype": ({"dtype": "float16"}, "dtype=float16 is not supported .*(float32, bfloat16|bfloat16, float32)"),
    "unknown dtype": ({"dtype": "int8"}, "dtype='int8' must be one of auto, float32"),
    "context": ({"context_length": 513}, "context_length=513 is more than the model's 512"),
    "pool": ({"max_total_tokens": 15, "page_size": 16}, "max_total_tokens=15 .*one page of 16; raise"),
    "memory": ({"mem_fraction_static": 1e-9}, "raise --mem-fraction-static"),
    "unknown argument": ({"page_sizes": 16}, "unknown argument page_sizes; did you mean page_size"),
    "twice": ({"page_size": 16, "block_size": 16}, "block_size and another spelling of page_size"),
    "policy": ({"schedule_policy": "random"}, "schedule_policy='random' must be one of fcfs, lpm, priority"),
}


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_engine_that_cannot_be_says_which_number_and_what_to_change(
    tiny_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(tiny_path, **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "bfloat16"])
def test_weights_and_kv_may_differ_in_type(tiny_path: Path, dtype: str, kv_cache_dtype: str) -> None:
    llm = make_llm(tiny_path, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_total_tokens=128)
    expected = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    assert str(llm.core.runner.kv.layers[0].k.dtype) == f"torch.{expected}"
    assert llm.generate(ids(1, 20), SHORT).finish_reason == "length"
    assert llm.generate(ids(1, 20), SHORT).usage.cached_tokens == 16
    assert_idle(llm)


# Numbers and the cache.


def test_stats_count_every_page_by_owner(llm: LLM) -> None:
    empty = llm.stats()
    assert empty["num_pages"] == empty["free_pages"] == 32
    assert empty["page_size"] == 16
    add(llm, ids(1, 40))
    llm.core.step()
    running = llm.stats()
    assert (running["num_running"], running["num_waiting"]) == (1, 0)
    assert (running["tree_protected_pages"], running["request_pages"]) == (2, 1)
    assert running["free_rows"] == running["num_rows"] - 1
    add(llm, ids(2, 40))
    assert llm.stats()["num_waiting"] == 1
    while llm.core.has_work:
        llm.core.launch()
        stats = llm.stats()
        owned = ("free_pages", "pending_pages", "tree_evictable_pages", "tree_protected_pages", "request_pages")
        assert sum(stats[name] for name in owned) == stats["num_pages"]
        llm.core.collect()
    idle = llm.stats()
    assert idle["request_pages"] == idle["tree_protected_pages"] == idle["pending_pages"] == 0
    assert idle["tree_evictable_pages"] == 2 * ((40 + 23) // 16)
    assert_idle(llm)


def test_the_cache_is_flushed_when_idle_and_kept_while_requests_run(llm: LLM) -> None:
    llm.generate(ids(1, 40), SHORT)
    waiting = add(llm, ids(1, 40), SHORT)
    with pytest.raises(BadRequest, match="flush_cache=1"):
        llm.flush_cache()
    llm.core.step()
    with pytest.raises(BadRequest, match="flush_cache=1"):
        llm.flush_cache()
    llm.core.launch()
    with pytest.raises(BadRequest):
        llm.flush_cache()
    llm.core.collect()
    while llm.core.has_work:
        llm.core.step()
    assert waiting.cached_tokens == 32
    llm.flush_cache()
    llm.flush_cache()
    assert llm.stats()["free_pages"] == llm.stats()["num_pages"]
    assert llm.generate(ids(1, 40), SHORT).usage.cached_tokens == 0


# KV events.


class Replay:
    """An outside index that hears of the tree only through its events: hash -> (hash before it, tokens)."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self.num_cleared = 0

    def take(self, llm: LLM) -> None:
        events = llm._parts.events
        assert events is not None
        for event in events.take():
            if isinstance(event, BlockStored):
                before, size = event.parent_block_hash, event.block_size
                assert before in self.pages or before == namespace_hash(event.namespace)
                assert len(event.token_ids) == size * len(event.block_hashes)
                for i, page in enumerate(event.block_hashes):
                    assert page not in self.pages, "stored twice"
                    self.pages[page] = (before, event.token_ids[i * size : (i + 1) * size])
                    before = page
            elif isinstance(event, BlockRemoved):
                for page in event.block_hashes:
                    del self.pages[page]
            else:
                assert isinstance(event, AllBlocksCleared)
                assert self.pages == {}
                self.num_cleared += 1


def pages_of_tree(llm: LLM) -> dict[bytes, tuple[bytes | None, tuple[int, ...]]]:
    found: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
    size = llm.core.allocator.geometry.page_size
    for node in llm.core.allocator.tree.nodes():
        tokens = np.frombuffer(node.raw, dtype="<i4").reshape(-1, size)
        assert node.parent is not None
        before = node.parent.hashes[-1] if node.parent.hashes else None
        for page, spelled in zip(node.hashes, tokens, strict=True):
            found[page] = (before, tuple(spelled.tolist()))
            before = page
    return found


@pytest.mark.parametrize("page_size", [1, 16])
def test_replayed_kv_events_are_the_trees_pages(tiny_path: Path, page_size: int) -> None:
    llm = make_llm(tiny_path, page_size=page_size, max_total_tokens=256, enable_kv_cache_events=True)
    replay = Replay()
    prompts = prompts_with_shared_heads(seed=8, n=10, max_len=150)
    namespaces = [{}, {"extra_key": "x"}, {"cache_salt": "x"}]
    for i, prompt in enumerate(prompts):
        add(llm, prompt, SHORT, **namespaces[i % 3])
    num_removed = 0
    while llm.core.has_work:
        llm.core.step()
        before = len(replay.pages)
        replay.take(llm)
        num_removed += len(replay.pages) < before
        tree = pages_of_tree(llm)
        assert replay.pages.keys() == tree.keys()
        for page, (parent, tokens) in tree.items():
            known_parent, known_tokens = replay.pages[page]
            assert known_tokens == tokens
            assert parent in (None, known_parent)
    assert num_removed, "nothing was evicted"
    assert len(replay.pages) > 5
    llm.flush_cache()
    replay.take(llm)
    assert (replay.pages, replay.num_cleared) == ({}, 1)


def test_equal_pages_in_two_namespaces_have_two_hashes(tiny_path: Path) -> None:
    llm = make_llm(tiny_path, page_size=16, max_total_tokens=128, enable_kv_cache_events=True)
    replay = Replay()
    for namespace in ({}, {"extra_key": "x"}, {"cache_salt": "x"}):
        add(llm, ids(1, 17), SHORT, **namespace)
    while llm.core.has_work:
        llm.core.step()
    replay.take(llm)
    assert len(replay.pages) == 3
    assert len({tokens for _, tokens in replay.pages.values()}) == 1


def test_without_the_flag_there_are_no_events(llm: LLM) -> None:
    run(llm, [ids(1, 40)], SHORT)
    assert llm._parts.events is None
