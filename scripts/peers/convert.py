"""The same weights in the forms that peers read: a Hugging Face directory and a GGUF file.

The source is dequantised once. In bfloat16 and float32 every form holds exactly its values rounded to the dtype, which
is also what Rung computes with. Quantised forms are GGUF only; who reads directories gets bfloat16 instead. Norms stay
float32 in GGUF, as llama.cpp wants them. Files are made once and kept in the cache folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environments import SetupError
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from engine.models.config import ModelConfig
from engine.weights.source import open_source

FILE = "file"
"""The weights of a GGUF file as they are, whatever their types."""

_GGUF_TYPES = {
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
_HEADS = ("token_embd.weight", "output.weight")
"""Stay Q8_0 in files of 4 bit, as in files that llama.cpp's own tool makes of such models."""

_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}

WEIGHTS = ("bfloat16", "float32", "q8_0", "q4_0", FILE)


def dtype_of(weights: str) -> str:
    """What an engine computes in that is told a dtype: quantised weights go with bfloat16."""
    return "float32" if weights == "float32" else "bfloat16"


def is_quantised(weights: str) -> bool:
    return weights != dtype_of(weights)


def model_for(kind: str, source: Path, weights: str, folder: Path) -> Path:
    """The model as an engine reads it.

    Args:
        kind: "own" (Rung: the source, or the quantised GGUF file), "own-bf16" (Rung: never quantised), "gguf",
            "gguf-f16" (GGUF with float16 for bfloat16), "directory" (Hugging Face, without a tokenizer) or
            "directory-int8" (the same with int8 matrices, for `q8_0` alone).
        source: a GGUF file or a directory.
        weights: one of `WEIGHTS`.
    Raises:
        SetupError: the source has no such form.
    """
    if kind == "directory":
        dtype = dtype_of(weights)
        return source if source.is_dir() else hf_directory(source, dtype, folder / f"{source.stem}-{dtype}")
    if kind == "directory-int8":
        if weights != "q8_0":
            raise SetupError(f"computes with int8 weights and has no {weights}; give --weights q8_0")
        return int8_directory(source, folder / f"{source.stem}-int8")
    if kind == "own" and not is_quantised(weights):
        return source
    if kind == "own-bf16":
        return source if source.is_dir() else gguf_file(source, "bfloat16", folder / f"{source.stem}-bfloat16.gguf")
    if source.is_dir():
        raise SetupError(f"needs a GGUF file; {source} is a directory")
    if weights == FILE:
        return source
    form = "float16" if kind == "gguf-f16" and weights == "bfloat16" else weights
    return gguf_file(source, form, folder / f"{source.stem}-{form}.gguf")


def hf_directory(source: Path, dtype: str, target: Path) -> Path:
    """Write config and weights under Hugging Face names; no tokenizer, peers are given token ids."""
    if (target / "config.json").exists():
        return target
    opened = open_source(source)
    weights = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in opened.tensors()}
    return _write_directory(target, weights, hf_config(opened.config, dtype))


def int8_directory(source: Path, target: Path) -> Path:
    """As `hf_directory`, with the layers' matrices in int8, a scale for each output, as compressed-tensors stores them.

    Activations are to be quantised token by token at run time. Embedding and head stay bfloat16.
    """
    if (target / "config.json").exists():
        return target
    opened = open_source(source)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in opened.tensors():
        if tensor.ndim < 2 or ".layers." not in name:
            weights[name] = tensor.to(torch.bfloat16).contiguous()
            continue
        scale = (tensor.float().abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16)
        weights[name] = (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        weights[f"{name}_scale"] = scale
    return _write_directory(target, weights, hf_config(opened.config, "bfloat16") | {"quantization_config": _INT8})


def _write_directory(target: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    partial = target / "config.json.partial"
    partial.write_text(json.dumps(config, indent=1))
    os.replace(partial, target / "config.json")  # last: it says that the directory is complete
    return target


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of a dense decoder without windows whose rope is not scaled. Raises SetupError for any other."""
    if config.rope.kind != "default" or config.moe is not None or any(config.windows):
        raise SetupError(
            f"a scaled rope, windows or experts are not converted ({config.architecture}); give a directory"
        )
    shape = asdict(config)
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    kept = {name: shape[name] for name in (*same, "tie_word_embeddings", "mlp_bias", "hidden_act")}
    return kept | {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "attention_bias": config.qkv_bias,
        "sliding_window": None,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rope_theta": config.rope.theta,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "dtype": dtype,
    }


def gguf_file(source: Path, form: str, target: Path) -> Path:
    """Rewrite a GGUF file with its matrices in another type."""
    if target.exists():
        return target
    matrix_type, file_type = _GGUF_TYPES[form]
    reader = GGUFReader(source)
    partial = target.with_suffix(".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = int(file_type) if key == "general.file_type" else entry.contents()
        sub_type = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, entry.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1 and matrix_type != GGMLQuantizationType.F32:
            is_head = tensor.name in _HEADS and matrix_type == GGMLQuantizationType.Q4_0
            own_type = GGMLQuantizationType.Q8_0 if is_head else matrix_type
            packed = quantize(values, own_type)
            writer.add_tensor(tensor.name, packed, raw_shape=packed.shape, raw_dtype=own_type)
        else:
            writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)
    return target
