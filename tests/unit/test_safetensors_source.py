"""Hugging Face directories: the index is the authority, and an incomplete or damaged download does not open."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.weights.safetensors_dir import SafetensorsSource
from engine.weights.source import open_source

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "dtype": "float32",
}
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("a", "b", "c", "d", "e", "f")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return {name: torch.randn(3, 4, generator=generator).to(dtypes[i % 3]) for i, name in enumerate(names)}


def shard(number: int) -> str:
    return f"model-{number:05}-of-00003.safetensors"


def write_index(path: Path, weight_map: Any) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """a, b in shard 1; c, d in shard 2; e, f in shard 3."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {name: shard(i // 2 + 1) for i, name in enumerate(tensors())}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors().items() if weight_map[name] == file}, tmp_path / file)
    write_index(tmp_path, weight_map)
    return tmp_path


def edit_index(path: Path, **changes: str | None) -> None:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"] | changes
    write_index(path, {name: file for name, file in weight_map.items() if file is not None})


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_comes_out_once_as_it_was_saved(layout, request):
    source = open_source(request.getfixturevalue(layout))
    loaded = list(source.tensors())
    assert len(loaded) == len(tensors())
    assert source.names() == tensors().keys()
    for name, tensor in loaded:
        assert tensor.dtype == tensors()[name].dtype
        assert torch.equal(tensor, tensors()[name])
    assert dict(source.tensors()).keys() == source.names(), "a second pass must work"


def test_config_takes_end_tokens_from_the_generation_config_too(single):
    (single / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert SafetensorsSource(single).config.eos_token_ids == (2, 7)


def test_scalars_and_empty_tensors_are_accepted(single):
    odd = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0), "flat": torch.zeros(3, 0)}
    save_file(odd, single / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in SafetensorsSource(single).tensors()} == {
        "scalar": (),
        "empty": (0,),
        "flat": (3, 0),
    }


def test_files_that_the_index_does_not_name_are_left_alone(sharded):
    save_file({"z": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert "z" not in SafetensorsSource(sharded).names()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_shard_is_refused_by_name(sharded, number):
    (sharded / shard(number)).unlink()
    with pytest.raises(ModelLoadError, match=f"1 of the 3 files in .* are missing: {shard(number)}"):
        SafetensorsSource(sharded)


def test_a_renamed_shard_is_a_missing_one(sharded):
    (sharded / shard(2)).rename(sharded / "model-2.safetensors")
    with pytest.raises(ModelLoadError, match=f"missing: {shard(2)}"):
        SafetensorsSource(sharded)


def test_a_shard_that_only_the_index_knows_is_refused(sharded):
    edit_index(sharded, g="model-00004-of-00004.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 of the 4 files .* missing: model-00004-of-00004.safetensors"):
        SafetensorsSource(sharded)


def test_many_missing_shards_are_listed_in_part_with_the_count(sharded):
    write_index(sharded, {f"t{i}": f"s{i:02}.safetensors" for i in range(20)})
    with pytest.raises(ModelLoadError, match=r"20 of the 20 files .*s00.safetensors, .* and 12 more"):
        SafetensorsSource(sharded)


def test_several_shards_without_an_index_are_refused_and_listed(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(ModelLoadError, match=f"neither model.safetensors nor .*found {shard(1)}, {shard(2)}"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"g": shard(1)}, rf"1 tensors are not in the file .* and 0 are .*: g \(not in {shard(1)}\)"),
        ({"a": None}, rf"0 tensors are not in the file .* and 1 are .*: a \(unlisted in {shard(1)}\)"),
        ({"a": shard(2)}, rf"a \(not in {shard(2)}\), a \(unlisted in {shard(1)}\)"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(sharded, change, message):
    edit_index(sharded, **change)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", ""])
def test_an_index_may_not_point_outside_the_directory(sharded, file):
    edit_index(sharded, a=file)
    with pytest.raises(ModelLoadError, match="files outside the directory"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    "contents", ["", "[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 9999]
)
def test_an_index_that_is_no_index_is_refused(sharded, contents):
    (sharded / INDEX).write_text(contents)
    with pytest.raises(ModelLoadError, match=INDEX):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("contents", [b"", b"[1]", b"{", b"\xff\xfe\x00"])
def test_a_config_that_is_no_json_object_is_refused_by_file(single, file, contents):
    (single / file).write_bytes(contents)
    with pytest.raises(ModelLoadError, match=f"{single}/{file}: "):
        SafetensorsSource(single)


def test_a_wrong_number_in_the_config_is_refused_with_the_directory(single):
    (single / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 0}))
    with pytest.raises(ModelLoadError, match=f"{single}: config.json: num_hidden_layers=0"):
        SafetensorsSource(single)


def test_a_directory_with_pickled_weights_only_says_what_to_do(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"found pytorch_model.bin.*convert .bin weights"):
        SafetensorsSource(single)


def damaged_headers() -> dict[str, bytes]:
    """A file's bytes by what is wrong with its header."""

    def file(header: bytes, data: bytes = bytes(64), length: int | None = None) -> bytes:
        return struct.pack("<Q", len(header) if length is None else length) + header + data

    def entry(shape: list[int], end: int) -> bytes:
        return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()

    return {
        "header of 2^60 bytes": file(entry([16], 64), length=1 << 60),
        "header beyond the file": file(entry([16], 64), length=1 << 20),
        "no JSON": file(b"x" * 40),
        "a list": file(b"[1, 2]"),
        "shape larger than its data": file(entry([32], 64)),
        "shape of 2^80": file(entry([1 << 40, 1 << 40], 64)),
        "data beyond the file": file(entry([32], 128)),
        "bytes left over": file(entry([8], 32)),
    }


@pytest.mark.parametrize("case", damaged_headers())
def test_a_damaged_header_is_refused_by_file(single, case):
    (single / "model.safetensors").write_bytes(damaged_headers()[case])
    with pytest.raises(ModelLoadError, match=r"model.safetensors \(\d+ bytes\) is cut short or damaged"):
        SafetensorsSource(single)


def test_a_file_cut_anywhere_is_refused(single):
    file = single / "model.safetensors"
    data = file.read_bytes()
    for length in range(len(data)):
        file.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match="cut short or damaged"):
            SafetensorsSource(single)


def test_a_file_that_vanishes_after_opening_is_a_load_error(single):
    source = SafetensorsSource(single)
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: "):
        list(source.tensors())
