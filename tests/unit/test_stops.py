"""Stop strings end a text at the same character whatever pieces it comes in, and hide nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import Kind, fragments, tiny_tokenizer

from engine.errors import BadRequest
from engine.text.stops import StopStrings, validate_stop_strings
from engine.text.stream import TextStream

TOKENIZERS = {kind: tiny_tokenizer(kind) for kind in ("byte_level", "sentencepiece")}


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string completed first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return end, max(completed, key=len)
    return None


def _cut(text: str, stops: Sequence[str], *, include: bool) -> str:
    found = _first_stop(text, stops)
    if found is None:
        return text
    end, stop = found
    return text[: end if include else end - len(stop)]


def _held(text: str, stops: Sequence[str]) -> str:
    """The longest suffix that is a proper prefix of a stop string."""
    suffixes = (text[start:] for start in range(len(text) + 1))
    return next(suffix for suffix in suffixes if any(s.startswith(suffix) and s != suffix for s in stops))


def _stream(pieces: Sequence[str], stops: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(tuple(stops), include_stop=include)
    text = "".join([matcher.feed(piece) for piece in pieces])
    return text + matcher.finish(), matcher.matched


few_letters = st.text("ab\n", max_size=24)
few_stops = st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(text=few_letters, stops=few_stops, include=st.booleans(), cuts=st.sets(st.integers(0, 24)))
def test_any_pieces_join_to_the_text_cut_at_its_first_stop(
    text: str, stops: list[str], include: bool, cuts: set[int]
) -> None:
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
    found = _first_stop(text, stops)
    assert _stream(pieces, stops, include=include) == (_cut(text, stops, include=include), found and found[1])


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.text("ab\n", max_size=5), max_size=8), stops=few_stops)
def test_what_is_held_is_the_longest_suffix_that_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher, text, shown = StopStrings(tuple(stops)), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            assert matcher.held == ""
            return
        assert matcher.held == _held(text, stops)
        assert shown + matcher.held == text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", [["\nUser:"], ["c\n", "\nU"], ["abc"], ["a"], ["aab", "ab"], ["User: x"], ["zzz"]])
def test_a_stop_split_at_every_pair_of_points_never_leaks(stops: list[str], include: bool) -> None:
    text = "abc\nUser: x"
    expected = _cut(text, stops, include=include)
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert _stream(pieces, stops, include=include)[0] == expected


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["aab", "ab"], "xaab", "x", "aab"),  # completed together: the longest
        (["ab", "abc"], "abc", "", "ab"),  # completed first
        (["b", "abc"], "abc", "a", "b"),
        (["own fox"], "brown fox", "br", "own fox"),
        (["aaab"], "aaaaab", "aa", "aaab"),
    ],
)
def test_the_stop_completed_first_wins_then_the_longest(stops: list[str], text: str, shown: str, matched: str) -> None:
    assert _stream([text], stops) == (shown, matched)
    assert _stream(list(text), stops) == (shown, matched)


def test_held_text_is_given_back_when_the_request_ends_otherwise() -> None:
    matcher = StopStrings(("\n<|end|>",))
    assert [matcher.feed("a\nb"), matcher.feed("\n"), matcher.feed("<|end"), matcher.held] == [
        "a\nb",
        "",
        "",
        "\n<|end",
    ]
    assert [matcher.finish(), matcher.finish(), matcher.matched] == ["\n<|end", "", None]


def test_text_behind_a_match_is_dropped_for_good() -> None:
    matcher = StopStrings(("!",))
    assert [matcher.feed("hi! there"), matcher.feed(" more!"), matcher.finish()] == ["hi", "", ""]


def test_a_stop_string_written_once_is_one_string() -> None:
    assert validate_stop_strings("END") == ("END",)
    assert validate_stop_strings(["a", "b" * 1024]) == ("a", "b" * 1024)
    assert validate_stop_strings(["s"] * 32) == ("s",) * 32
    assert validate_stop_strings(None) == validate_stop_strings([]) == ()


@pytest.mark.parametrize("stops", ["", ["a", ""], ["x" * 1025], ["x"] * 33, 7, [7], [None], {"a": 1}, b"a", "\ud83d"])
def test_a_stop_that_cannot_be_matched_is_refused(stops: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        validate_stop_strings(stops)
    assert refusal.value.field == "stop"


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(
    text=fragments,
    stop=st.text("the in1\n🙂한", min_size=1, max_size=3),
    include=st.booleans(),
    sizes=st.lists(st.integers(1, 4), max_size=10),
)
def test_tokens_in_any_blocks_show_the_same_text_and_stop_at_the_same_token(
    kind: Kind, text: str, stop: str, include: bool, sizes: list[int]
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = _cut(tokenizer.decode(ids), [stop], include=include)

    def run(sizes: Sequence[int]) -> tuple[str, str | None, int | None]:
        stream = TextStream(tokenizer, (stop,), include_stop=include)
        deltas, start = [], 0
        for size in sizes:
            deltas.append(stream.push(ids[start : start + size]))
            if stream.matched_at is not None:
                break
            start += size
        deltas.append(stream.finish())
        assert "".join(deltas) == stream.text == expected
        return stream.text, stream.matched, None if stream.matched_at is None else start + stream.matched_at

    one_by_one = run([1] * len(ids))
    assert run([*sizes, len(ids)]) == run([len(ids)]) == one_by_one
    kept = one_by_one[2]
    if kept is not None:
        assert stop in tokenizer.decode(ids[: kept + 1])
        assert stop not in tokenizer.decode(ids[:kept])


def test_a_match_inside_a_block_names_its_token_and_silences_the_rest() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ("b",))
    ids = [tokenizer.encode(letter)[0] for letter in "aabab"]
    assert (stream.push(ids[:1]), stream.matched, stream.matched_at) == ("a", None, None)
    assert (stream.push(ids[1:]), stream.matched, stream.matched_at) == ("a", "b", 1)
    assert (stream.push(ids), stream.finish(), stream.matched_at, stream.text) == ("", "", 1, "aa")


def test_without_stops_a_stream_shows_all_and_flushes_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("in 🙂")
    assert (stream.push(ids[:-1]), stream.finish(), stream.text) == ("in ", "\ufffd", "in \ufffd")
    assert (stream.matched, stream.matched_at) == (None, None)


def test_held_text_comes_out_at_the_end_and_half_a_character_behind_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("in🙂")
    stream = TextStream(tokenizer, ("in🙂",))
    assert (stream.push(ids[:1]), stream.finish(), stream.text) == ("", "in", "in")
    stream = TextStream(tokenizer, ("in🙂",))
    assert (stream.push(ids[:-1]), stream.finish(), stream.text) == ("", "in\ufffd", "in\ufffd")


def test_a_stop_that_the_flush_completes_cuts_the_text_but_no_token() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(tokenizer, ("n\ufffd",))
    assert (stream.push(tokenizer.encode("in🙂")[:-1]), stream.finish()) == ("i", "")
    assert (stream.matched, stream.matched_at) == ("n\ufffd", None)
