"""GGUF files: what comes out of good ones, and that damaged ones are a ModelLoadError, fast and without memory."""

from __future__ import annotations

import gc
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, dequantize, quantize
from gguf.quants import quant_shape_to_byte_shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_ggufs import permute_rope

from engine.errors import ModelLoadError
from engine.weights.catalog import cache_dir, list_entries
from engine.weights.gguf import GgufSource, canonical_names, unpermute_rope
from engine.weights.source import open_source

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, FFN = 4, 2, 16, 2, 40, 96
HIDDEN = HEADS * HEAD_DIM
QUANT_NAMES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

GGUF_SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    **{
        f"blk.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items()
    },
}


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in GGUF_SHAPES.items()}


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], quants: dict[str, str] | None = None, **changes: Any
) -> Path:
    """A tiny llama. `quants` says how a tensor is stored (raw uint8 blocks are kept); `changes` set integer keys."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"täken{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_scores([-0.5 * i for i in range(VOCAB)])
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(changes.pop("bos", 1))
    writer.add_eos_token_id(changes.pop("eos", 2))
    for key, value in changes.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, values in weights.items():
        kind = GGMLQuantizationType[(quants or {}).get(name, "F32")]
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=kind)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_weights())


def test_every_tensor_comes_out_once_under_its_hugging_face_name(tiny):
    weights = tiny_weights()
    source = open_source(tiny)
    loaded = list(source.tensors())
    assert len(loaded) == len(weights) == len(source.names())
    assert {name for name, _ in loaded} == source.names()
    for stored, name in canonical_names(LAYERS).items():
        if stored in weights and ".attn_q." not in stored and ".attn_k." not in stored:
            torch.testing.assert_close(dict(loaded)[name], torch.from_numpy(weights[stored]), rtol=0, atol=0)
    assert "model.layers.1.mlp.down_proj.weight" in source.names()
    assert "model.layers.0.post_attention_layernorm.weight" in source.names()
    assert dict(source.tensors()).keys() == source.names(), "a second pass must work"


def test_config_comes_from_metadata_and_tensors(tiny):
    config = GgufSource(tiny).config
    assert (config.architecture, config.num_layers, config.vocab_size) == ("LlamaForCausalLM", LAYERS, VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.tie_word_embeddings, config.rms_norm_eps, config.saved_dtype) == (True, 1e-5, "float32")


def test_metadata_is_what_gguf_reads_as_plain_python_values(tiny):
    fields = gguf.GGUFReader(tiny).fields
    expected = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert GgufSource(tiny).metadata == expected
    assert expected["tokenizer.ggml.tokens"][3] == "täken3"


def test_query_and_key_rows_return_to_the_hugging_face_order(tmp_path):
    rng = np.random.default_rng(1)
    query = rng.standard_normal((HEADS * HEAD_DIM, HIDDEN), dtype=np.float32)
    key = rng.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN), dtype=np.float32)
    bias = rng.standard_normal(HEADS * HEAD_DIM, dtype=np.float32)
    stored = tiny_weights() | {
        "blk.0.attn_q.weight": permute_rope(query, HEADS),
        "blk.0.attn_k.weight": permute_rope(key, KV_HEADS),
        "blk.0.attn_q.bias": permute_rope(bias, HEADS),
    }
    source = GgufSource(write_gguf(tmp_path / "m.gguf", stored))
    loaded = dict(source.tensors())
    assert (source.config.qkv_bias, source.config.out_bias) == (True, False)
    for name, expected in (("q_proj.weight", query), ("k_proj.weight", key), ("q_proj.bias", bias)):
        assert torch.equal(loaded[f"model.layers.0.self_attn.{name}"], torch.from_numpy(expected))


def test_interleaved_rope_scores_equal_half_split_rope_scores_after_the_unpermutation():
    """The reason for it: the score q.k of rotated heads is the same in either layout."""
    query, key = torch.randn(2, HEAD_DIM, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.arange(1, HEAD_DIM // 2 + 1, dtype=torch.float64) * 0.3

    def rotate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    interleaved = rotate(query[0::2, 0], query[1::2, 0]) @ torch.cat([key[0::2, 0], key[1::2, 0]])
    query, key = unpermute_rope(query, 1), unpermute_rope(key, 1)
    half = HEAD_DIM // 2
    torch.testing.assert_close(rotate(query[:half, 0], query[half:, 0]) @ key[:, 0], interleaved)


@pytest.mark.parametrize("kind", QUANT_NAMES)
def test_each_quantisation_equals_the_gguf_packages_own(kind, tmp_path):
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, quant_shape_to_byte_shape((VOCAB, 256), GGMLQuantizationType[kind]), dtype=np.uint8)
    name = "output.weight"
    path = write_gguf(tmp_path / "m.gguf", tiny_weights() | {name: blocks}, {name: kind})
    with np.errstate(all="ignore"):  # random scales may be infinite
        loaded = dict(GgufSource(path).tensors())["lm_head.weight"]
        expected = dequantize(blocks, GGMLQuantizationType[kind])
    assert loaded.dtype == torch.float32
    np.testing.assert_array_equal(loaded.numpy(), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [
        ("F32", torch.float32, 0.0),
        ("F16", torch.float16, 2e-3),
        ("BF16", torch.bfloat16, 2e-2),
        ("Q8_0", torch.float32, 0.02),
        ("Q4_0", torch.float32, 0.4),
        ("Q4_1", torch.float32, 0.25),
    ],
)
def test_each_quantisation_gives_back_nearly_what_was_stored(kind, dtype, error, tmp_path):
    weights = tiny_weights(3)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", weights, dict.fromkeys(weights, kind)))
    loaded = dict(source.tensors())["model.layers.1.mlp.gate_proj.weight"]
    assert loaded.dtype == dtype
    assert source.config.saved_dtype == (None if kind[0] == "Q" else str(dtype).removeprefix("torch."))
    np.testing.assert_allclose(loaded.float().numpy(), weights["blk.1.ffn_gate.weight"], rtol=0, atol=error)


def test_rope_frequency_factors_go_to_the_config_and_not_to_the_tensors(tmp_path):
    factors = np.arange(1, HEAD_DIM // 2 + 1, dtype=np.float32)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_weights() | {"rope_freqs.weight": factors}))
    assert (source.config.rope.kind, source.config.rope.short_factors) == ("freq_factors", tuple(factors.tolist()))
    assert len(source.names()) == len(GGUF_SHAPES) == len(dict(source.tensors()))


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.2.attn_q.weight", "blk.00.attn_q.weight", "x"])
def test_a_tensor_without_a_place_in_the_model_is_refused_by_name(name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_weights() | {name: np.ones((4, 4), dtype=np.float32)})
    with pytest.raises(ModelLoadError, match=rf"1 tensors have no place.*{name}"):
        GgufSource(path)


@pytest.mark.parametrize(("kind", "number"), [("Q2_K", 10), ("IQ4_XS", 23)])
def test_another_quantisation_is_refused_with_the_known_ones(kind, number, tmp_path):
    blocks = np.zeros(quant_shape_to_byte_shape((VOCAB, 256), GGMLQuantizationType[kind]), dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", tiny_weights() | {"output.weight": blocks}, {"output.weight": kind})
    with pytest.raises(ModelLoadError, match=rf"'output.weight' has type {number} \({kind}\)") as error:
        GgufSource(path)
    assert all(known in str(error.value) for known in (*QUANT_NAMES, "F32", "F16", "BF16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos": VOCAB}, "bos_token_id=40: needs token ids from 0 to 39"),
        ({"eos": 2**32 - 1}, "eos_token_id=4294967295"),
        ({"llama__block_count": 10**9}, "1000000000 layers but only 20 tensors"),
        ({"llama__attention__head_count": 7}, "head_count"),
        ({"general__alignment": 24}, "general.alignment=24: needs a power of two"),
        ({"llama__vocab_size": VOCAB + 1}, "llama.vocab_size=41"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(changes, message, tmp_path):
    path = tmp_path / "m.gguf"
    data = write_gguf(path, tiny_weights()).read_bytes()
    path.write_bytes(with_changed_keys(data, changes))
    with pytest.raises(ModelLoadError) as error:
        GgufSource(path)
    assert message in str(error.value)


def test_a_query_of_the_wrong_height_is_refused_by_name(tmp_path):
    weights = tiny_weights() | {"blk.1.attn_q.weight": np.ones((8, HIDDEN), dtype=np.float32)}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", weights))
    with pytest.raises(ModelLoadError, match=r"blk.1.attn_q.weight has shape \(8, 64\): needs 64 rows"):
        list(source.tensors())


# --- damage: files taken apart and put together wrongly, byte by byte -------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def u32_key(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", GGUFValueType.UINT32, value)


def with_changed_keys(data: bytes, changes: dict[str, int]) -> bytes:
    """`data` with 32-bit keys set to other values, or added in front of all others."""
    names = {"bos": "tokenizer.ggml.bos_token_id", "eos": "tokenizer.ggml.eos_token_id"}
    for short, value in changes.items():
        key = names.get(short, short.replace("__", "."))
        head = text(key) + struct.pack("<I", GGUFValueType.UINT32)
        at = data.find(head)
        if at >= 0:
            data = data[: at + len(head)] + struct.pack("<I", value) + data[at + len(head) + 4 :]
        else:
            num_keys = struct.unpack_from("<Q", data, 16)[0]
            data = data[:16] + struct.pack("<Q", num_keys + 1) + u32_key(key, value) + data[24:]
    return data


def tensor_info(name: str, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(*body: bytes, keys: int = 0, tensors: int = 0, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(body)


def array(key: str, item_type: int, count: int, items: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", GGUFValueType.ARRAY, item_type, count) + items


TWO_TENSORS = {"keys": 0, "tensors": 2}
DATA = bytes(256)
DAMAGED = {
    "empty file": (b"", "cannot be read as a GGUF file"),
    "wrong magic": (gguf_bytes(magic=b"GGML"), "not a GGUF file: it starts with b'GGML'"),
    "version 1": (gguf_bytes(version=1), "version 1 is not supported"),
    "version 9": (gguf_bytes(version=9), "version 9 is not supported"),
    "big-endian": (gguf_bytes(version=3 << 24), "version 50331648 is not supported"),
    "too many tensors": (gguf_bytes(tensors=2**63), "9223372036854775808 tensors needs"),
    "too many keys": (gguf_bytes(keys=2**63), "9223372036854775808 keys"),
    "one tensor too many": (gguf_bytes(tensors=1), "0 keys, 1 tensors needs 32 bytes, 0 are left"),
    "key longer than the file": (gguf_bytes(struct.pack("<Q", 2**60), DATA, keys=1), "a key needs 1152921504606846976"),
    "text longer than the file": (
        gguf_bytes(text("a"), struct.pack("<IQ", GGUFValueType.STRING, 2**60), DATA, keys=1),
        "a needs 1152921504606846976 bytes",
    ),
    "array longer than the file": (gguf_bytes(array("a", 4, 2**62), DATA, keys=1), "a needs"),
    "text array longer than the file": (gguf_bytes(array("a", 8, 2**61), DATA, keys=1), "a needs"),
    "array of arrays": (gguf_bytes(array("a", 9, 1), DATA, keys=1), "an array of value type 9: needs numbers or texts"),
    "array of an unknown type": (gguf_bytes(array("a", 77, 1), DATA, keys=1), "an array of value type 77"),
    "unknown value type": (gguf_bytes(text("a"), struct.pack("<I", 13), DATA, keys=1), "a has value type 13"),
    "not UTF-8": (gguf_bytes(struct.pack("<Q", 1), b"\xff", DATA, keys=1), "a key is not UTF-8"),
    "key twice": (gguf_bytes(u32_key("a", 1), u32_key("a", 1), DATA, keys=2), "key 'a' stands there twice"),
    "tensor twice": (
        gguf_bytes(tensor_info("a"), tensor_info("a", offset=32), DATA, **TWO_TENSORS),
        "tensor 'a' stands there twice",
    ),
    "overlapping tensors": (
        gguf_bytes(tensor_info("a", (16,)), tensor_info("b", offset=32), DATA, **TWO_TENSORS),
        "data of 'b' starts at 32: needs 64",
    ),
    "tensor data past the end": (gguf_bytes(tensor_info("a", (80,)), DATA, tensors=1), "data of 'a' ends at byte 384"),
    "tensor larger than any memory": (gguf_bytes(tensor_info("a", (2**62, 2**62)), DATA, tensors=1), "past the end"),
    "no dimension": (gguf_bytes(tensor_info("a", ()), DATA, tensors=1), "'a' has 0 dimensions: needs 1 to 4"),
    "too many dimensions": (gguf_bytes(tensor_info("a", (1,) * 5), DATA, tensors=1), "'a' has 5 dimensions"),
    "empty dimension": (gguf_bytes(tensor_info("a", (0, 4)), DATA, tensors=1), "'a' of type F32 has shape (4, 0)"),
    "part of a block": (gguf_bytes(tensor_info("a", (48,), 8), DATA, tensors=1), "needs rows of whole 32s"),
    "unknown tensor type": (gguf_bytes(tensor_info("a", (4,), 999), DATA, tensors=1), "'a' has type 999 (unknown)"),
    "alignment is a text": (
        gguf_bytes(text("general.alignment"), struct.pack("<I", 8), text("32"), DATA, keys=1),
        "general.alignment='32': needs a power of two",
    ),
    "array type mismatch": (
        gguf_bytes(array("general.architecture", 4, 1, bytes(4)), DATA, keys=1),
        "general.architecture=[0]: needs a text",
    ),
}


@pytest.fixture(scope="module")
def nothing_to_collect() -> None:
    """What earlier tests of the process left behind is collected before anything here is measured."""
    gc.collect()


@pytest.mark.usefixtures("nothing_to_collect")
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_a_load_error_without_time_or_memory(case, tmp_path):
    data, message = DAMAGED[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ModelLoadError) as error:
            GgufSource(path)
        seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert seconds < 1
    assert peak < 4 << 20


def test_a_lying_array_length_that_a_large_file_could_hold_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(array("a", GGUFValueType.UINT8, 20 << 20), keys=1))
    with path.open("r+b") as file:
        file.truncate(21 << 20)
    with pytest.raises(ModelLoadError, match="a has 20971520 entries: at most"):
        GgufSource(path)


def test_a_file_cut_anywhere_is_a_load_error(tiny, tmp_path):
    data = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    header_end = data.index(b"token_embd.weight")
    for length in [*range(0, header_end, 7), *range(header_end, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            GgufSource(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_in_the_header_are_harmless_or_a_load_error(data, tiny, tmp_path):
    contents = bytearray(tiny.read_bytes())
    table_end = contents.rindex(b"weight") + 40
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, table_end))
        contents[at] = data.draw(st.sampled_from([0, 1, 9, 0x7F, 0x80, 0xFF]))
    path = tmp_path / "changed.gguf"
    path.write_bytes(contents)
    try:
        for _ in GgufSource(path).tensors():
            pass
    except ModelLoadError:
        pass


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "not there"),
        (lambda path: path.mkdir(), "an empty directory"),
        (lambda path: (path.mkdir(), (path / "m.gguf").touch()), r"without config.json \(it holds m.gguf\)"),
    ],
)
def test_a_path_that_is_no_model_says_what_was_found(make, found, tmp_path):
    make(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=f"{found}.*needs a GGUF file, or a directory"):
        open_source(tmp_path / "model")


def test_one_file_of_a_hugging_face_model_is_answered_with_its_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="give the directory that holds it"):
        open_source(tmp_path / "model.safetensors")


@pytest.mark.smollm2
def test_the_real_default_model_opens_fast_and_is_what_its_card_says():
    path = cache_dir() / list_entries()[0].filename
    if not path.is_file():
        pytest.skip(f"{path} is not there: scripts/test fetches it")
    start = time.perf_counter()
    source = GgufSource(path)
    assert time.perf_counter() - start < 2
    config = source.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.rope.kind, config.rope.theta, config.max_position_embeddings) == ("default", 1e5, 8192)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    assert len(source.metadata["tokenizer.ggml.merges"]) == 48900
    sizes = {name: tensor.numel() for name, tensor in source.tensors() if bool(tensor.isfinite().all())}
    assert sizes.keys() == source.names()
    assert (len(sizes), sum(sizes.values())) == (272, 134_515_008)
