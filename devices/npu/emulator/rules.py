"""What real hardware refuses, corrupts or ignores and a CPU would not: the switches, and the error that names a rule.

Each rule has its source beside it, so that who meets one can read on. A violation is a bug in the caller: on an NPU the
same call fails in the operator's tiling, hangs, or (the worst kind, said in the text) silently gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

DOCS = "torch_npu 2.13 operator docs"
GRAPHS = "torch_npu 2.13 npu/graphs.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strictness:
    """Which kinds of rule are enforced; all are. A test that wants to see the hardware's silent result turns one off.

    Attributes:
        dtypes: data types an operator does not have (int32 data of a scatter, float64 anywhere).
        attention_dtypes: attention in float32 (and float16 with packed queries), which no NPU has.
        bounds: block ids, slots and indices out of range; on hardware they corrupt memory without a word.
        pages: page sizes that an attention path does not compute.
        host_lists: lengths must be host lists, as long as the batch or one, cumulative or not as the layout says.
        masks: form and size of attention masks for each sparse mode.
        shapes: heads, head size, ratio, layouts and element counts.
        devices: operands on the CPU and on the NPU in one call.
        contiguity: tensors that must be contiguous.
        duplicates: a slot written twice in one call; which write wins is not defined.
        graphs: host syncs and uploads inside a capture, a replay without its update, an unknown key of an update.
    """

    dtypes: bool = True
    attention_dtypes: bool = True
    bounds: bool = True
    pages: bool = True
    host_lists: bool = True
    masks: bool = True
    shapes: bool = True
    devices: bool = True
    contiguity: bool = True
    duplicates: bool = True
    graphs: bool = True


class ContractViolation(RuntimeError):
    """A call that an NPU would not compute as asked.

    Attributes:
        rule: short name of the rule, e.g. "block-ids".
        operator: name of the operator or call.
    """

    def __init__(self, rule: str, operator: str, text: str) -> None:
        self.rule, self.operator = rule, operator
        super().__init__(f"emulated NPU: {operator} breaks rule {rule!r}: {text}")


class _Switches:
    """The process's strictness: the emulated device is process-wide, and so is this."""

    def __init__(self) -> None:
        self.now = Strictness()


_switches = _Switches()


def strictness() -> Strictness:
    """The switches in force."""
    return _switches.now


@contextmanager
def relaxed(**switches: bool) -> Iterator[Strictness]:
    """Inside, the named switches (see `Strictness`) have the given values."""
    before = _switches.now
    _switches.now = replace(before, **switches)
    try:
        yield _switches.now
    finally:
        _switches.now = before


def require(condition: bool, rule: str, operator: str, text: str) -> None:
    """ContractViolation unless `condition` holds."""
    if not condition:
        raise ContractViolation(rule, operator, text)
