"""Tiny tokenizers, complete enough to write any text, for tests that need one without a model's files.

    byte_level      300 ids: 3 special, the 256 bytes, 41 merges (some end inside a character); adds no BOS
    sentencepiece   301 ids: 5 special, 256 byte tokens, 40 pieces with the dummy prefix; adds `<s>`

Both carry a ChatML template. `tiny_tokenizer` gives the engine's object, `save_tiny_tokenizer` writes the files of a
Hugging Face directory, `fragments` draws text that is hard on tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hypothesis import strategies as st

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    from engine.text.tokenizer import Tokenizer

Kind = Literal["byte_level", "sentencepiece"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS: dict[Kind, dict[str, str]] = {
    "byte_level": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}

_CONTROL_TOKENS: dict[Kind, list[str]] = {
    "byte_level": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "sentencepiece": ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
}

# Words first, then bytes: a whole character (é), and beginnings of CJK, Hangul and emoji.
_BYTE_LEVEL_MERGES = [
    *("Ġ t", "h e", "Ġt he", "Ġ a", "i n", "r e", "o n", "e r", "Ġ s", "a t", "n d", "Ġ w", "o u", "i s", "e n"),
    *("Ġ c", "o r", "Ġ f", "in g", "Ġa nd", "Ġ o", "i t", "e s", "Ġo f", "l l", "Ġ b", "a l", "Ġ in", "s t", "Ġ Ġ"),
    *("1 2", "12 3", "Ċ Ċ", "' s", "Ã ©", "ä ½", "ä½ ł", "í ķ", "ê µ", "ð Ł", "â Ģ"),
]
_SENTENCEPIECE_PIECES = [*"\u2581abcdefghijklmnopqrstuvwxyz.é你", "\u2581t", "he", "\u2581the", "in", "ing"]
_SENTENCEPIECE_PIECES += ["\u2581a", "er", "on", "\u2581in", "\u2581\u2581"]
_SENTENCEPIECE_MERGES = [
    *("\u2581 t", "h e", "\u2581t he", "i n", "in g", "\u2581 a", "e r", "o n", "\u2581 in", "\u2581 \u2581"),
]

_FRAGMENTS = [" ", "  ", "\n", "the ", " and", "123", "\u2581", "<0x41>", "é", "e\u0301", "你好", "한국어", "한"]
_FRAGMENTS += ["🙂", "👩\u200d👩\u200d👧", "\ufffd", "\x00", "\u00a0", "<|im_end|>", "ffi", "\U0010ffff"]
fragments: st.SearchStrategy[str] = st.lists(
    st.sampled_from(_FRAGMENTS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=12
).map("".join)
"""Text over ASCII, CJK, Hangul, emoji, joiners, combining marks and whatever else Unicode has."""


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the others follow in order from U+0100."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter([char for char in alphabet if ord(char) >= 0x100])
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]


def tiny_backend(kind: Kind) -> Backend:
    """The `tokenizers` object; changing it changes no other."""
    return _byte_level() if kind == "byte_level" else _sentencepiece()


def tiny_hf(
    kind: Kind, *, backend: Backend | None = None, chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """The `transformers` object, of `backend` where one is given."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend or tiny_backend(kind), chat_template=chat_template, **SPECIAL_TOKENS[kind]
    )


def tiny_tokenizer(kind: Kind) -> Tokenizer:
    """The engine's object."""
    from engine.text.tokenizer import Tokenizer

    return Tokenizer(tiny_hf(kind))


def save_tiny_tokenizer(path: Path, kind: Kind) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_backend(kind).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, **SPECIAL_TOKENS[kind]}
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _byte_level() -> Backend:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    merges = [(left, right) for left, right in (merge.split() for merge in _BYTE_LEVEL_MERGES)]
    tokens = [*_CONTROL_TOKENS["byte_level"], *byte_alphabet(), *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens(_CONTROL_TOKENS["byte_level"])
    return backend


def _sentencepiece() -> Backend:
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    merges = [(left, right) for left, right in (merge.split(" ") for merge in _SENTENCEPIECE_MERGES)]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*_CONTROL_TOKENS["sentencepiece"], *byte_tokens, *_SENTENCEPIECE_PIECES]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    backend.add_special_tokens(_CONTROL_TOKENS["sentencepiece"])
    return backend
