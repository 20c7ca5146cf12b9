"""Fills a model's parameters from a source: every parameter exactly once, every tensor of the file used.

The caller lists the destinations, each a tensor (often a view into a fused weight) under the name that the files use.
What is missing, left over, of another shape, quantised in a way unknown here or beyond the destination's range stops
the start-up with the names; the engine never runs on parameters that nobody wrote. Which dtype and device the
parameters have is the caller's choice, made before.
"""

from __future__ import annotations

import fnmatch
import logging
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch

from devices.quantized import QuantizedWeight
from engine.errors import ModelLoadError
from engine.weights.slot import WeightSlot
from engine.weights.source import WeightSource

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
# Buffers that old checkpoints saved and that the model computes itself.
IGNORED_PATTERNS = ("*.rotary_emb.inv_freq",)

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_weights` did. `num_bytes` counts what was written to the destinations."""

    num_tensors: int
    num_bytes: int
    seconds: float


@torch.no_grad()
def load_weights(
    destinations: Mapping[str, torch.Tensor | WeightSlot],
    source: WeightSource,
    *,
    optional: Container[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> LoadReport:
    """Copy every tensor of `source` into the destination of its name, converting dtype and device.

    Args:
        destinations: canonical name -> tensor of exactly the file's shape, written in place, or a slot of that shape;
            with slots among them the source is asked to keep packed what is.
        source: each of its tensors must have a destination, be in `optional`, match `IGNORED_PATTERNS` or be empty.
        optional: names tied to the embedding ("lm_head.weight" of a tied model) that the file may still hold. They are
            not loaded; one that differs from the embedding is logged as a warning.
        progress: called after each tensor with (tensors read, tensors in the source).
    Raises:
        ModelLoadError: a destination has no tensor, or a tensor has no destination, another shape, a dtype that is not
            a plain float, or finite values that the destination's dtype turns into infinity. Lists up to 8 names and
            the count of all; the destinations are then partly written.
    """
    start = time.perf_counter()
    available = source.names()
    missing = [f"{name} {_shape(tensor)}" for name, tensor in destinations.items() if name not in available]
    if missing:
        unused = sorted(name for name in available if name not in destinations and not _may_be_left(name, optional))
        raise ModelLoadError(
            f"{source.path}: {len(missing)} of {len(destinations)} parameters are not in the file: {_listed(missing)}"
            + (f"; {len(unused)} tensors in it are no parameter: {_listed(unused)}" if unused else "")
        )
    seen: set[str] = set()
    tied: dict[str, torch.Tensor | QuantizedWeight] = {}
    problems: list[str] = []
    has_slots = any(isinstance(destination, WeightSlot) for destination in destinations.values())
    for name, tensor in source.tensors(keep_packed=True) if has_slots else source.tensors():
        if name in seen:
            raise ModelLoadError(f"{source.path}: holds {name} twice")
        seen.add(name)
        if name in destinations:
            problem = _put(destinations[name], tensor)
            problems += [f"{name} {problem}"] if problem else []
        elif name in optional:
            tied[name] = tensor
        elif 0 not in tensor.shape and not _may_be_left(name, optional):
            problems.append(f"{name} {_shape(tensor)} is no parameter of this model")
        if progress is not None:
            progress(len(seen), len(available))
    if seen != available:
        raise ModelLoadError(
            f"{source.path}: listed but not found, or the reverse: {_listed(sorted(seen ^ available))}"
        )
    if problems:
        raise ModelLoadError(f"{source.path}: {len(problems)} tensors cannot be loaded: {_listed(problems, '; ')}")
    for name, tensor in tied.items():
        if EMBEDDING in destinations:
            _warn_unless_tied(name, tensor, destinations[EMBEDDING])
    num_bytes = sum(destination.nbytes for destination in destinations.values())
    return LoadReport(len(destinations), num_bytes, time.perf_counter() - start)


def _put(destination: torch.Tensor | WeightSlot, tensor: torch.Tensor | QuantizedWeight) -> str | None:
    """Give `tensor` to its destination; what forbids it, or None."""
    if isinstance(destination, torch.Tensor):
        return _fill(destination, _dense(tensor))
    if isinstance(tensor, torch.Tensor) and destination.bits is None:
        plain = torch.empty(destination.shape, dtype=destination.dtype)
        problem = _fill(plain, tensor)
        if problem is None:
            destination.put(plain)
        return problem
    if tensor.shape != destination.shape:
        return f"has shape {_shape(tensor)}, needs {_shape(destination)}"
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in _FLOAT_DTYPES:
        return f"has dtype {tensor.dtype}, needs a plain float: this quantisation is not supported"
    try:
        destination.put(tensor)
    except ValueError as error:
        return str(error)
    return None


def _dense(tensor: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else tensor.dequantized(torch.float32)


def _fill(destination: torch.Tensor, tensor: torch.Tensor) -> str | None:
    """Copy `tensor` over `destination`; what forbids it, or None."""
    if tensor.shape != destination.shape:
        return f"has shape {_shape(tensor)}, needs {_shape(destination)}"
    if tensor.dtype not in _FLOAT_DTYPES:
        return f"has dtype {tensor.dtype}, needs a plain float: this quantisation is not supported"
    destination.copy_(tensor)
    largest = torch.finfo(destination.dtype).max
    if tensor.numel() and largest < torch.finfo(tensor.dtype).max:
        low, high = torch.aminmax(tensor)  # one cheap pass; the exact count is taken only when it may not be 0
        if not (-largest <= low and high <= largest):
            lost = int((destination.isinf() & tensor.to(destination.device).isfinite()).sum())
            if lost:
                return f"has {lost} values beyond {largest:g}, the largest {destination.dtype}: use bfloat16 or float32"
    return None


def _may_be_left(name: str, optional: Container[str]) -> bool:
    return name in optional or any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORED_PATTERNS)


def _warn_unless_tied(name: str, tensor: torch.Tensor | QuantizedWeight, embedding: torch.Tensor | WeightSlot) -> None:
    if isinstance(embedding, WeightSlot):
        is_tied = embedding.would_keep(tensor)
    else:
        is_tied = torch.equal(_dense(tensor).to(embedding), embedding)
    if not is_tied:
        logger.warning(
            "%s is in the file and differs from %s, but the config says they are tied: it is not used; "
            "set tie_word_embeddings to false to use it",
            name,
            EMBEDDING,
        )


def _shape(tensor: torch.Tensor | WeightSlot | QuantizedWeight) -> str:
    return str(list(tensor.shape))


def _listed(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _MAX_LISTED
    return separator.join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
