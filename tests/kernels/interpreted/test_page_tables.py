"""Slots and page tables: against a table kept by plain loops, and the torch form against the same."""

from itertools import chain

import numpy as np
import pytest
import torch
from kernels.meter import Meter

from devices.base import AttentionMetadata
from devices.cuda.arguments import BadKernelArgument
from devices.cuda.kernels import page_tables as kernel
from devices.npu.slots import choose_slots
from devices.pages import ragged_slots
from devices.torch_forms import page_tables as torch_form

FORMS = pytest.mark.parametrize("form", [kernel, torch_form], ids=["kernel", "torch"])


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """Rows with committed tokens that get new ones; some rows are only changed, some get no new page."""

    def __init__(self, page_size: int, seed: int, num_rows: int = 9, width: int = 40) -> None:
        draw = np.random.default_rng(seed)
        self.page_size = page_size
        self.tables = draw.integers(1, 5000, (num_rows, width), dtype=np.int32)
        entries = int(draw.integers(1, num_rows))
        self.rows = draw.permutation(num_rows)[:entries].tolist()
        room = width * page_size
        self.starts = draw.integers(0, room, entries).tolist()
        self.new = [int(draw.integers(0, min(room - start, 700) + 1)) for start in self.starts]
        if seed % 2:
            self.new = [min(1, n) for n in self.new]  # decode
        self.at = draw.integers(0, width, entries).tolist()
        self.pages = [draw.integers(1, 5000, draw.integers(0, min(8, width - at) + 1)).tolist() for at in self.at]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        tables, slots = self.tables.copy(), []
        for row, start, new, at, pages in zip(self.rows, self.starts, self.new, self.at, self.pages, strict=True):
            for index, page in enumerate(pages):
                tables[row, at + index] = page
            for position in range(start, start + new):
                page, offset = divmod(position, self.page_size)
                slots.append(int(tables[row, page]) * self.page_size + offset)
        return torch.from_numpy(tables), int32(slots)

    def run(self, form: object) -> tuple[torch.Tensor, torch.Tensor]:
        tables = torch.from_numpy(self.tables.copy())
        slots = torch.full((sum(self.new),), -7, dtype=torch.int32)
        form.update_tables(  # type: ignore[attr-defined]
            tables,
            int32(self.rows),
            int32([0, *np.cumsum([len(pages) for pages in self.pages])]),
            int32(self.at),
            int32([*chain(*self.pages)]),
            int32(self.starts),
            int32([0, *np.cumsum(self.new)]),
            slots,
            self.page_size,
        )
        return tables, slots


@FORMS
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_tables_and_slots_are_what_loops_say(form: object, page_size: int, seed: int) -> None:
    step = Step(page_size, seed)
    tables, slots = step.run(form)
    expected_tables, expected_slots = step.expected()
    assert torch.equal(tables, expected_tables)
    assert torch.equal(slots, expected_slots)


@FORMS
def test_a_step_without_tokens_or_changes_touches_nothing(form: object) -> None:
    step = Step(16, 0)
    step.new, step.pages = [0] * len(step.rows), [[] for _ in step.rows]
    tables, _ = step.run(form)
    assert torch.equal(tables, torch.from_numpy(step.tables))


def test_a_row_far_behind_two_gib_is_not_folded_back_by_int32() -> None:
    """The interpreter overflows as a GPU does; the meter says which address the kernel asked for."""
    none, width, tables = int32([0]), 1 << 13, int32([0])
    with pytest.raises(Exception, match=f"load of 4 bytes at address {tables.data_ptr() + (1 << 20) * width * 4},"):
        kernel.update_tables_kernel[(1,)](
            tables,
            int32([1 << 20]),
            int32([0, 0]),
            none,
            none,
            none,
            int32([0, 1]),
            none,
            1,
            width,
            PAGE=16,
            BLOCK=1024,
        )


def test_each_program_reads_its_own_row_only(meter: Meter) -> None:
    step = Step(64, 1)
    step.run(kernel)
    entries, changes, tokens = len(step.rows), sum(map(len, step.pages)), sum(step.new)
    assert meter.written_bytes == 4 * (changes + tokens)
    assert meter.read_bytes <= 4 * (6 * entries + 2 * changes + 2 * tokens)


def test_few_programs_serve_all_rows() -> None:
    """As on an NPU, where programs are as many as cores."""
    step = Step(16, 0)
    tables, slots = torch.from_numpy(step.tables.copy()), torch.full((sum(step.new),), -7, dtype=torch.int32)
    changes, tokens = (int32([0, *np.cumsum([*lens])]) for lens in (map(len, step.pages), step.new))
    pages = int32([*chain(*step.pages)])
    kernel.update_tables_kernel[(2,)](
        tables, int32(step.rows), changes, int32(step.at), pages, int32(step.starts), tokens, slots,
        len(step.rows), tables.shape[1], PAGE=16, BLOCK=64,
    )  # fmt: skip
    expected_tables, expected_slots = step.expected()
    assert torch.equal(tables, expected_tables)
    assert torch.equal(slots, expected_slots)


@pytest.mark.parametrize("page_size", [16, 128, 384])
def test_an_npu_gets_the_slots_that_the_host_computes(page_size: int) -> None:
    """The form that an NPU with Triton-Ascend launches, and its torch form; 384 divides no block, so both are torch."""
    draw = np.random.default_rng(page_size)
    lens = draw.integers(1, 2 * page_size, 6).astype(np.int32)
    starts = draw.integers(0, 4 * page_size, 6).astype(np.int32)
    table = torch.from_numpy(draw.integers(1, 1000, (6, 6)).astype(np.int32))
    slots = ragged_slots(table.numpy(), starts, lens, page_size)
    step = AttentionMetadata(lens, starts + lens, table, slots, page_size)
    form = choose_slots("auto", False, lambda package: "9.9")
    assert form.kernel is kernel.update_tables_kernel
    for found in (form.of(step), choose_slots("torch", False).of(step)):
        assert found.dtype == torch.int32
        assert found.tolist() == slots.tolist()


def test_bad_arguments_are_named() -> None:
    step = Step(16, 0)
    step.page_size = 24
    with pytest.raises(BadKernelArgument, match="page_size=24"):
        step.run(kernel)
    step.page_size, step.tables = 16, step.tables.astype(np.int64)
    with pytest.raises(BadKernelArgument, match="int64"):
        step.run(kernel)
