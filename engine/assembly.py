"""Builds an engine from its arguments, in the order in which things can fail: device, model files, sizes, weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from devices.base import Capabilities, Device, UnsupportedPageSize, check_page_size
from devices.page_pool import PageFamilies, PageFamily
from devices.pages import align_resume
from devices.registry import DeviceUnavailable, open_device
from engine.config import EngineConfig, ModelArgs
from engine.core import EngineCore
from engine.errors import BadRequest, ConfigError
from engine.graphs import graph_sizes
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.registry import load_model
from engine.runner import ModelRunner
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.grammar_worker import Vocabulary
from engine.scheduler.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from engine.weights.catalog import cache_dir, resolve_model
from engine.weights.gguf import GgufSource
from engine.weights.slot import Quantization
from engine.weights.source import WeightSource, open_source
from mem_cache.allocation import KvAllocator
from mem_cache.kv_info import RowGeometry
from mem_cache.pools import AttentionKv, attention_kv
from mem_cache.rows import RowPool
from mem_cache.sizing import DoesNotFit, PoolSize, WindowLayers, attention_token_bytes, kv_budget, size_pools
from mem_cache.tree.components import components_of
from mem_cache.tree.events import KvEventLog
from mem_cache.tree.prefix_tree import PrefixTree
from session.session import SessionLimits

logger = logging.getLogger("rung")


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine and what its front needs beside it."""

    core: EngineCore
    tokenizer: Tokenizer
    config: EngineConfig
    model_config: ModelConfig
    device: Device
    pool: PoolSize
    events: KvEventLog | None


def assemble(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> Assembly:
    """Open the device, load the model, size the pools.

    Args:
        progress: called with (tensors loaded, tensors in all).
    Raises:
        ConfigError, ModelLoadError: with what to change.
    """
    device = _open(config)
    capabilities = _capabilities(config, device)
    page_size = _page_size(config, device)
    source = open_source(resolve_model(config.model.model, cache_dir(config.model_cache)))
    model_config = source.config
    tokenizer = _tokenizer(source)
    dtype = choose_dtype(config.model.dtype, model_config.saved_dtype, device.capabilities.dtypes)
    kv_dtype = dtype if config.memory.kv_cache_dtype == "auto" else getattr(torch, config.memory.kv_cache_dtype)
    context_len = _context_len(config, model_config)
    _check_attention(model_config, device)

    memory = device.memory()
    quantization = choose_quantization(config.model, model_config.saved_dtype, device)
    model, report = load_model(source, dtype, device, context_len, progress, quantization)
    logger.info("weights: %.0f MB, quantization %s", report.num_bytes / 1e6, quantization)
    chunk = chunk_tokens(config.chunk_tokens, capabilities, page_size)
    layer_bytes = attention_token_bytes(1, model_config.num_kv_heads, model_config.head_dim, kv_dtype.itemsize)
    windowed = None if config.memory.disable_hybrid_swa_memory else windowed_layers(model_config, layer_bytes, chunk)
    budget_bytes = kv_budget(memory.total_bytes, memory.available_bytes, config.mem_fraction, report.num_bytes)
    pool = _pool_size(config, model_config, windowed, budget_bytes, layer_bytes, page_size, context_len)

    events = KvEventLog() if config.cache.enable_kv_cache_events else None
    allocator = _allocator(config, pool, page_size, windowed, events)
    kv = _kv(device, model_config, pool, page_size, kv_dtype, has_window_pages=windowed is not None)
    scheduler = Scheduler(
        allocator,
        capabilities,
        policy=config.schedule.schedule_policy,
        conservativeness=config.schedule.schedule_conservativeness,
        preemption_threshold=config.schedule.priority_scheduling_preemption_threshold,
        chunk_tokens=chunk,
    )
    vocab_size = min(model_config.vocab_size, tokenizer.vocab_size)
    sizes = _graph_sizes(config, capabilities, model, pool)
    core = EngineCore(
        scheduler,
        ModelRunner(model, device, kv, allocator.geometry, pool.num_rows, vocab_size, sizes),
        context_len=context_len,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(model_config.eos_token_ids) | tokenizer.eos_token_ids,
        random_seed=config.schedule.random_seed,
        log_interval=config.schedule.decode_log_interval,
        session_limits=SessionLimits(config.session.max_sessions, config.session.max_session_tokens),
        grammars=GrammarCompiler(lambda: _vocabulary(tokenizer, core)),
        overlap=not config.schedule.disable_overlap_schedule,
    )
    _announce(capabilities, pool, page_size, context_len, config)
    return Assembly(core, tokenizer, config, model_config, device, pool, events)


def _pool_size(
    config: EngineConfig,
    model_config: ModelConfig,
    windowed: WindowLayers | None,
    budget_bytes: int,
    layer_bytes: int,
    page_size: int,
    context_len: int,
) -> PoolSize:
    full_layers = model_config.num_layers if windowed is None else model_config.windows.count(None)
    try:
        return size_pools(
            budget_bytes=budget_bytes,
            token_bytes=full_layers * layer_bytes,
            page_size=page_size,
            context_len=context_len,
            max_total_tokens=config.memory.max_total_tokens,
            max_running_requests=config.memory.max_running_requests,
            windowed=windowed,
        )
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error


def _open(config: EngineConfig) -> Device:
    try:
        choice = open_device(config.model.device, config.kernels)
    except DeviceUnavailable as error:
        raise ConfigError(error.reason) from error
    logger.info("device:\n%s", choice.explain())
    return choice.device


def _capabilities(config: EngineConfig, device: Device) -> Capabilities:
    """The device's, or with a coarser resume unit: a device that resumes at the token can always resume at a page."""
    wanted = config.memory.resume_unit
    if wanted == "token" and device.capabilities.resume_unit == "page":
        raise ConfigError(f"resume_unit=token: device {device.name!r} resumes at page borders only; use auto or page")
    return replace(device.capabilities, resume_unit="page") if wanted == "page" else device.capabilities


def _page_size(config: EngineConfig, device: Device) -> int:
    page_size = config.memory.page_size or device.capabilities.default_page_size
    try:
        return check_page_size(page_size, device.name, device.capabilities)
    except UnsupportedPageSize as error:
        raise ConfigError(str(error)) from error


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The model's tokenizer alone, for a process without the model. Raises ModelLoadError."""
    return _tokenizer(open_source(resolve_model(config.model.model, cache_dir(config.model_cache))))


def _tokenizer(source: WeightSource) -> Tokenizer:
    if isinstance(source, GgufSource):
        return Tokenizer.from_gguf(source.metadata)
    return Tokenizer.from_directory(source.path)


def _vocabulary(tokenizer: Tokenizer, core: EngineCore) -> Vocabulary:
    """What a grammar sees of the tokens. Raises BadRequest: their text depends on their neighbours."""
    table = tokenizer.token_table
    if not table.concatenates:
        raise BadRequest("grammar", "", "this model's tokenizer is not one of bytes; structured output needs one")
    hidden = tokenizer.special_ids
    tokens = [b"" if i in hidden else table.bytes_of.get(i, b"") for i in range(core.vocab_size)]
    return Vocabulary(tokens, sorted(i for i in core.eos_token_ids if i < core.vocab_size))


def choose_dtype(wanted: str, saved: str | None, supported: tuple[str, ...]) -> torch.dtype:
    """What to compute with: what was asked for; else the weights' own dtype; else one that loses nothing of it.

    Quantised weights (`saved` None) have no own dtype and take the device's preferred one, `supported[0]`. A dtype that
    the device lacks (float16 has a longer mantissa than bfloat16, and a smaller range) becomes float32.
    """
    if wanted == "auto":
        exact = [saved, "float32"] if saved is not None else []
        wanted = next((name for name in exact if name in supported), supported[0])
        if saved not in (None, wanted):
            logger.info("weights are saved in %s, which this device does not compute: they become %s", saved, wanted)
    if wanted not in supported:
        raise ConfigError(f"dtype={wanted} is not supported by this device: it computes {', '.join(supported)}")
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def choose_quantization(model: ModelArgs, saved: str | None, device: Device) -> Quantization:
    """Which weights stay in few bits; `saved` None: most are in the file.

    A device that has no products of few bits computes with the same rounded values as numbers of its dtype, if one asks
    for rounding by name.
    """
    if model.quantization == "auto":
        keeps = saved is None and device.pack is not None and model.dtype != "float32"
        return "file" if keeps else "none"
    if model.quantization == "none":
        return "none"
    if device.pack is None:
        logger.info("quantization: weights are rounded, and held as floats: this device multiplies with those only")
    return "int8" if model.quantization == "int8" else "int4"


def chunk_tokens(wanted: int | None, capabilities: Capabilities, page_size: int) -> int | None:
    """Most prompt tokens in a step. Raises ConfigError when no chunk could end where the device resumes."""
    if wanted is not None and align_resume(wanted, page_size, capabilities) == 0:
        raise ConfigError(
            f"chunked_prefill_size={wanted} is less than a page of {page_size} tokens, and this device resumes at page "
            f"borders only: no chunk could end; use at least {page_size}, or -1 for whole prompts"
        )
    return wanted


def _context_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit, wanted = model_config.max_model_len, config.model.context_length
    if wanted is None:
        return model_config.default_context_len
    if wanted > limit:
        raise ConfigError(f"context_length={wanted} is more than the model's {limit} tokens")
    return wanted


def _check_attention(model_config: ModelConfig, device: Device) -> None:
    try:
        device.attention(model_config.num_heads, model_config.num_kv_heads, model_config.head_dim)
    except ValueError as error:
        raise ConfigError(f"device {device.name!r} cannot run {model_config.architecture}: {error}") from error
    windows = sorted({window for window in model_config.windows if window is not None})
    if windows and "window" not in device.capabilities.masks:
        raise ConfigError(
            f"{model_config.architecture} has layers with a sliding window of {windows[0]} tokens and device "
            f"{device.name!r} computes only: {', '.join(sorted(device.capabilities.masks))}; use --device cpu"
        )


def _kv(
    device: Device, model: ModelConfig, pool: PoolSize, page_size: int, dtype: torch.dtype, *, has_window_pages: bool
) -> AttentionKv:
    num_pages = [pool.num_window_pages if has_window_pages and w is not None else pool.num_pages for w in model.windows]
    try:
        return attention_kv(
            device,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _graph_sizes(config: EngineConfig, capabilities: Capabilities, model: Decoder, pool: PoolSize) -> tuple[int, ...]:
    """Batch sizes of captured decode steps."""
    if not config.captures_graphs or not capabilities.graph_capture:
        return ()
    if not model.is_static:
        logger.info("graphs: none, since experts are launched as a step's tokens demand; every step runs eagerly")
        return ()
    largest = min(config.model.cuda_graph_max_bs or pool.num_rows, pool.num_rows)
    sizes = graph_sizes(capabilities, largest, model.config.num_layers)
    logger.info("graphs: decode steps of up to %s rows are captured", ", ".join(map(str, sizes)) or "no")
    return sizes


def windowed_layers(config: ModelConfig, layer_bytes: int, chunk: int | None) -> WindowLayers | None:
    """Layers that get pages of their own, given back behind their window.

    None when no layer has a window. When all have one, the full family's pages, by which rows and the prefix tree
    count, hold nothing.

    Args:
        layer_bytes: of one token's keys and values in one layer.
    """
    windows = [window for window in config.windows if window is not None]
    if not windows:
        return None
    return WindowLayers(len(windows) * layer_bytes, max(windows), chunk)


def _allocator(
    config: EngineConfig, pool: PoolSize, page_size: int, windowed: WindowLayers | None, events: KvEventLog | None
) -> KvAllocator:
    shape = [(PageFamily("full", page_size), pool.num_pages)]
    if windowed is not None:
        shape.append((PageFamily("window", page_size, window=windowed.window), pool.num_window_pages))
    families = PageFamilies(shape)
    geometry = RowGeometry(page_size, pool.row_width, tuple(family for family, _ in shape))
    rows = RowPool(pool.num_rows, geometry)
    components = components_of(geometry, families)
    tree = PrefixTree(components, page_size, config.cache.radix_eviction_policy, events)
    return KvAllocator(families, rows, tree, caching=not config.cache.disable_radix_cache)


def _announce(
    capabilities: Capabilities, pool: PoolSize, page_size: int, context_len: int, config: EngineConfig
) -> None:
    """Say what the memory bought and in which steps it is reused; warn when a cache cannot help."""
    capacity = (pool.num_pages if pool.page_bytes else pool.num_window_pages) * page_size
    logger.info(
        "kv: %d tokens (%.2f GiB) in pages of %d, %d rows; cached prefixes are reused by the page, a held row by the "
        "%s; checkpoint interval: none (no recurrent layers); context %d",
        capacity,
        pool.num_bytes / 2**30,
        page_size,
        pool.num_rows,
        capabilities.resume_unit,
        context_len,
    )
    if not config.cache.disable_radix_cache and min(context_len, capacity) <= page_size:
        logger.warning(
            "the prefix cache cannot help: its smallest hit is a page of %d tokens and a request has at most %d; "
            "use a smaller --page-size",
            page_size,
            min(context_len, capacity),
        )
