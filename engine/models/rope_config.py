"""Rotary position embedding as a model file describes it: `RopeConfig`, and how it is read from either format.

Sources: position interpolation (arXiv:2306.15595), dynamic NTK scaling and YaRN (arXiv:2309.00071), LongRoPE
(arXiv:2402.13753), the scaling released with Llama 3.1; keys and defaults as in transformers 5.24's
`modeling_rope_utils.py`. The arithmetic on tensors is in `engine/models/rope.py`; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.fields import Fields, decimal

_ORIGINAL = "original_max_position_embeddings"
_KINDS_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
_GGUF_KINDS = ("none", "linear", "yarn")
# YaRN parameters of GGUF that config.json has no counterpart for, with the values that change nothing.
_GGUF_NEUTRAL = {
    "attn_factor": (0, 1),
    "yarn_attn_factor": (0, 1),
    "yarn_ext_factor": (-1, 1),
    "yarn_log_multiplier": (0,),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: inverse frequency `i` of a head of `head_dim` is `theta ** (-2i / head_dim)`, scaled.

    Attributes:
        kind: how the inverse frequencies are scaled.
            "default": not at all.
            "linear": divided by `factor` (position interpolation).
            "dynamic": not at all up to the original context; for an engine with a longer one, by a larger theta.
            "yarn": slow ones divided by `factor`, fast ones kept, a ramp between, by turns in the original context.
            "llama3": wavelengths above `original / low_freq_factor` divided by `factor`, below
                `original / high_freq_factor` kept, blended between.
            "longrope": the i-th divided by `short_factors[i]`, or, in an engine whose context is longer than the
                original one, by `long_factors[i]`.
            "freq_factors": the i-th divided by `short_factors[i]`; GGUF stores the llama3 scaling this way.
        theta: base of the frequencies.
        factor: how many times the context was stretched.
        low_freq_factor, high_freq_factor: llama3 only, the second above the first.
        original_max_position_embeddings: context in tokens before scaling; 0 when the file does not say.
        attention_factor: what cosine and sine are multiplied with (yarn, longrope).
        beta_fast, beta_slow: yarn only; turns within the original context from which a frequency is kept, and below
            which it is divided.
        truncate: yarn only; whether the ramp starts and ends at whole pairs.
        short_factors, long_factors: `head_dim / 2` positive divisors each, for the kinds that name them.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def longest(self, max_position_embeddings: int) -> int:
        """Tokens that the scaling covers, for a file that says `max_position_embeddings` (vLLM reads it the same way).

        A linear or dynamic scaling stretches the context it was given for: `factor` times the original one, or times
        `max_position_embeddings` where no original is named. A yarn scaling stretches the original one, which is
        `max_position_embeddings` where none is named. The others come with `max_position_embeddings` stretched already.
        """
        if self.kind not in ("linear", "dynamic", "yarn"):
            return max_position_embeddings
        return int((self.original_max_position_embeddings or max_position_embeddings) * self.factor)


@dataclass(frozen=True, slots=True)
class _Section:
    """A file's rope section with what its kinds need from outside it."""

    fields: Fields
    theta: float
    head_dim: int
    max_position_embeddings: int


def rope_from_hf(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Rope from `rope_parameters` (transformers 5) or `rope_scaling` (before); theta inside it or at the top level."""
    top = Fields(config, "config.json")
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    name, section = next(iter(given.items()), ("rope_parameters", {}))
    if not isinstance(section, Mapping) or any(isinstance(value, Mapping) for value in section.values()):
        top.refuse(name, section, "one set of rope parameters, the same for all layers")
    if any(other != section for other in given.values()):
        top.refuse("rope_scaling", given["rope_scaling"], f"to equal rope_parameters={reprlib.repr(section)}")
    fields = Fields(section, f"config.json: {name}")
    for owner in (top, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            owner.refuse("partial_rotary_factor", owner.values["partial_rotary_factor"], "1.0: whole heads are turned")
    kind_key = "rope_type" if fields.has("rope_type") else "type"
    if section.get("type") not in (None, section.get(kind_key)):
        fields.refuse("rope_type", section[kind_key], f"to equal type={section['type']!r}")
    kind = fields.text(kind_key, None if fields.has("factor") else "default")
    theta = fields.number("rope_theta", top.number("rope_theta", 10000.0))
    if kind in _KINDS_WITH_ORIGINAL and top.has(_ORIGINAL):  # where both stand, transformers prefers this one too
        fields = Fields({**section, _ORIGINAL: config[_ORIGINAL]}, fields.origin)
    if kind not in _READERS:
        fields.refuse(kind_key, kind, f"a rope kind that is built here: {', '.join(ROPE_KINDS)}")
    return _READERS[kind](_Section(fields, theta, head_dim, top.integer("max_position_embeddings")))


def rope_from_gguf(fields: Fields, arch: str, head_dim: int, freq_factors: tuple[float, ...] | None) -> RopeConfig:
    """Rope from GGUF keys (a factor without a type means linear) and from the `rope_freqs.weight` tensor.

    Args:
        arch: the GGUF name of the architecture, which starts the keys.
        freq_factors: contents of `rope_freqs.weight` when the file has it.
    """
    prefix = f"{arch}.rope.scaling"
    values = {
        key.removeprefix(f"{prefix}."): value for key, value in fields.values.items() if key.startswith(f"{prefix}.")
    }
    section = {
        "rope_type": values.get("type"),
        "factor": values.get("factor") or fields.values.get(f"{arch}.rope.scale_linear"),
        _ORIGINAL: values.get("original_context_length"),
        "beta_fast": values.get("yarn_beta_fast"),
        "beta_slow": values.get("yarn_beta_slow"),
    }
    scaling = Fields(section, f"{fields.origin}: {prefix}")
    for key, neutral in _GGUF_NEUTRAL.items():
        if values.get(key) is not None and values[key] not in neutral:
            scaling.refuse(key, values[key], f"{neutral[-1]} or no such key: it is not built here")
    kind = scaling.text("rope_type", "linear" if section["factor"] else "none")
    if kind not in _GGUF_KINDS:
        scaling.refuse("rope_type", kind, f"a rope kind that is built here for GGUF: {', '.join(_GGUF_KINDS)}")
    theta = decimal(fields.number(f"{arch}.rope.freq_base", 10000.0))
    read = _READERS["default" if kind == "none" else kind]
    rope = read(_Section(scaling, theta, head_dim, fields.integer(f"{arch}.context_length")))
    if freq_factors is None:
        return rope
    if rope.kind != "default":
        scaling.refuse("rope_type", kind, "none, because the tensor rope_freqs.weight already scales the frequencies")
    tensor = Fields({"rope_freqs.weight": list(freq_factors)}, fields.origin)
    return dataclasses.replace(
        rope, kind="freq_factors", short_factors=tensor.numbers("rope_freqs.weight", head_dim // 2)
    )


def _default(section: _Section) -> RopeConfig:
    return RopeConfig("default", section.theta)


def _linear(section: _Section) -> RopeConfig:
    fields = section.fields
    factor, original = fields.number("factor", minimum=1.0), fields.integer(_ORIGINAL, 0)
    return RopeConfig("linear", section.theta, factor, original_max_position_embeddings=original)


def _dynamic(section: _Section) -> RopeConfig:
    """As in transformers the original context is `max_position_embeddings`, whatever else the section says."""
    if section.head_dim <= 2:
        section.fields.refuse("rope_type", "dynamic", "a head dimension above 2")
    return RopeConfig(
        "dynamic",
        section.theta,
        section.fields.number("factor", minimum=1.0),
        original_max_position_embeddings=section.max_position_embeddings,
    )


def _yarn(section: _Section) -> RopeConfig:
    fields = section.fields
    original = fields.integer(_ORIGINAL, section.max_position_embeddings)
    factor = fields.number("factor", _stretched(section), minimum=1.0)
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        inferred = _yarn_mscale(factor, fields.number("mscale")) / _yarn_mscale(factor, fields.number("mscale_all_dim"))
    else:
        inferred = _yarn_mscale(factor, 1.0)
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    if fast < slow:
        fields.refuse("beta_fast", fast, f"at least beta_slow={slow}")
    if section.theta <= 1.0:
        fields.refuse("rope_theta", section.theta, "above 1: yarn counts turns by its logarithm")
    return RopeConfig(
        "yarn",
        section.theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor", inferred),
        beta_fast=fast,
        beta_slow=slow,
        truncate=fields.flag("truncate", default=True),
    )


def _llama3(section: _Section) -> RopeConfig:
    fields = section.fields
    factor = fields.number("factor", minimum=1.0)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        fields.refuse("high_freq_factor", high, f"to be above low_freq_factor={low}")
    return RopeConfig("llama3", section.theta, factor, low, high, fields.integer(_ORIGINAL))


def _longrope(section: _Section) -> RopeConfig:
    fields, num_pairs = section.fields, section.head_dim // 2
    original = fields.integer(_ORIGINAL, minimum=2)
    factor = fields.number("factor", _stretched(section) or 1.0, minimum=1.0)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        "longrope",
        section.theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor", inferred),
        short_factors=fields.numbers("short_factor", num_pairs),
        long_factors=fields.numbers("long_factor", num_pairs),
    )


def _stretched(section: _Section) -> float | None:
    """The factor that a section without one implies: longest over original context; None when that is not above 1."""
    original = section.fields.integer(_ORIGINAL, section.max_position_embeddings)
    ratio = section.max_position_embeddings / original
    return ratio if ratio > 1 else None


def _yarn_mscale(factor: float, weight: float) -> float:
    """The attention temperature of YaRN (section 3.4) with DeepSeek's weight on its slope."""
    return 0.1 * weight * math.log(factor) + 1.0


_READERS: Mapping[str, Callable[[_Section], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
ROPE_KINDS = tuple(_READERS)
