"""Runs our Ascend kernels in Triton's interpreter against their torch forms, in a process of its own.

TRITON_INTERPRET=1 PYTHONPATH=<repository> python tests/lowering/interpret.py
"""

from __future__ import annotations

from random import Random

import numpy as np
import torch

from devices.base import AttentionMetadata
from devices.npu.kernels.slots import kernels, slots_reference, update_reference
from devices.npu.slots import choose_slots
from devices.pages import ragged_slots

NOBODY_WROTE = -7


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lens: list[int]) -> torch.Tensor:
    return ints([sum(lens[:i]) for i in range(len(lens))])


def check_slots(random: Random, built: dict, page_size: int) -> None:
    shift, width, batch = page_size.bit_length() - 1, 6, random.randrange(1, 7)
    table = torch.randint(1, 1000, (9, width), dtype=torch.int32)
    rows = ints([random.randrange(9) for _ in range(batch)])
    starts = [random.randrange(width * page_size - 1) for _ in range(batch)]
    lens = [random.choice([1, random.randrange(1, width * page_size - start + 1)]) for start in starts]
    out = torch.full((sum(lens) + 8,), NOBODY_WROTE, dtype=torch.int32)
    grid = (random.randrange(1, 5),)
    built["slots_kernel"][grid](
        table, rows, ints(starts), ints(lens), starts_of(lens), out, batch, width, shift=shift, page_size=page_size
    )
    expected = slots_reference(table, rows, ints(starts), ints(lens), page_size, sum(lens))
    assert out[: sum(lens)].equal(expected)
    assert (out[sum(lens) :] == NOBODY_WROTE).all()
    pages = table[rows.long(), ints(starts).long() // page_size]
    out = torch.full((batch + 8,), NOBODY_WROTE, dtype=torch.int32)
    built["decode_slots_kernel"][grid](pages, ints(starts), out, batch, shift=shift, page_size=page_size, block=4)
    assert out[:batch].equal(slots_reference(table, rows, ints(starts), torch.ones_like(rows), page_size, batch))
    assert (out[batch:] == NOBODY_WROTE).all()


def check_step(random: Random, page_size: int) -> None:
    """What the device calls: the kernel's form and the torch form, and the engine's own arithmetic on the host."""
    batch, width = random.randrange(1, 7), 6
    lens = np.array([random.randrange(1, 2 * page_size) for _ in range(batch)], dtype=np.int32)
    starts = np.array([random.randrange(4 * page_size) for _ in range(batch)], dtype=np.int32)
    table = torch.randint(1, 1000, (batch, width), dtype=torch.int32)
    slots = ragged_slots(table.numpy(), starts, lens, page_size)
    step = AttentionMetadata(lens, starts + lens, table, slots, page_size)
    form = choose_slots("auto", False, lambda package: "9.9")
    assert form.kernel is not None
    for found in (form.of(step), choose_slots("torch", False).of(step)):
        assert found.dtype == torch.int32
        assert found.tolist() == slots.tolist()


def check_update(random: Random, built: dict) -> None:
    table = torch.zeros((9, 40), dtype=torch.int32)
    n = random.randrange(1, 6)
    rows, firsts = random.sample(range(9), n), [random.randrange(20) for _ in range(n)]
    lens = [random.randrange(21) for _ in range(n)]
    pages = torch.randint(1, 1000, (sum(lens) + 1,), dtype=torch.int32)
    expected = table.clone()
    update_reference(expected, ints(rows), ints(firsts), ints(lens), pages)
    built["update_kernel"][(random.randrange(1, 4),)](
        table, ints(rows), ints(firsts), ints(lens), starts_of(lens), pages, n, 40, block=8
    )
    assert table.equal(expected)


def main() -> None:
    random, built = Random(0), kernels()
    torch.manual_seed(0)
    for page_size in (16, 128):
        for _ in range(6):
            check_slots(random, built, page_size)
        check_step(random, page_size)
    check_step(random, 384)  # no power of two: in torch
    for _ in range(10):
        check_update(random, built)
    print("equal")


if __name__ == "__main__":
    main()
