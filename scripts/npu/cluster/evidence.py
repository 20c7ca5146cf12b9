"""Where the checks' texts come from: this machine, or a folder of recorded texts. The parsers cannot tell which.

Everything is one of three: a command's output, a file, or a probe (a question that no tool answers everywhere, such as
which libraries load). A recording is a folder with one file each:

    cmd_<words with _ between>.txt    cmd_npu-smi_info.txt, cmd_hccn_tool_-i_0_-link_-g.txt
    file_<path with / as _>.txt       file_etc_hccn.conf.txt
    probe_<name>.txt                  probe_packages.txt

`Recorder` writes this layout while it asks another source. A first line `# note: ...` says where a text is from. What
is missing is an answer as well, never an exception.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.errors import ClusterError

COMMAND_TIMEOUT_S = 20.0
MAX_TEXT_CHARS = 1 << 20


@dataclass(frozen=True)
class Text:
    """What was asked for, or why it could not be had."""

    text: str = ""
    problem: str | None = None
    """One line such as "npu-smi is not installed"; None when the text is there."""

    @property
    def is_there(self) -> bool:
        return self.problem is None


class Evidence(Protocol):
    """A source of texts."""

    def command(self, *words: str) -> Text: ...
    def file(self, path: str) -> Text: ...
    def probe(self, name: str, *arguments: str) -> Text: ...


class LiveEvidence:
    """This machine. Commands run one after another, each with a time limit and without a shell."""

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S, environment: Mapping[str, str] | None = None) -> None:
        self._timeout_s = timeout_s
        self._environment = dict(os.environ if environment is None else environment)

    def command(self, *words: str) -> Text:
        tool = words[0]
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                check=False,
            )
        except FileNotFoundError:
            return Text(problem=f"{tool} is not installed or not on the PATH")
        except PermissionError:
            return Text(problem=f"{tool} may not be run by this user")
        except subprocess.TimeoutExpired:
            return Text(problem=f"{' '.join(words)} gave no answer within {self._timeout_s:g} s")
        except OSError as error:
            return Text(problem=f"{tool} cannot be run: {error.strerror}")
        text = (done.stdout + done.stderr)[:MAX_TEXT_CHARS]
        if done.returncode != 0 and not text.strip():
            return Text(problem=f"{' '.join(words)} failed with status {done.returncode} and said nothing")
        return Text(text)

    def file(self, path: str) -> Text:
        try:
            with Path(path).open(errors="replace") as file:
                return Text(file.read(MAX_TEXT_CHARS))
        except FileNotFoundError:
            return Text(problem=f"{path} does not exist")
        except OSError as error:
            return Text(problem=f"{path} cannot be read: {error.strerror}")

    def probe(self, name: str, *arguments: str) -> Text:
        from cluster.probes import PROBES

        return Text(PROBES[name](self._environment, *arguments))


class CachedEvidence:
    """Asks another source each question once: checks share answers, and `hccn_tool` is slow."""

    def __init__(self, source: Evidence) -> None:
        self._source = source
        self._known: dict[tuple[str, ...], Text] = {}

    def command(self, *words: str) -> Text:
        return self._once(("command", *words), lambda: self._source.command(*words))

    def file(self, path: str) -> Text:
        return self._once(("file", path), lambda: self._source.file(path))

    def probe(self, name: str, *arguments: str) -> Text:
        return self._once(("probe", name, *arguments), lambda: self._source.probe(name, *arguments))

    def _once(self, question: tuple[str, ...], ask: Callable[[], Text]) -> Text:
        if question not in self._known:
            self._known[question] = ask()
        return self._known[question]


class RecordedEvidence:
    """A folder of texts, with the layout above."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ClusterError(f"--from-dir {folder} is no folder; give the folder that --record wrote")
        if not any(folder.glob("*.txt")):
            raise ClusterError(f"--from-dir {folder} has no recorded text (cmd_*.txt, file_*.txt, probe_*.txt)")
        self._folder = folder

    def command(self, *words: str) -> Text:
        return self._read(command_name(words), " ".join(words))

    def file(self, path: str) -> Text:
        return self._read(file_name(path), path)

    def probe(self, name: str, *_: str) -> Text:
        return self._read(f"probe_{name}.txt", name)

    def _read(self, name: str, what: str) -> Text:
        path = self._folder / name
        if not path.is_file():
            return Text(problem=f"{what} was not recorded ({name})")
        text = path.read_text(errors="replace")
        if text.startswith(_PROBLEM):
            return Text(problem=text.removeprefix(_PROBLEM).strip())
        return Text(text.partition("\n")[2] if text.startswith(_NOTE) else text)


class Recorder:
    """Asks another source and writes what it says."""

    def __init__(self, source: Evidence, folder: Path) -> None:
        self._source = source
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def command(self, *words: str) -> Text:
        return self._write(command_name(words), self._source.command(*words))

    def file(self, path: str) -> Text:
        return self._write(file_name(path), self._source.file(path))

    def probe(self, name: str, *arguments: str) -> Text:
        return self._write(f"probe_{name}.txt", self._source.probe(name, *arguments))

    def _write(self, name: str, text: Text) -> Text:
        (self._folder / name).write_text(text.text if text.is_there else f"{_PROBLEM} {text.problem}\n")
        return text


_PROBLEM = "# no answer:"
_NOTE = "# note:"
"""Beginning of a first line that says where a recording is from and is no part of it."""


def command_name(words: tuple[str, ...]) -> str:
    """The recording's file name of a command."""
    return "cmd_" + _safe("_".join(words)) + ".txt"


def file_name(path: str) -> str:
    """The recording's file name of a file."""
    return "file_" + _safe(path.strip("/").replace("/", "_")) + ".txt"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]", "_", name)
