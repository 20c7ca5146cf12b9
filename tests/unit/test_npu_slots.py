"""Which form computes slots on an NPU: a small explicit choice, whose reason the device says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
import torch

from devices.base import AttentionMetadata
from devices.npu.slots import choose_slots
from devices.pages import ragged_slots
from devices.registry import try_open


def installed(package: str) -> str:
    assert package == "triton-ascend", "the other package with a module `triton` has no kernels for an NPU"
    return "3.2.0"


def missing(package: str) -> str:
    raise PackageNotFoundError(package)


def broken() -> Any:
    raise ImportError("No module named 'pybind11'")


KERNEL = object()


@pytest.mark.parametrize(
    ("form", "about", "kernel"),
    [
        (choose_slots("auto", False, installed, lambda: KERNEL), "slots by triton-ascend 3.2.0", KERNEL),
        (choose_slots("torch", False, installed), "slots in torch, as asked", None),
        (choose_slots("auto", True, installed), "slots in torch, since it is emulated", None),
        (choose_slots("auto", False, missing), "slots in torch, since triton-ascend is not installed", None),
        (
            choose_slots("auto", False, installed, broken),
            "slots in torch, since triton-ascend 3.2.0 cannot be imported: No module named 'pybind11'",
            None,
        ),
    ],
    ids=["kernel", "asked", "emulated", "missing", "broken"],
)  # fmt: skip
def test_the_choice_is_said(form: Any, about: str, kernel: object) -> None:
    assert (form.about, form.kernel) == (about, kernel)


class Launched:
    """Stands where Triton's kernel would; keeps the grid and the arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: int) -> None:
            self.grid, self.args, self.constants = grid, args, constants
            args[7].fill_(7)

        return launch


def step(page_size: int, batch: int = 3) -> AttentionMetadata:
    lens = np.arange(1, batch + 1, dtype=np.int32) * 50
    starts = np.arange(batch, dtype=np.int32) * 30
    table = torch.arange(1, 1 + 9 * batch, dtype=torch.int32).view(batch, 9)
    return AttentionMetadata(
        lens, starts + lens, table, ragged_slots(table.numpy(), starts, lens, page_size), page_size
    )


def test_the_kernel_is_launched_on_as_many_programs_as_there_are_rows_and_cores() -> None:
    for batch, programs in ((3, 3), (60, 40)):
        launched = Launched()
        form = choose_slots("auto", False, installed, lambda kernel=launched: kernel)
        assert (form.of(step(1024, batch)) == 7).all()
        assert launched.grid == (programs,)
        lens = [50 * (row + 1) for row in range(batch)]
        ends = [sum(lens[: row + 1]) for row in range(batch)]
        columns = {1: [*range(batch)], 5: [30 * row for row in range(batch)], 6: [0, *ends], 2: [0] * (batch + 1)}
        assert {place: launched.args[place].tolist() for place in columns} == columns
        assert launched.constants == {"PAGE": 1024, "BLOCK": 1024}
        assert [argument for argument in launched.args if isinstance(argument, int)] == [batch, 9]
        assert all(a.dtype == torch.int32 and a.is_contiguous() for a in launched.args if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("page_size", [128, 384])
def test_a_page_that_does_not_divide_a_block_goes_through_torch(page_size: int) -> None:
    launched = Launched()
    form = choose_slots("auto", False, installed, lambda: launched)
    found = form.of(step(page_size)).tolist()
    assert (found == step(page_size).slots.tolist()) == (page_size == 384)


def test_the_doctor_says_it_and_nothing_waits() -> None:
    from devices.npu.emulator import counting

    device = try_open("npu-sim")
    assert not isinstance(device, str)
    assert "slots in torch, since it is emulated" in device.description
    there = step(128)
    there = AttentionMetadata(there.query_lens, there.seq_lens, there.page_tables.to("npu"), there.slots, 128)
    with counting() as counted:
        found = choose_slots("auto", True).of(there)
    assert counted.counts.num_syncs == 0
    assert found.device.type == "npu"
    assert found.cpu().tolist() == there.slots.tolist()
