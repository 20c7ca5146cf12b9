"""Weights from one GGUF file, under Hugging Face names and in Hugging Face layout.

The file is memory-mapped; the header is read by a walk of our own, where every length is checked against the bytes that
are left before anything is allocated, because a damaged header otherwise turns into index errors or huge allocations
(and because `gguf.GGUFReader` builds arrays for each of 100,000 vocabulary entries, which takes seconds). What the
`gguf` package knows best stays with it: type numbers, block sizes, tensor names, dequantisation. The tokenizer is built
from `GgufSource.metadata` elsewhere. File format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, MODEL_TENSOR, TENSOR_NAMES, GGMLQuantizationType
from gguf.quants import dequantize

from devices.quantized import QuantizedWeight
from engine.errors import ModelLoadError
from engine.models.architectures import ARCHITECTURES
from engine.models.config import ModelConfig
from engine.weights.gguf_blocks import packed

# Types that are read as they are; the others here are dequantised to float32.
_PLAIN_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANT_TYPES = tuple(GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
_KNOWN_TYPES = (*_PLAIN_DTYPES, *_QUANT_TYPES)

_GLOBAL_TENSORS = {
    MODEL_TENSOR.TOKEN_EMBD: "model.embed_tokens",
    MODEL_TENSOR.OUTPUT_NORM: "model.norm",
    MODEL_TENSOR.OUTPUT: "lm_head",
}
_BLOCK_TENSORS = {
    MODEL_TENSOR.ATTN_NORM: "input_layernorm",
    MODEL_TENSOR.ATTN_Q: "self_attn.q_proj",
    MODEL_TENSOR.ATTN_K: "self_attn.k_proj",
    MODEL_TENSOR.ATTN_V: "self_attn.v_proj",
    MODEL_TENSOR.ATTN_OUT: "self_attn.o_proj",
    MODEL_TENSOR.ATTN_Q_NORM: "self_attn.q_norm",
    MODEL_TENSOR.ATTN_K_NORM: "self_attn.k_norm",
    MODEL_TENSOR.FFN_NORM: "post_attention_layernorm",
    MODEL_TENSOR.FFN_GATE: "mlp.gate_proj",
    MODEL_TENSOR.FFN_UP: "mlp.up_proj",
    MODEL_TENSOR.FFN_DOWN: "mlp.down_proj",
}
# Of models with experts; one tensor [experts, out, in] for all of a layer, where "{}" is the expert's number.
_EXPERT_TENSORS = {
    MODEL_TENSOR.FFN_GATE_INP: "mlp.gate",
    MODEL_TENSOR.FFN_GATE_EXP: "mlp.experts.{}.gate_proj",
    MODEL_TENSOR.FFN_UP_EXP: "mlp.experts.{}.up_proj",
    MODEL_TENSOR.FFN_DOWN_EXP: "mlp.experts.{}.down_proj",
}
_ROPE_FREQS = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_LENGTH = 1 << 24  # bytes of a text, entries of an array: far above any vocabulary, far below the memory
_LENGTH_BYTES = 8
_MIN_KEY_BYTES = _LENGTH_BYTES + 4 + 1  # name's length, value type, value
_MIN_TENSOR_BYTES = _LENGTH_BYTES + 4 + 8 + 4 + 8  # name's length, dimensions and one of them, type, offset
_STRING, _ARRAY = 8, 9
# Value type number -> struct code (the numbers are GGUFValueType's).
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` is torch's order (rows first), `offset` and `num_bytes` are in the file."""

    name: str
    shape: tuple[int, ...]
    quant_type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufSource:
    """A GGUF file as a `WeightSource`.

    Attributes:
        path: the file.
        config: the model's shape, read from the metadata and the tensor shapes.
        metadata: every key/value of the file as plain Python values, arrays as lists; the tokenizer is in it.

    Raises:
        ModelLoadError: the file is not GGUF 2 or 3, is damaged, holds a tensor of an unknown name or type, or its
            model cannot be built here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _map_file(path)
        self.metadata, tensors = read_header(self._file, path)
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        rope_freqs = [tensor for tensor in tensors if tensor.name == _ROPE_FREQS]
        try:
            self.config = ModelConfig.from_gguf(
                self.metadata,
                tensor_shapes=shapes,
                freq_factors=tuple(self._read(rope_freqs[0]).flatten().tolist()) if rope_freqs else None,
                saved_dtype=_most_common_dtype(tensors),
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        if self.config.num_layers > len(tensors):
            raise ModelLoadError(f"{path}: {self.config.num_layers} layers but only {len(tensors)} tensors")
        known = canonical_names(self.config.num_layers, has_experts=self.config.moe is not None)
        unknown = [name for name in shapes if name not in known and name != _ROPE_FREQS]
        if unknown:
            raise ModelLoadError(
                f"{path}: {len(unknown)} tensors have no place in a {self.config.num_layers}-layer "
                f"{self.config.architecture}: {', '.join(unknown[:8])}"
            )
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in tensors:
            if tensor.name != _ROPE_FREQS:
                self._tensors |= self._named(known[tensor.name], tensor)
        self._is_permuted = ARCHITECTURES[self.config.architecture].gguf_permuted

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return frozenset(self._tensors)

    def tensors(self, keep_packed: bool = False) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Each tensor once, in file order: float16 and bfloat16 as saved, the rest float32.

        Args:
            keep_packed: quantised matrices come as `gguf_blocks.packed` gives them.
        """
        permuted = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads} if self._is_permuted else {}
        for name, entry in self._tensors.items():
            tensor = self._read_packed(entry) if keep_packed and _is_packed(entry) else self._read(entry)
            num_heads = permuted.get(name.split(".")[-2])
            if num_heads is not None:
                rows = num_heads * self.config.head_dim
                if tensor.shape[0] != rows:
                    raise ModelLoadError(f"{self.path}: {entry.name} has shape {entry.shape}: needs {rows} rows")
                if isinstance(tensor, QuantizedWeight):
                    tensor = tensor.with_rows(partial(unpermute_rope, num_heads=num_heads))
                else:
                    tensor = unpermute_rope(tensor, num_heads)
            yield name, tensor

    def _named(self, name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
        """Hugging Face name -> where it lies; an expert tensor is as many as the layer has experts, end to end."""
        if "{}" not in name:
            return {name: tensor}
        num_experts = self.config.moe.num_experts if self.config.moe is not None else 0
        if len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            raise ModelLoadError(f"{self.path}: {tensor.name} has shape {tensor.shape}: needs ({num_experts}, out, in)")
        size = tensor.num_bytes // num_experts
        return {
            name.format(expert): replace(
                tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size
            )
            for expert in range(num_experts)
        }

    def _read(self, entry: GgufTensor) -> torch.Tensor:
        if entry.quant_type in _PLAIN_DTYPES:
            raw = np.frombuffer(self._file, np.uint8, entry.num_bytes, entry.offset)
            return torch.from_numpy(raw.copy()).view(_PLAIN_DTYPES[entry.quant_type]).reshape(entry.shape)
        return torch.from_numpy(dequantize(self._rows(entry), entry.quant_type)).reshape(entry.shape)

    def _read_packed(self, entry: GgufTensor) -> QuantizedWeight:
        try:
            return packed(self._rows(entry), entry.quant_type, entry.shape[1])
        except ValueError as error:
            raise ModelLoadError(f"{self.path}: {entry.name}: {error}") from error

    def _rows(self, entry: GgufTensor) -> npt.NDArray[np.uint8]:
        """Bytes of a quantised tensor, a row of blocks each."""
        block_size, block_bytes = GGML_QUANT_SIZES[entry.quant_type]
        raw = np.frombuffer(self._file, np.uint8, entry.num_bytes, entry.offset)
        return raw.reshape(-1, entry.shape[-1] // block_size * block_bytes)


def canonical_names(num_layers: int, has_experts: bool = False) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face name, for every tensor that a model of `num_layers` may have; whether this model
    has it is for the loader to say. The name of an expert tensor has "{}" where the expert's number goes."""
    stems = {TENSOR_NAMES[tensor]: name for tensor, name in _GLOBAL_TENSORS.items()}
    tensors = _BLOCK_TENSORS | _EXPERT_TENSORS if has_experts else _BLOCK_TENSORS
    for layer in range(num_layers):
        for tensor, name in tensors.items():
            stems[TENSOR_NAMES[tensor].format(bid=layer)] = f"model.layers.{layer}.{name}"
    return {f"{old}.{kind}": f"{new}.{kind}" for old, new in stems.items() for kind in ("weight", "bias")}


def unpermute_rope(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection (or its bias), from interleaved rope pairs to Hugging Face's two halves.

    llama.cpp turns rows (0, 1), (2, 3), ... of a head together; Hugging Face turns row i with row i + head_dim / 2.

    Args:
        tensor: `[num_heads * head_dim, ...]`.
    Returns:
        A contiguous tensor of the same shape: of each head first its even rows, then its odd ones.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def read_header(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Metadata and tensor table of a GGUF file; `path` is for error messages.

        magic  version  num_tensors  num_keys | key type value ... | name shape type offset ... | padding | tensor data

    Raises:
        ModelLoadError: with the byte at which the file stops making sense.
    """
    cursor = _Cursor(data, path)
    if cursor.take(4, "the magic") != _MAGIC:
        raise ModelLoadError(f"{path}: not a GGUF file: it starts with {data[:4]!r}, needs {_MAGIC!r}")
    version = cursor.scalar("I", "the version")
    if version not in _VERSIONS:
        cursor.fail(f"version {version} is not supported: needs little-endian GGUF 2 or 3; convert the model again")
    num_tensors, num_keys = cursor.scalar("Q", "the number of tensors"), cursor.scalar("Q", "the number of keys")
    cursor.expect(
        num_keys * _MIN_KEY_BYTES + num_tensors * _MIN_TENSOR_BYTES, f"{num_keys} keys, {num_tensors} tensors"
    )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text("a key")
        if key in metadata:
            cursor.fail(f"key {key!r} stands there twice")
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment={alignment!r}: needs a power of two")
    tensors = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    return metadata, _place(tensors, cursor, alignment)


class _Cursor:
    """A reading position in the header that never passes the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: GGUF header, byte {self.position} of {len(self.data)}: {problem}")

    def expect(self, num_bytes: int, what: str) -> None:
        left = len(self.data) - self.position
        if num_bytes > left:
            self.fail(f"{what} needs {num_bytes} bytes, {left} are left: the file is cut short or damaged")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.expect(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def length(self, item_bytes: int, what: str) -> int:
        """A count of items of at least `item_bytes` each, which the rest of the file can hold."""
        count: int = self.scalar("Q", what)
        self.expect(count * item_bytes, what)
        if count > _MAX_LENGTH:
            self.fail(f"{what} has {count} entries: at most {_MAX_LENGTH} make sense")
        return count

    def text(self, what: str) -> str:
        raw = self.take(self.length(1, what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def value(self, value_type: int, what: str) -> Any:
        if value_type == _STRING:
            return self.text(what)
        if value_type == _ARRAY:
            return self.array(what)
        if value_type not in _SCALARS:
            self.fail(f"{what} has value type {value_type}: needs one of 0 to 12")
        return self.scalar(_SCALARS[value_type], what)

    def array(self, what: str) -> list[Any]:
        item_type = self.scalar("I", what)
        if item_type == _STRING:
            return [self.text(what) for _ in range(self.length(_LENGTH_BYTES, what))]
        if item_type not in _SCALARS:
            self.fail(f"{what} is an array of value type {item_type}: needs numbers or texts")
        code = _SCALARS[item_type]
        item_bytes = struct.calcsize(f"<{code}")
        count = self.length(item_bytes, what)
        return list(struct.unpack(f"<{count}{code}", self.take(count * item_bytes, what)))


def _read_tensor_info(cursor: _Cursor) -> GgufTensor:
    """One line of the tensor table; its `offset` counts from the start of the tensor data."""
    name = cursor.text("a tensor's name")
    num_dims = cursor.scalar("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"tensor {name!r} has {num_dims} dimensions: needs 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q", name) for _ in range(num_dims))[::-1]
    type_number = cursor.scalar("I", name)
    if type_number not in _KNOWN_TYPES:
        known = ", ".join(quant_type.name for quant_type in _KNOWN_TYPES)
        label = next((kind.name for kind in GGMLQuantizationType if kind == type_number), "unknown")
        cursor.fail(f"tensor {name!r} has type {type_number} ({label}): needs one of {known}")
    quant_type = GGMLQuantizationType(type_number)
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    if 0 in shape or shape[-1] % block_size:
        cursor.fail(f"tensor {name!r} of type {quant_type.name} has shape {shape}: needs rows of whole {block_size}s")
    num_bytes = math.prod(shape) // block_size * block_bytes
    return GgufTensor(name, shape, quant_type, cursor.scalar("Q", name), num_bytes)


def _place(tensors: list[GgufTensor], cursor: _Cursor, alignment: int) -> list[GgufTensor]:
    """The tensors with their offsets in the file, once they are known to lie one after the other inside it."""
    start = _align(cursor.position, alignment)
    expected = 0
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            cursor.fail(f"tensor {tensor.name!r} stands there twice")
        seen.add(tensor.name)
        if tensor.offset != expected:
            cursor.fail(f"data of {tensor.name!r} starts at {tensor.offset}: needs {expected}, after the one before")
        end = start + tensor.offset + tensor.num_bytes
        if end > len(cursor.data):
            cursor.fail(f"data of {tensor.name!r} ends at byte {end}, past the end: the file is cut short or damaged")
        expected = _align(tensor.offset + tensor.num_bytes, alignment)
    return [replace(tensor, offset=start + tensor.offset) for tensor in tensors]


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"{path}: cannot be read as a GGUF file: {error}") from error


def _is_packed(entry: GgufTensor) -> bool:
    return entry.quant_type not in _PLAIN_DTYPES and len(entry.shape) == 2


def _most_common_dtype(tensors: list[GgufTensor]) -> str | None:
    """Name of the torch dtype that most elements have; None when most are quantised."""
    elements: Counter[str | None] = Counter()
    for tensor in tensors:
        dtype = _PLAIN_DTYPES.get(tensor.quant_type)
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        elements[name] += math.prod(tensor.shape)
    return elements.most_common(1)[0][0] if elements else None
