"""A process that compiles grammars: strangers' input through a recursive compiler, so it may hang or crash alone.

It is run as a file, by `grammar_compiler`, and imports nothing of the engine. Messages on standard input and output are
msgpack behind their length, 4 bytes: first a `Vocabulary`, then `[kind, text]` for each grammar, answered by
`[compiled grammar, ""]` or `[None, reason]`. It ends with its input, in the middle of a compilation too.
"""

from __future__ import annotations

import os
import queue
import re
import resource
import sys
import tempfile
import threading
from typing import IO, Any

import msgspec

MEMORY_BYTES = 2 << 30
"""What compiling may take beside the libraries."""

MAX_WHITESPACE = 16
"""Between two parts of a JSON text: enough for an indented one, and an end to a model that writes only spaces."""

_LOOSE, _STRICT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""Characters of a string of limited length: the library (0.2) lets control characters in, which JSON forbids."""

_WHERE = re.compile(r"^\[[\d:]+\] \S+?:\d+: |Warning: ", re.MULTILINE)
"""Time and source line, in front of the library's messages."""


def write(pipe: IO[bytes], message: Any) -> None:
    """Send a message. Raises OSError: nobody is there."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def read(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError: there is none."""
    length = pipe.read(4)
    if len(length) < 4:
        raise EOFError
    data = pipe.read(int.from_bytes(length, "little"))
    return msgspec.msgpack.decode(data)


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of each token, empty for those that are no text; ids that may end one."""

    tokens: list[bytes]
    end_ids: list[int]


def tokenizer_info(vocabulary: Vocabulary) -> Any:
    """The library's form of it."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        vocabulary.tokens,
        xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary.tokens),
        stop_token_ids=vocabulary.end_ids,
    )


def compiled(compiler: Any, kind: str, text: str) -> Any:
    """The library's compiled grammar. Raises RuntimeError with its reason."""
    import xgrammar

    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "ebnf":
        return compiler.compile_grammar(text)
    if kind == "structural_tag":
        grammar = xgrammar.Grammar.from_structural_tag(text)
    else:
        is_any = kind == "json_object"
        schema = '{"type": "object"}' if is_any else text
        grammar = xgrammar.Grammar.from_json_schema(schema, strict_mode=not is_any, max_whitespace_cnt=MAX_WHITESPACE)
    rules = str(grammar)
    if _LOOSE in rules:
        grammar = xgrammar.Grammar.from_ebnf(rules.replace(_LOOSE, _STRICT))
    return compiler.compile_grammar(grammar)


def main() -> None:
    """Serve until the input ends."""
    inbox: queue.Queue[Any] = queue.Queue()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints gets between the messages

    def listen() -> None:
        try:
            while True:
                inbox.put(read(sys.stdin.buffer))
        except EOFError:
            os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        import xgrammar

        vocabulary = msgspec.convert(inbox.get(), Vocabulary)
        compiler = xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
        write(answers, "ready")
        while True:
            kind, text = inbox.get()
            said.truncate(0)
            said.seek(0)
            try:
                data, reason = compiled(compiler, kind, text).serialize_json().encode(), ""
            except Exception as error:  # whatever the library raises is about this grammar
                data, reason = None, str(error) or type(error).__name__
            said.seek(0)
            warned = said.read().decode(errors="replace")
            if data is not None and "ignored" in warned:
                data, reason = None, warned  # it would allow what was asked to be forbidden
            write(answers, [data, _WHERE.sub("", reason).strip().splitlines()[0][:500] if reason else ""])


if __name__ == "__main__":
    main()
