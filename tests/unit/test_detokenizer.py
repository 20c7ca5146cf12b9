"""Token ids become the same text whatever pieces they come in, and never half a character."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import Kind, fragments, tiny_backend, tiny_hf, tiny_tokenizer
from tokenizers import decoders

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

KINDS: tuple[Kind, ...] = ("byte_level", "sentencepiece")
TOKENIZERS = {kind: tiny_tokenizer(kind) for kind in KINDS}


def _with_decoder(kind: Kind, decoder: Any) -> Tokenizer:
    backend = tiny_backend(kind)
    backend.decoder = decoder
    return Tokenizer(tiny_hf(kind, backend=backend))


def _unusual() -> dict[str, Tokenizer]:
    strip_each = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)])
    return {
        "metaspace": _with_decoder("sentencepiece", decoders.Metaspace()),
        "wordpiece": _with_decoder("sentencepiece", decoders.WordPiece(prefix="he", cleanup=True)),
        "suffix": _with_decoder("sentencepiece", decoders.BPEDecoder(suffix="g")),
        "strip each token": _with_decoder("sentencepiece", strip_each),
        "spaces between": _with_decoder("byte_level", decoders.Metaspace(replacement="t", prepend_scheme="never")),
    }


UNUSUAL = _unusual()
ALL = TOKENIZERS | UNUSUAL


def _pieces(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """`ids` in pieces of the sizes in `cuts` (0 is an empty push), then one by one."""
    start = 0
    for size in cuts:
        yield ids[start : start + size]
        start += size
    for token_id in ids[start:]:
        yield [token_id]


def _stream(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], **options: Any) -> str:
    stream = IncrementalDetokenizer(tokenizer, **options)
    return "".join([stream.push(piece) for piece in _pieces(ids, cuts)]) + stream.flush()


def _library(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> str:
    text: str = tokenizer._backend.decode(list(ids), skip_special_tokens=skip)
    return text


any_ids = st.lists(st.integers(0, 299), max_size=24)
any_cuts = st.lists(st.integers(0, 5), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(text=fragments, cuts=any_cuts)
def test_a_text_survives_encoding_and_any_cut_of_its_tokens(kind: Kind, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed = _stream(tokenizer, ids, cuts, skip_special_tokens=False)
    assert streamed == tokenizer.decode(ids, skip_special_tokens=False) == _library(tokenizer, ids, skip=False)
    if kind == "byte_level":
        assert streamed == text


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=200, deadline=None)
@given(ids=any_ids, cuts=any_cuts, skip=st.booleans())
def test_any_ids_in_any_pieces_join_to_their_decoding(name: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = ALL[name]
    assert _stream(tokenizer, ids, cuts, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=500, deadline=None)
@given(ids=any_ids, skip=st.booleans())
def test_byte_level_decoding_of_any_bytes_is_that_of_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == _library(tokenizer, ids, skip=skip)


@settings(max_examples=500, deadline=None)
@given(ids=any_ids, skip=st.booleans())
def test_sentencepiece_decoding_of_valid_bytes_is_that_of_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    expected = _library(tokenizer, ids, skip=skip)
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_a_finished_sentencepiece_character_outlives_a_broken_one_behind_it() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("한🙂", add_special_tokens=False)[:-1]
    assert tokenizer.decode(ids) == "한\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=fragments)
def test_no_push_shows_a_replacement_that_the_text_does_not_have(kind: Kind, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = text.replace("\ufffd", "")
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert "\ufffd" not in stream.push([token_id])
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_each_character_is_shown_with_its_last_byte(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = IncrementalDetokenizer(tokenizer)
    shown = [stream.push([i]) for i in tokenizer.encode("x🙂한", add_special_tokens=False)]
    assert [piece for piece in shown if piece] == ["x", "🙂", "한"]
    assert shown[-1] == "한"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_cannot_become_a_character_are_shown_at_once_and_unfinished_ones_at_the_end(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    lead = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    letter = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"z")
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([lead]), stream.push([lead]), stream.push([letter]), stream.push([lead])] == [
        "",
        "\ufffd",
        "\ufffdz",
        "",
    ]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_special_token_does_not_break_a_character_apart(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    head, *tail = tokenizer.encode("🙂", add_special_tokens=False)
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert _stream(tokenizer, [head, end, *tail], []) == "🙂"


@pytest.mark.parametrize("name", ALL)
def test_ids_without_an_entry_add_nothing(name: str) -> None:
    tokenizer = ALL[name]
    ids = tokenizer.encode("the inn", add_special_tokens=False)
    strange = [-1, *ids[:1], tokenizer.vocab_size, 2**40, *ids[1:], -(2**70)]
    assert _stream(tokenizer, strange, []) == tokenizer.decode(strange) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(["the", "in", "a", "ing", "on"]), min_size=2, max_size=6), data=st.data())
def test_a_continuation_keeps_the_space_that_a_text_by_itself_loses(name: str, words: list[str], data: Any) -> None:
    tokenizer = ALL[name]
    text = " ".join(words)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:cut], ids[cut:]
    assert tokenizer.decode(prompt) + _stream(tokenizer, answer, [], prompt_ids=prompt) == text


def test_a_decoder_that_needs_the_library_waits_for_the_last_byte_of_a_character_too() -> None:
    late_spaces = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("\u2581", " ")])
    tokenizer = _with_decoder("sentencepiece", late_spaces)
    assert not tokenizer.token_table.concatenates
    ids = tokenizer.encode("the 🙂🙂 한 in", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    shown = [stream.push([token_id]) for token_id in ids]
    assert [piece for piece in shown if piece] == [" the", " ", "🙂", "🙂", " ", "한", " in"]


def test_only_special_tokens_in_front_leave_a_text_to_stand_for_itself() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    (bos,), ids = tokenizer.encode(""), tokenizer.encode("the", add_special_tokens=False)
    assert _stream(tokenizer, ids, [], prompt_ids=[bos]) == "the"
    assert _stream(tokenizer, ids, [], prompt_ids=[bos, *ids]) == " the"


DECODERS: list[tuple[Callable[[], Any], bool]] = [
    (decoders.ByteLevel, True),
    (lambda: decoders.Sequence([decoders.ByteLevel()]), True),
    (lambda: decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]), True),
    (lambda: decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]), True),
    (lambda: decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), False),
    (lambda: decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]), False),
    (lambda: decoders.Sequence([decoders.Fuse(), decoders.Replace("\u2581", " ")]), False),
    (decoders.Fuse, False),
    (decoders.WordPiece, False),
]


@pytest.mark.parametrize(("decoder", "known"), DECODERS)
def test_a_decoder_is_read_by_bytes_only_when_bytes_are_all_it_does(decoder: Callable[[], Any], known: bool) -> None:
    assert _with_decoder("sentencepiece", decoder()).token_table.concatenates is known


def test_a_byte_token_is_plain_text_where_the_decoder_has_no_byte_fallback() -> None:
    plain = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer = _with_decoder("sentencepiece", plain)
    ids = tokenizer.encode("9", add_special_tokens=False)
    assert tokenizer.decode(ids) == _library(tokenizer, ids) == " <0x39>"


def test_a_tokenizer_without_a_decoder_joins_its_tokens_with_spaces() -> None:
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert _stream(tokenizer, [0, 1, 0], [1, 1]) == tokenizer.decode([0, 1, 0]) == "a b a"


def test_text_modules_load_neither_torch_nor_transformers() -> None:
    names = (
        "engine.text.detokenizer, engine.text.stops, engine.text.stream, engine.text.template, engine.text.tokenizer"
    )
    code = (
        f"import sys, {names}; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
