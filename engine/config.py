"""Every argument of the engine: its type, default, help and other spellings stand in one place.

One frozen dataclass a theme. The command line, the keyword arguments of `LLM` and the table in the docs are generated
from the fields; names are SGLang's server arguments, vLLM's spellings are aliases. This is also the only module that
reads the environment.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from devices.base import KernelChoice
from engine.errors import ConfigError
from engine.scheduler.queue import POLICIES
from engine.text.reasoning import REASONING_PARSERS
from engine.text.tools.formats import TOOL_CALL_PARSERS
from mem_cache.tree.policies import EVICTION_POLICIES

ENV_MODEL_CACHE = "RUNG_MODEL_CACHE"
ENV_API_KEY = "RUNG_API_KEY"
ENV_ADMIN_API_KEY = "RUNG_ADMIN_API_KEY"
DEFAULT_MODEL = "smollm2-135m-instruct"


def arg(default: Any, help_text: str, *, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Any:
    """A field with what people need to know about it."""
    return field(default=default, metadata={"help": help_text, "aliases": aliases, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Which model, and how it is held."""

    model: str = arg(
        DEFAULT_MODEL,
        "Name of a built-in model (rung model list), a GGUF file, or a Hugging Face directory.",
        aliases=("model_path",),
    )
    device: str = arg("auto", "auto, cpu, cuda, npu or npu-sim; auto says why it refused the others.")
    dtype: str = arg(
        "auto",
        "Weights and activations; auto keeps the dtype that the weights are saved in.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = arg(
        "auto",
        "Weights in few bits: auto keeps those of a GGUF file in 4 or 8 bits where the device multiplies with such and "
        "--dtype is not float32; none makes all of them --dtype; int8 and int4 round the others as well.",
        choices=("auto", "none", "int8", "int4"),
    )
    kernels: str = arg(
        "auto", "The device's own kernels, or its plain torch forms (slower).", choices=("auto", "torch")
    )
    deterministic: bool = arg(
        False,
        "Results never depend on what else is in the step: the same to the last bit, whatever the batch, the chunks "
        "and the cache. Devices that cannot promise it refuse.",
    )
    graphs: str = arg(
        "auto",
        "Launch decode steps as captured graphs where the device can; off runs every step eagerly.",
        choices=("auto", "off"),
    )
    disable_cuda_graph: bool = arg(False, "The same as --graphs off.", aliases=("enforce_eager",))
    cuda_graph_max_bs: int | None = arg(
        None, "Largest batch of a captured graph; what the device's memory suggests when not given."
    )
    context_length: int | None = arg(
        None,
        "Most tokens of prompt and output together; the model's own limit when not given.",
        aliases=("max_model_len",),
    )
    model_cache: str | None = arg(
        None, f"Folder for fetched models; {ENV_MODEL_CACHE}, or a folder in the user's cache, when not given."
    )

    def __post_init__(self) -> None:
        if self.deterministic and self.kernels == "torch":
            raise ConfigError("deterministic and kernels=torch exclude each other: torch's sums depend on the batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryArgs:
    """How much KV, in which pieces."""

    page_size: int | None = arg(None, "Tokens in a page; the device's default when not given.", aliases=("block_size",))
    kv_cache_dtype: str = arg("auto", "Type of stored keys and values.", choices=("auto", "float32", "bfloat16"))
    mem_fraction_static: float | None = arg(
        None,
        "Share of the device's memory for weights and KV together, as far as it is free; 0.3 when not given.",
        aliases=("gpu_memory_utilization",),
    )
    max_total_tokens: int | None = arg(None, "Most tokens of KV; what the memory share buys when not given.")
    max_running_requests: int | None = arg(
        None, "Most requests that hold KV at once; 256 when not given.", aliases=("max_num_seqs",)
    )
    resume_unit: str = arg(
        "auto",
        "Where a computation may continue on existing KV: auto is the device's own; page lets a CPU follow the rule of "
        "NPUs.",
        choices=("auto", "token", "page"),
    )
    disable_hybrid_swa_memory: bool = arg(
        False, "Keep the KV that layers with a sliding window do not read any more, instead of giving its pages back."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArgs:
    """The prefix cache."""

    disable_radix_cache: bool = arg(False, "Reuse no KV between requests.")
    radix_eviction_policy: str = arg(
        "lru", "Which cached prefix goes first when pages are short.", choices=tuple(EVICTION_POLICIES)
    )
    enable_kv_cache_events: bool = arg(False, "Record which pages become readable and which go.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionArgs:
    """Conversations that keep their KV between turns."""

    max_sessions: int = arg(1024, "Most sessions that are open at once.")
    max_session_tokens: int | None = arg(
        None, "Most tokens in the histories of all sessions together; no limit when not given."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArgs:
    """Who runs when."""

    schedule_policy: str = arg("fcfs", "Order of waiting requests.", choices=POLICIES)
    schedule_conservativeness: float = arg(1.0, "Larger admits fewer requests at once and retracts less often.")
    chunked_prefill_size: int | None = arg(
        None,
        "Most prompt tokens in one step; 512 when not given, -1 takes prompts whole.",
        aliases=("max_num_batched_tokens",),
    )
    priority_scheduling_preemption_threshold: int = arg(
        10,
        "With schedule_policy=priority: by how much a waiting request must exceed a running one to displace it.",
    )
    disable_overlap_schedule: bool = arg(
        False, "Launch no step before the result of the last one is here, on devices that could."
    )
    decode_log_interval: int = arg(40, "Steps between two lines of the status log.")
    random_seed: int | None = arg(
        None, "Seed of everything that draws; drawn itself when not given.", aliases=("seed",)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The HTTP server."""

    host: str = arg("127.0.0.1", "Address to listen on; 0.0.0.0 lets everybody in, so give --api-key as well.")
    port: int = arg(30000, "Port to listen on; 0 takes a free one.")
    served_model_name: str | None = arg(None, "Name of the model in the API; --model when not given.")
    api_key: str | None = arg(None, f"Keys that may generate, with commas between; {ENV_API_KEY} when not given.")
    admin_api_key: str | None = arg(
        None, f"Keys for metrics and control, with commas between; {ENV_ADMIN_API_KEY} when not given."
    )
    share_prefix_across_keys: bool = arg(False, "Let clients with different keys reuse each other's cached prefixes.")
    max_concurrent_requests: int = arg(512, "Requests served at once; more get 503 and when to try again.")
    max_body_bytes: int = arg(8 << 20, "Largest request body.")
    max_stored_responses: int = arg(1024, "Most answers of /v1/responses that are kept; the oldest go first.")
    stored_response_ttl_s: float = arg(3600.0, "Seconds that an answer of /v1/responses is kept.")
    client_timeout_s: float = arg(
        60.0, "Seconds that a client may take to send its request, or to take what was sent; then it is cut off."
    )
    drain_timeout_s: float = arg(30.0, "Seconds that SIGTERM leaves to requests in flight.")
    start_timeout_s: float = arg(
        1800.0, "Seconds that loading the model and the first step may take; then the start has failed."
    )
    watchdog_timeout_s: float = arg(300.0, "Seconds that a step may take before /health says that it hangs.")
    tool_call_parser: str = arg(
        "auto",
        "How the model writes tool calls; auto looks into its chat template.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = arg(
        "none", "How the model marks its thinking, which goes into reasoning_content.", choices=REASONING_PARSERS
    )
    no_ui: bool = arg(False, "Serve no page at / and no /kv_picture.")
    log_level: str = arg("info", "What goes to standard error.", choices=("debug", "info", "warning", "error"))

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Empty: everybody may generate."""
        return _keys(self.api_key or os.environ.get(ENV_API_KEY))

    @property
    def admin_api_keys(self) -> tuple[str, ...]:
        """Empty: as for `api_keys`."""
        return _keys(self.admin_api_key or os.environ.get(ENV_ADMIN_API_KEY))


def _keys(text: str | None) -> tuple[str, ...]:
    return tuple(key for key in (text or "").split(",") if key)


THEMES = (ModelArgs, MemoryArgs, CacheArgs, SessionArgs, ScheduleArgs)
DEFAULT_MEM_FRACTION = 0.3
DEFAULT_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All themes together."""

    model: ModelArgs = ModelArgs()
    memory: MemoryArgs = MemoryArgs()
    cache: CacheArgs = CacheArgs()
    session: SessionArgs = SessionArgs()
    schedule: ScheduleArgs = ScheduleArgs()

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Sort flat arguments into themes.

        Raises:
            ConfigError: an argument is unknown (the nearest name is said), given twice, or out of range.
        """
        return cls(*_themes_from(THEMES, kwargs))

    @property
    def chunk_tokens(self) -> int | None:
        """Most prompt tokens in one step; None takes prompts whole."""
        size = self.schedule.chunked_prefill_size
        if size is None:
            return DEFAULT_CHUNK_TOKENS
        return None if size == -1 else size

    @property
    def kernels(self) -> KernelChoice:
        if self.model.deterministic:
            return "deterministic"
        return "torch" if self.model.kernels == "torch" else "auto"

    @property
    def captures_graphs(self) -> bool:
        return self.model.graphs == "auto" and not self.model.disable_cuda_graph

    @property
    def mem_fraction(self) -> float:
        return DEFAULT_MEM_FRACTION if self.memory.mem_fraction_static is None else self.memory.mem_fraction_static

    @property
    def model_cache(self) -> Path | None:
        """Folder for fetched models; None leaves it to the catalogue."""
        folder = self.model.model_cache or os.environ.get(ENV_MODEL_CACHE)
        return Path(folder).expanduser() if folder else None


def all_fields(themes: Iterable[type] = THEMES) -> Iterator[tuple[type, Field[Any]]]:
    """Every argument with its theme, in the order of the themes."""
    for theme in themes:
        for f in fields(theme):
            yield theme, f


def server_config(**kwargs: Any) -> tuple[EngineConfig, ServerArgs]:
    """The engine's arguments and the server's, sorted. Raises ConfigError."""
    *engine, server = _themes_from((*THEMES, ServerArgs), kwargs)
    return EngineConfig(*engine), server


def read_flags_file(path: Path) -> dict[str, Any]:
    """Flags of a YAML file, hyphens or underscores in their names. Raises ConfigError: no such file, or no mapping."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config={path} cannot be read: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"config={path} must hold flags and their values, one `name: value` a line")
    return {name.replace("-", "_"): value for name, value in values.items()}


def _themes_from(themes: tuple[type, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    known = {
        spelling: (theme, f.name) for theme, f in all_fields(themes) for spelling in (f.name, *f.metadata["aliases"])
    }
    values: dict[type, dict[str, Any]] = {theme: {} for theme in themes}
    for spelling, value in kwargs.items():
        if spelling not in known:
            near = difflib.get_close_matches(spelling, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown argument {spelling}{hint}")
        theme, name = known[spelling]
        if name in values[theme]:
            raise ConfigError(f"{spelling} and another spelling of {name} are both given")
        values[theme][name] = value
    made = [theme(**values[theme]) for theme in themes]
    for theme_args in made:
        _check(theme_args)
    return made


def default_of(f: Field[Any]) -> Any:
    return None if f.default is MISSING else f.default


def _check(theme_args: Any) -> None:
    """Types, choices and ranges of one theme. Raises ConfigError that names argument, value and rule."""
    hints = get_type_hints(type(theme_args))
    for f in fields(theme_args):
        value = getattr(theme_args, f.name)
        kind = hints[f.name]
        if kind in (float, float | None) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        is_typed = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not is_typed:
            raise ConfigError(f"{f.name}={value!r} must be {getattr(kind, '__name__', kind)}")
        if f.metadata["choices"] and value not in f.metadata["choices"]:
            raise ConfigError(f"{f.name}={value!r} must be one of {', '.join(f.metadata['choices'])}")
        rule = _RANGES.get(f.name)
        if rule is not None and value is not None and not rule[0](value):
            raise ConfigError(f"{f.name}={value} must be {rule[1]}")


_AT_LEAST_ONE = (lambda n: n >= 1, "at least 1")
_RANGES: dict[str, tuple[Any, str]] = {
    "context_length": (lambda n: n >= 2, "at least 2: one token in, one out"),
    "page_size": _AT_LEAST_ONE,
    "cuda_graph_max_bs": _AT_LEAST_ONE,
    "mem_fraction_static": (lambda x: 0 < x < 1, "between 0 and 1"),
    "max_total_tokens": _AT_LEAST_ONE,
    "max_running_requests": _AT_LEAST_ONE,
    "port": (lambda n: 0 <= n < 65536, "from 0 to 65535"),
    "max_concurrent_requests": _AT_LEAST_ONE,
    "max_body_bytes": (lambda n: n >= 1024, "at least 1024"),
    "max_stored_responses": _AT_LEAST_ONE,
    "stored_response_ttl_s": (lambda x: 0 < x < 1e8, "above 0 and below 1e8"),
    "client_timeout_s": (lambda x: 0 < x < 86400, "above 0 and below 86400"),
    "drain_timeout_s": (lambda x: 0 <= x < 86400, "from 0 to 86400"),
    "start_timeout_s": (lambda x: 0 < x < 86400, "above 0 and below 86400"),
    "watchdog_timeout_s": (lambda x: 0 < x < 86400, "above 0 and below 86400"),
    "max_sessions": _AT_LEAST_ONE,
    "max_session_tokens": _AT_LEAST_ONE,
    "schedule_conservativeness": (lambda x: 0 < x < 100, "above 0 and below 100"),
    "chunked_prefill_size": (lambda n: n == -1 or n >= 1, "at least 1, or -1 for whole prompts"),
    "priority_scheduling_preemption_threshold": (lambda n: n >= 0, "at least 0"),
    "decode_log_interval": _AT_LEAST_ONE,
    "random_seed": (lambda n: 0 <= n < 2**63, "from 0 to 2**63 - 1"),
}
