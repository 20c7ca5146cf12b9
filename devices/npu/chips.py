"""The Ascend chips that Rung knows, by the name that the driver gives them, and what each can do.

Facts are those of the operators' documentation (torch_npu 2.13) and of engines that serve on these chips; nothing here
was measured. A chip that is not in the table is refused rather than guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass

from devices.base import Capabilities
from devices.npu.arguments.attention import PREFILL_PAGES, is_decode_page

PAGE_SIZES = tuple(size for size in PREFILL_PAGES if is_decode_page(size))
"""Pages that attention with one query token and with more accept alike."""

DEFAULT_PAGE_SIZE = 128

GRAPH_STREAMS = 1800
"""Of about 2,000 streams and events that a device has, what captured graphs may take; the rest is the collectives'.
vllm-ascend counts so; running out is error 207008, "stream resources insufficient"."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chip:
    """A family of chips.

    Attributes:
        family: A2, A3 or A5.
        prefixes: of the names of `torch.npu.get_device_name`.
        is_documented: whether the documentation of every operator that Rung calls names the family.
    """

    family: str
    prefixes: tuple[str, ...]
    is_documented: bool


CHIPS = (
    Chip("A3", ("Ascend910_93", "Ascend910C"), True),
    Chip("A2", ("Ascend910B",), True),
    Chip("A5", ("Ascend950",), False),
)


def chip_of(device_name: str) -> Chip | None:
    """The chip that a driver's name means: "Ascend910B2", "Ascend 910_9382", "Ascend910B4 (emulated)"."""
    name = device_name.replace(" ", "")
    return next((chip for chip in CHIPS if name.startswith(chip.prefixes)), None)


def npu_capabilities(total_bytes: int, *, graph_buckets: tuple[int, ...] | None = None) -> Capabilities:
    """What an NPU with so much memory does correctly.

    Args:
        graph_buckets: instead of those that the memory allows.
    """
    return Capabilities(
        page_sizes=PAGE_SIZES,
        default_page_size=DEFAULT_PAGE_SIZE,
        resume_unit="page",
        dtypes=("bfloat16", "float16"),
        kv_dtypes=("bfloat16", "float16"),
        slot_dtype="int32",
        table_dtype="int32",
        masks=frozenset({"causal", "window"}),
        graph_capture=True,
        graph_buckets=_buckets(total_bytes) if graph_buckets is None else graph_buckets,
        graph_streams=GRAPH_STREAMS,
        collectives="hccl",
    )


def _buckets(total_bytes: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8; the largest as SGLang has it for the memory of one card."""
    largest = 16 if total_bytes <= 32 * GIB else 64 if total_bytes <= 64 * GIB else 256
    return (1, 2, 4, *range(8, largest + 1, 8))
