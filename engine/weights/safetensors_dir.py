"""Weights from a Hugging Face directory: config.json and one or several safetensors files.

Where there is an index it is the authority: every file it names is there, and each file holds exactly the tensors that
the index places in it. An interrupted download is thus an error when the directory is opened, not uninitialised weights
later. Header lengths, offsets and file sizes are checked by the `safetensors` package as each file is opened. Tensors
are read one at a time; no file is ever in memory whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.models.config import ModelConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_LISTED = 8


class SafetensorsSource:
    """A Hugging Face directory as a `WeightSource`.

    Attributes:
        path: the directory.
        config: read from `config.json` and, if there, `generation_config.json`.

    Raises:
        ModelLoadError: a file is missing, damaged, or holds other tensors than the index says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        generation_file = path / "generation_config.json"
        config = _read_json(path / "config.json")
        generation_config = _read_json(generation_file) if generation_file.exists() else None
        try:
            self.config = ModelConfig.from_hf(config, generation_config)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        self._files = _files_by_index(path) if (path / _INDEX_FILE).exists() else _single_file(path)

    def names(self) -> frozenset[str]:
        """Names of all tensors of all files."""
        return frozenset(name for names in self._files.values() for name in names)

    def tensors(self, keep_packed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, file after file, in its saved dtype; scalars and empty tensors too. None comes packed."""
        for file, names in self._files.items():
            try:
                with safe_open(self.path / file, framework="pt") as reader:
                    for name in names:
                        yield name, reader.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{self.path / file}: {error}") from error


def _single_file(path: Path) -> dict[str, list[str]]:
    """File -> names of its tensors, for a directory without an index."""
    if (path / _SINGLE_FILE).exists():
        return {_SINGLE_FILE: _tensor_names(path / _SINGLE_FILE)}
    found = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise ModelLoadError(
        f"{path}: neither {_SINGLE_FILE} nor {_INDEX_FILE} (found {_listed(found)}): download the model's missing "
        "files, or convert .bin weights to safetensors"
    )


def _files_by_index(path: Path) -> dict[str, list[str]]:
    """File -> names of its tensors, once index and files agree."""
    index = path / _INDEX_FILE
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelLoadError(f'{index}: needs "weight_map", an object from tensor name to file name')
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if not file or Path(file).name != file]
    if outside:
        raise ModelLoadError(f"{index}: names files outside the directory: {_listed(outside)}")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"{path}: {len(missing)} of the {len(files)} files in {_INDEX_FILE} are missing: {_listed(missing)}; "
            "the download is not complete"
        )
    placed = {file: _tensor_names(path / file) for file in files}
    found = {(name, file) for file, names in placed.items() for name in names}
    promised = set(weight_map.items())
    if found != promised:
        absent = [f"{name} (not in {file})" for name, file in sorted(promised - found)]
        surplus = [f"{name} (unlisted in {file})" for name, file in sorted(found - promised)]
        raise ModelLoadError(
            f"{path}: {len(absent)} tensors are not in the file that {_INDEX_FILE} names and {len(surplus)} are in a "
            f"file where it does not: {_listed(absent + surplus)}; index and files are from different downloads"
        )
    return placed


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as reader:
            return list(reader.keys())
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} ({file.stat().st_size} bytes) is cut short or damaged: {error}") from error


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: holds a {type(value).__name__}: needs a JSON object")
    return value


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return (", ".join(names[:_MAX_LISTED]) or "none") + (f" and {more} more" if more > 0 else "")
