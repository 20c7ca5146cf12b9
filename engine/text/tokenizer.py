"""`Tokenizer`: the one object that maps text to token ids and back.

It is made from a model directory (`tokenizer.json` and friends, through `transformers`) or from the key/values of a
GGUF file. Underneath is always a `tokenizers` tokenizer, which encodes; decoding is `detokenizer.py`, the chat template
is `template.py`. The tokenizer decides about BOS in a raw prompt, the template in a chat; nobody else adds one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError
from engine.text.detokenizer import IncrementalDetokenizer, TokenTable
from engine.text.template import ChatTemplate, require_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


class Tokenizer:
    """Text to ids and back for one model; immutable, shared by all requests.

    Attributes:
        token_table: bytes of each token.
        vocab_size: largest id + 1. Ids may have holes, and the model's vocabulary may be padded beyond it.
        bos_token_id: None when the tokenizer has none.
        special_ids: control tokens, left out of text by default.
    """

    def __init__(self, hf: PreTrainedTokenizerFast) -> None:
        self._backend: Backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat = ChatTemplate(hf)
        self._eos_token_id: int | None = hf.eos_token_id
        self._warned_of_doubled_bos = False
        self.token_table = TokenTable.from_backend(self._backend)
        self.vocab_size = max(self.token_table.bytes_of, default=-1) + 1
        self.bos_token_id: int | None = hf.bos_token_id
        self.special_ids = frozenset(i for i, token in hf.added_tokens_decoder.items() if token.special)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face model directory; nothing is fetched and no code of the model is run.

        A `tokenizer.json` is taken at its word; `AutoTokenizer`, which may put another pre-tokenizer in its place
        because of the model's type, only converts what is stored in other forms (SentencePiece, tiktoken).

        Raises:
            ModelLoadError: no directory, no tokenizer in it, or none that `tokenizers` can run.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if not path.is_dir():
            raise ModelLoadError(f"{path} is not a directory; give one that holds a tokenizer.json")
        loader = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
        try:
            hf = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # many kinds, depending on which file is missing or damaged
            raise ModelLoadError(f"{path}: its tokenizer cannot be loaded: {error}") from error
        if not hf.is_fast:
            raise ModelLoadError(f"{path}: {type(hf).__name__} has no fast form; add a tokenizer.json to the directory")
        return cls(hf)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's `tokenizer.*` key/values describe.

        Raises:
            ModelLoadError: keys missing or in conflict, or a kind of tokenizer other than "gpt2" and "llama".
        """
        from transformers import PreTrainedTokenizerFast

        vocabulary = _GgufVocabulary.read(metadata)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        specials = {name: vocabulary.special(key) for name, key in names.items()}
        hf = PreTrainedTokenizerFast(
            tokenizer_object=_gguf_backend(vocabulary),
            chat_template=metadata.get("tokenizer.chat_template"),
            **{name: token for name, token in specials.items() if token is not None},
        )
        return cls(hf)

    @property
    def template_source(self) -> str:
        """The chat template's program; empty when there is none."""
        return self._chat.source

    @cached_property
    def template_takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return re.search(r"\btools\b", self.template_source) is not None

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """What `special_ids` stand for."""
        return frozenset(self.token_bytes(i).decode(errors="replace") for i in self.special_ids)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens by which the model ends: its EOS, and the token its chat template ends a turn with."""
        ends = set() if self._eos_token_id is None else {self._eos_token_id}
        after_reply = self.encode(self._chat.text_after_reply().lstrip(), add_special_tokens=False)
        ends.update(self.special_ids.intersection(after_reply[:1]))
        return frozenset(ends)

    def encode(self, text: str, *, add_special_tokens: bool = True, without_gil: bool = False) -> list[int]:
        """Ids of a raw prompt; special tokens written out in it are recognised.

        Args:
            text: any valid Unicode.
            add_special_tokens: let the tokenizer add what it adds to a raw prompt (BOS).
            without_gil: for a thread beside others of Python; the library holds the GIL over a single text otherwise.
        Raises:
            BadRequest: of field "prompt": not a string, or one with lone surrogates.
        """
        require_text("prompt", text)
        if without_gil:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if ids[:2] == [self.bos_token_id] * 2 and not self._warned_of_doubled_bos:
            self._warned_of_doubled_bos = True
            logger.warning(
                "a prompt begins with two BOS tokens: the tokenizer adds one, do not write it in the text as well"
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` by themselves; ids that the vocabulary lacks add nothing, invalid bytes are U+FFFD."""
        if self.token_table.concatenates:
            stream = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
            return stream.push(ids) + stream.flush()
        known = [i for i in ids if i in self.token_table.bytes_of]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a running text; empty for an id that the vocabulary lacks."""
        return self.token_table.bytes_of.get(token_id, b"")

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Ids of a conversation as the model's chat template writes it; see `ChatTemplate.render`."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def chat_text(self, messages: Any, *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the template writes it; see `ChatTemplate.render`."""
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


_GGUF_NORMAL, _GGUF_CONTROL, _GGUF_USER_DEFINED = 1, 3, 4

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True)
class _BytePairStyle:
    """What a `tokenizer.ggml.pre` stands for, as in the `tokenizer.json` of the models that carry it."""

    split: str | None = None  # None: GPT-2's own pattern
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a piece that is a token is taken as it is, whatever the merges say
    adds_bos: bool = False


_STYLES = {
    "default": _BytePairStyle(),
    "gpt-2": _BytePairStyle(),
    "smollm": _BytePairStyle(single_digits=True),
    "llama-bpe": _BytePairStyle(split=_LLAMA3_SPLIT, whole_words_first=True, adds_bos=True),
    "qwen2": _BytePairStyle(split=_QWEN2_SPLIT, nfc=True),
}


@dataclass(frozen=True)
class _GgufVocabulary:
    """The `tokenizer.ggml.*` values of a GGUF file."""

    values: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _GgufVocabulary:
        prefix = "tokenizer.ggml."
        values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        tokens = list(values.get("tokens", ()))
        if not tokens:
            raise ModelLoadError(
                "the GGUF file has no tokenizer.ggml.tokens; convert the model again with its tokenizer"
            )
        types = [int(kind) for kind in values.get("token_type", [_GGUF_NORMAL] * len(tokens))]
        if len(types) != len(tokens):
            raise ModelLoadError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
        return cls(values, tokens, types)

    def special(self, key: str) -> str | None:
        """Text of the token that `<key>_token_id` names."""
        token_id = self.values.get(f"{key}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelLoadError(f"tokenizer.ggml.{key}_token_id={token_id} is not one of {len(self.tokens)} tokens")
        return self.tokens[int(token_id)]

    @property
    def style(self) -> _BytePairStyle:
        pre = str(self.values.get("pre"))
        if pre not in _STYLES:
            logger.warning("tokenizer.ggml.pre=%r is not known: text is split as GPT-2 does, ids may differ", pre)
        return _STYLES.get(pre, _BytePairStyle())

    def merges(self) -> list[tuple[str, str]]:
        """The merges in the file, or those that SentencePiece's scores imply, best first."""
        if "merges" in self.values:
            return [tuple(merge.split(" ", 1)) for merge in self.values["merges"]]
        if len(self.values.get("scores", ())) != len(self.tokens):
            raise ModelLoadError(
                f"the GGUF file has neither tokenizer.ggml.merges nor scores for its {len(self.tokens)} tokens"
            )
        normal = {
            token: (-self.values["scores"][index], index)
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == _GGUF_NORMAL
        }
        ranked = [
            (rank, token[:cut], token[cut:])
            for token, rank in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        return [(left, right) for _, left, right in sorted(ranked)]


def _gguf_backend(vocabulary: _GgufVocabulary) -> Backend:
    from tokenizers import AddedToken, processors

    builders = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}
    model = vocabulary.values.get("model")
    if model not in builders:
        raise ModelLoadError(
            f"tokenizer.ggml.model={model!r} is not supported ({', '.join(builders)} are); "
            "use the model's directory with its tokenizer.json"
        )
    try:
        backend, adds_bos = builders[model](vocabulary)
    except ModelLoadError:
        raise
    except Exception as error:  # what the library says of merges whose tokens are missing
        raise ModelLoadError(f"the GGUF file's tokenizer is inconsistent: {error}") from error
    for kind, special in ((_GGUF_CONTROL, True), (_GGUF_USER_DEFINED, False)):
        texts = [token for token, its_kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if its_kind == kind]
        backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts])

    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    before = [bos] if bos is not None and vocabulary.values.get("add_bos_token", adds_bos) else []
    after = [eos] if eos is not None and vocabulary.values.get("add_eos_token", False) else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
    )
    return backend


def _byte_level_backend(vocabulary: _GgufVocabulary) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether it adds BOS when the file does not say."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    style = vocabulary.style
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = models.BPE(vocab=ids, merges=vocabulary.merges(), ignore_merges=style.whole_words_first)
    backend = tokenizers.Tokenizer(model)
    if style.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if style.single_digits else []
    if style.split is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(style.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, style.adds_bos


def _sentencepiece_backend(vocabulary: _GgufVocabulary) -> tuple[Backend, bool]:
    """SentencePiece BPE with bytes for characters it lacks; it adds BOS when the file does not say."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    prefixed = bool(vocabulary.values.get("add_space_prefix", True))
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = models.BPE(
        vocab=ids,
        merges=vocabulary.merges(),
        unk_token=vocabulary.special("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    marks = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *marks] if prefixed else marks)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend, True
