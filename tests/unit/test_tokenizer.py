"""Text to ids and back: directories, GGUF files, special tokens, ids the vocabulary lacks, text that is none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from tiny_tokenizers import (
    CHATML,
    SPECIAL_TOKENS,
    Kind,
    byte_alphabet,
    fragments,
    save_tiny_tokenizer,
    tiny_backend,
    tiny_hf,
    tiny_tokenizer,
)

from engine.errors import BadRequest, ModelLoadError
from engine.text.tokenizer import Tokenizer

KINDS: tuple[Kind, ...] = ("byte_level", "sentencepiece")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def _gguf(**changes: Any) -> dict[str, Any]:
    """Key/values of a byte-level GGUF vocabulary: 2 control tokens, one user-defined, 256 bytes, digits that merge."""
    tokens = ["<bos>", "<eos>", "<think now>", *byte_alphabet(), "12", "123", "1234", "Ġx"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(tokens) - 3)],
        "merges": ["1 2", "12 3", "123 4", "Ġ x"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {"general.name": "x"} | {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def _pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_gil_the_ids_are_the_same(kind: Kind) -> None:
    tokenizer = tiny_tokenizer(kind)
    for text in ("", "the thing 123, 你好 <|im_end|>", " 🎉\n" * 50):
        for adds in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=adds)
            assert tokenizer.encode(text, add_special_tokens=adds, without_gil=True) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_gives_the_tokenizer_that_was_saved(kind: Kind, tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path, kind)
    loaded, expected = Tokenizer.from_directory(tmp_path), tiny_tokenizer(kind)
    text = "the thing 123, 你好 <|im_end|>"
    assert loaded.encode(text) == expected.encode(text)
    assert loaded.token_table == expected.token_table
    assert (loaded.vocab_size, loaded.bos_token_id) == (expected.vocab_size, expected.bos_token_id)
    assert (loaded.special_ids, loaded.eos_token_ids) == (expected.special_ids, expected.eos_token_ids)
    turns = [{"role": "user", "content": "hi"}]
    assert loaded.render_chat(turns) == expected.render_chat(turns)


def test_tokenizer_json_decides_how_text_is_split_not_the_type_of_the_model(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path, "byte_level")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert Tokenizer.from_directory(tmp_path).encode(" 123") == tiny_tokenizer("byte_level").encode(" 123")


@pytest.mark.parametrize(("content", "named"), [(None, "tokenizer"), ("{", "tokenizer"), ('{"model": 3}', "tokenizer")])
def test_a_directory_without_a_sound_tokenizer_is_a_load_error(content: str | None, named: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"(?s){tmp_path}.*{named}"):
        Tokenizer.from_directory(tmp_path)


def test_a_path_that_is_no_directory_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="not a directory"):
        Tokenizer.from_directory(tmp_path / "absent")


def test_vocab_size_covers_holes_and_an_id_in_a_hole_has_no_bytes() -> None:
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: 2 * i for i, token in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.vocab_size == 511
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2, 510, 511, -1, 2**40)] == [
        b"\x00", b"", b"\x01", b"\xff", b"", b"", b""
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (None, set(), set())


def test_token_bytes_are_what_a_token_adds_to_a_running_text() -> None:
    byte_level, sentencepiece = tiny_tokenizer("byte_level"), tiny_tokenizer("sentencepiece")
    assert _pieces(byte_level, " the é🙂<|im_end|>") == [
        b" the", b" ", b"\xc3\xa9", b"\xf0\x9f", b"\x99", b"\x82", b"<|im_end|>"
    ]  # fmt: skip
    assert _pieces(sentencepiece, "the\té你 <|im_end|>") == [
        b"<s>", b" the", b"\t", "é".encode(), "你".encode(), b" ", b"<|im_end|>"
    ]  # fmt: skip


def test_the_turn_end_of_the_template_is_an_end_beside_the_eos_of_the_tokenizer() -> None:
    tokenizer = tiny_tokenizer("sentencepiece")
    texts = {tokenizer.token_bytes(i) for i in tokenizer.eos_token_ids}
    assert texts == {b"</s>", b"<|im_end|>"}


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, {b"</s>", b"<|im_end|>"}),
        (None, {b"</s>"}),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", {b"</s>"}),
        ("{% for m in messages %}{{ m.content }} </s>{% endfor %}", {b"</s>"}),
        ("{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}", {b"</s>", b"<|im_end|>"}),
        ("{% for m in messages %}{{ m.content }}bye<|im_end|>{% endfor %}", {b"</s>"}),
        ("{{ raise_exception('one turn only') }}", {b"</s>"}),
    ],
)
def test_only_a_special_token_right_behind_the_reply_ends_a_turn(template: str | None, ends: set[bytes]) -> None:
    tokenizer = Tokenizer(tiny_hf("sentencepiece", chat_template=template))
    assert {tokenizer.token_bytes(i) for i in tokenizer.eos_token_ids} == ends


@pytest.mark.parametrize("text", [7, None, b"bytes", ["a"], "\ud83d", "ok \udc00 ok"])
def test_a_prompt_that_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        tiny_tokenizer("byte_level").encode(text)
    assert refusal.value.field == "prompt"


@pytest.mark.parametrize("text", ["", "\x00", "\ufeff", "a" * 20_000])
def test_any_valid_unicode_is_a_prompt(text: str) -> None:
    tokenizer = tiny_tokenizer("byte_level")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_limits_saved_with_a_tokenizer_do_not_cut_or_pad_prompts() -> None:
    backend = tiny_backend("byte_level")
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(Tokenizer(tiny_hf("byte_level", backend=backend)).encode("zzzzzz")) == 6


@pytest.mark.parametrize(("kind", "num_bos"), [("byte_level", 0), ("sentencepiece", 1)])
def test_the_tokenizer_decides_about_bos_in_a_raw_prompt(kind: Kind, num_bos: int) -> None:
    tokenizer = tiny_tokenizer(kind)
    assert tokenizer.encode("the").count(tokenizer.bos_token_id) == num_bos
    assert tokenizer.encode("the", add_special_tokens=False).count(tokenizer.bos_token_id) == 0


def test_a_doubled_bos_stays_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer("sentencepiece")
    with caplog.at_level(logging.WARNING, "engine.text.tokenizer"):
        tokenizer.encode("the")
        tokenizer.encode("<s> the", add_special_tokens=False)
        assert not caplog.records
        first, second = tokenizer.encode("<s> the"), tokenizer.encode("<s> the")
    assert first == second
    assert first[:2] == [tokenizer.bos_token_id] * 2
    assert ["BOS" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [b"1234", b" x"]),
        ("default", [b"1234", b" x"]),
        ("smollm", [b"1", b"2", b"3", b"4", b" x"]),
        ("qwen2", [b"1", b"2", b"3", b"4", b" x"]),
        ("llama-bpe", [b"<bos>", b"123", b"4", b" x"]),
    ],
)
def test_a_gguf_file_splits_text_as_its_pre_tokenizer_says(
    pre: str, pieces: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert _pieces(Tokenizer.from_gguf(_gguf(pre=pre)), "1234 x") == pieces
    assert not caplog.records


@pytest.mark.parametrize("pre", ["some-new-one", None])
def test_an_unknown_pre_tokenizer_is_named_and_text_is_split_as_gpt2_does(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert _pieces(Tokenizer.from_gguf(_gguf(pre=pre)), "1234 x") == [b"1234", b" x"]
    assert [str(pre) in record.message for record in caplog.records] == [True]


def test_qwen2_composes_characters_before_it_looks_them_up() -> None:
    assert _pieces(Tokenizer.from_gguf(_gguf(pre="qwen2")), "e\u0301") == [b"\xc3", b"\xa9"]
    assert _pieces(Tokenizer.from_gguf(_gguf(pre="gpt-2")), "e\u0301") == [b"e", b"\xcc", b"\x81"]


def test_llama_bpe_takes_a_whole_word_whatever_the_merges_say() -> None:
    without_last_merge = ["1 2", "Ġ x"]
    assert _pieces(Tokenizer.from_gguf(_gguf(pre="llama-bpe", merges=without_last_merge)), "123")[1:] == [b"123"]
    assert _pieces(Tokenizer.from_gguf(_gguf(pre="gpt-2", merges=without_last_merge)), "123") == [b"12", b"3"]


def test_control_tokens_of_a_gguf_file_are_special_and_user_defined_ones_are_only_whole() -> None:
    tokenizer = Tokenizer.from_gguf(_gguf())
    ids = tokenizer.encode("<think now>x<eos>")
    assert (ids[0], ids[-1], tokenizer.special_ids) == (2, 1, {0, 1})
    assert tokenizer.decode(ids) == "<think now>x"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (0, {1}, 263)


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"add_bos_token": True, "bos_token_id": None}, []),
        ({"pre": "llama-bpe"}, [0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_a_gguf_file_decides_which_tokens_surround_a_raw_prompt(flags: dict[str, Any], ids: list[int]) -> None:
    assert Tokenizer.from_gguf(_gguf(**flags)).encode("") == ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "bert"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokens"),
        ({"token_type": [NORMAL]}, "263 tokens but 1 token types"),
        ({"merges": None}, "merges"),
        ({"merges": ["never seen"]}, "inconsistent"),
        ({"eos_token_id": 263}, "eos_token_id=263"),
        ({"bos_token_id": -1}, "bos_token_id=-1"),
    ],
)
def test_a_gguf_file_with_an_unsound_tokenizer_is_a_load_error(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        Tokenizer.from_gguf(_gguf(**changes))


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A SentencePiece model trained on the spot, and the engine's tokenizer of the same model written as GGUF."""
    spm = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("spm")
    words = "the thing in the rain is on the other end of the long string, and the king sings: a new song 2024 été 你好"
    (directory / "corpus.txt").write_text("\n".join([words, words.title(), words[::-1]] * 20), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / "m"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    model = spm.SentencePieceProcessor(model_file=str(directory / "m.model"))
    ids = range(model.get_piece_size())
    kinds = [(model.is_unknown, UNKNOWN), (model.is_control, CONTROL), (model.is_byte, BYTE)]
    types = [next((kind for is_kind, kind in kinds if is_kind(i)), NORMAL) for i in ids]
    types[model.piece_to_id("<think>")] = USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(["unknown", "bos", "eos"])},
    }
    return model, Tokenizer.from_gguf(metadata)


@settings(max_examples=300, deadline=None)
@given(text=fragments)
def test_a_sentencepiece_gguf_encodes_as_sentencepiece_does(sentencepiece_pair: Any, text: str) -> None:
    model, tokenizer = sentencepiece_pair
    text = f"the {text}".replace("\x00", "").replace("<|im_end|>", "")
    expected = [tokenizer.bos_token_id, *model.encode(text)]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == model.decode(expected) == text.replace("\u2581", " ")


def test_a_sentencepiece_gguf_keeps_its_special_tokens(sentencepiece_pair: Any) -> None:
    model, tokenizer = sentencepiece_pair
    end, think = model.piece_to_id("<|im_end|>"), model.piece_to_id("<think>")
    assert tokenizer.special_ids == {0, 1, 2, end}
    assert tokenizer.encode("<think><|im_end|>")[1:] == [think, end]
    assert tokenizer.decode([think, end]) == "<think>"


def test_pieces_of_a_sentencepiece_gguf_merge_only_into_normal_tokens() -> None:
    unused = 5
    metadata = _gguf(
        model="llama",
        merges=None,
        tokens=["<unk>", "\u2581", "a", "b", "c", "ab", "bc"],
        token_type=[UNKNOWN, NORMAL, NORMAL, NORMAL, NORMAL, unused, NORMAL],
        scores=[0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0],
        bos_token_id=None,
        eos_token_id=None,
        unknown_token_id=0,
    )
    assert _pieces(Tokenizer.from_gguf(metadata), "abc") == [b" ", b"a", b"bc"]


def test_scores_must_cover_all_tokens_of_a_sentencepiece_gguf() -> None:
    with pytest.raises(ModelLoadError, match="scores"):
        Tokenizer.from_gguf(_gguf(model="llama", merges=None, scores=[0.0]))


SMOLLM2_LACKS = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")
"""Bytes of valid text without a token in its vocabulary: rare control characters and planes 4 to 11 are dropped."""


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    files = sorted((Path.home() / ".cache/rung/models").rglob("SmolLM2-135M-Instruct*.gguf"))
    if not files:
        pytest.skip("the default model is not there (scripts/test fetches it)")
    from engine.weights.gguf import GgufSource

    return Tokenizer.from_gguf(GgufSource(files[0]).metadata)


@pytest.mark.smollm2
def test_smollm2_writes_digits_one_by_one_and_reads_back_what_it_wrote(smollm2: Tokenizer) -> None:
    text = "It costs 12345 é 你好🙂👩\u200d👩\u200d👧 한국어\n\n  def f(x):\treturn x**2"
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert _pieces(smollm2, " 12345") == [b" ", b"1", b"2", b"3", b"4", b"5"]
    assert _pieces(smollm2, "The capital of France") == [b"The", b" capital", b" of", b" France"]


@pytest.mark.smollm2
@settings(max_examples=200, deadline=None)
@given(text=fragments)
def test_smollm2_reads_back_any_text_that_its_bytes_can_write(smollm2: Tokenizer, text: str) -> None:
    text = "".join(char for char in text if not SMOLLM2_LACKS.intersection(char.encode()))
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.mark.smollm2
def test_smollm2_knows_its_special_tokens_and_its_turns(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, {2})
    assert smollm2.special_ids == set(range(17))
    chat = smollm2.render_chat([{"role": "user", "content": "hi"}])
    assert smollm2.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.count(1) == 3


def test_special_tokens_of_the_tiny_tokenizers_are_those_they_claim() -> None:
    for kind in KINDS:
        tokenizer = tiny_tokenizer(kind)
        texts = {tokenizer.token_bytes(i).decode() for i in tokenizer.special_ids}
        assert texts >= set(SPECIAL_TOKENS[kind].values())
