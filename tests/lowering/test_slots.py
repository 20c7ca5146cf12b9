"""The slot kernels for Ascend: equal to their torch forms in Triton's interpreter, and made of what an NPU is good at.

The second needs a compiler that is not one of our dependencies; without it the test says how to get it. Neither ran on
an NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices.npu.kernels.slots import slots_reference, update_reference
from devices.pages import ragged_slots

ROOT = Path(__file__).resolve().parents[2]
UB_BYTES = 192 * 1024
"""Unified buffer of a vector core of A2 and A3 (the compiler's own chip table)."""


@given(st.data(), st.sampled_from([16, 128]))
def test_the_torch_forms_are_the_engines_own_arithmetic(data: st.DataObject, page_size: int) -> None:
    table = torch.arange(1, 41, dtype=torch.int32).flip(0).view(8, 5)
    rows = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    starts = [data.draw(st.integers(0, 5 * page_size - 1)) for _ in rows]
    lens = [data.draw(st.integers(1, 5 * page_size - start)) for start in starts]
    rows_t, starts_t, lens_t = (torch.tensor(x, dtype=torch.int32) for x in (rows, starts, lens))
    ours = ragged_slots(table.numpy()[rows], starts_t.numpy(), lens_t.numpy(), page_size)
    assert slots_reference(table, rows_t, starts_t, lens_t, page_size, sum(lens)).tolist() == ours.tolist()
    n = torch.tensor([2, 0, 3], dtype=torch.int32)
    where = torch.tensor([1, 4, 6], dtype=torch.int32)
    update_reference(
        table, where, torch.tensor([3, 0, 1], dtype=torch.int32), n, torch.arange(50, 55, dtype=torch.int32)
    )
    assert (table[1].tolist()[3:], table[6].tolist()[1:4]) == ([50, 51], [52, 53, 54])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install 'rung[cuda]'")
def test_the_kernels_equal_their_torch_forms_in_the_interpreter() -> None:
    assert run("interpret.py", [ROOT], TRITON_INTERPRET="1").split() == ["equal"]


@pytest.fixture(scope="module")
def lowered(pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    folder = Path(pytestconfig.getoption("--ascend-lowering")).expanduser()
    if not (folder / "ascendnpuir" / "bin" / "bishengir-compile").exists():
        pytest.skip(f"no Ascend compiler in {folder}; run: scripts/npu/lowering_env {folder}")
    report: dict[str, dict[str, Any]] = json.loads(run("lower.py", [folder, ROOT], "Ascend910B3").splitlines()[-1])
    return report


@pytest.mark.ascend_lowering
def test_the_kernels_become_vector_code_that_fits(lowered: dict[str, dict[str, Any]]) -> None:
    kernels = {name: found for name, found in lowered.items() if name != "careless"}
    assert len(kernels) == 7
    for name, found in kernels.items():
        assert 0 < found["ub_bytes"] < 0.9 * UB_BYTES, name
        assert (found["scalar_stores"], found["int64_vectors"]) == (0, 0), name
        assert found["gm_writes"] == 1, name


@pytest.mark.ascend_lowering
def test_a_kernel_that_breaks_the_rules_is_seen(lowered: dict[str, dict[str, Any]]) -> None:
    assert lowered["careless"]["scalar_stores"] > 0


def run(script: str, path: list[Path], *arguments: str, **environment: str) -> str:
    everything = os.environ | environment | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=everything, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
