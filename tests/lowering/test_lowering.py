"""The kernels that NPUs can share become what an NPU is good at: vector code that fits, without loops over elements.

Compiled for Ascend 910B and A3 as far as the open compiler goes, which is one of nobody's dependencies; without it the
tests say how to get it. None of them ran on an NPU. That they compute the right thing is shown in `tests/kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ascend_lowering

ROOT = Path(__file__).resolve().parents[2]
UB_BYTES = 192 * 1024
"""Unified buffer of a vector core of A2 and A3 (the compiler's own chip table)."""

SCALAR_STORES = {
    "rms_norm add 4096": 3,
    "rms_norm 4096": 3,
    "merge d128": 4,
    "gated delta 128x128": 5,
    "mamba2 64x128": 7,
}
"""Single numbers that a program stores: a tensor of one element, such as the sum of the only row, is one."""

Report = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=["Ascend910B3", "Ascend910_9391"])
def lowered(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Report:
    folder = Path(pytestconfig.getoption("--ascend-lowering")).expanduser()
    if not (folder / "ascendnpuir" / "bin" / "bishengir-compile").exists():
        pytest.skip(f"no Ascend compiler in {folder}; run: scripts/npu/lowering_env {folder}")
    script = Path(__file__).with_name("lower.py")
    path = os.pathsep.join(map(str, (folder, ROOT)))
    done = subprocess.run(
        [sys.executable, str(script), request.param],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def test_the_kernels_become_vector_code_that_fits(lowered: Report) -> None:
    kernels = {name: found for name, found in lowered.items() if name != "careless"}
    assert len(kernels) == 19
    for name, found in kernels.items():
        assert 0 < found["ub_bytes"] < 0.9 * UB_BYTES, name
        assert (found["element_accesses"], found["int64_vectors"]) == (0, 0), name
        assert found["scalar_stores"] <= SCALAR_STORES.get(name, 0), name


def test_no_store_reads_what_it_does_not_write(lowered: Report) -> None:
    """A mask that is not true for a beginning makes a store read its whole block and write it back: programs that
    share a block lose each other's writes, and the end of the memory may be behind it."""
    for name, found in lowered.items():
        assert (found["gm_reads"] <= found["source_loads"]) == (name != "careless"), name


def test_a_row_of_the_page_table_is_read_after_it_was_written(lowered: Report) -> None:
    """A barrier for everything between the two, besides the one at the end that all kernels have."""
    assert lowered["copy_pages 8x64x128"]["barriers"] == 1
    assert lowered["update_tables page128"]["barriers"] == 2


def test_a_kernel_that_breaks_the_rules_is_seen(lowered: Report) -> None:
    careless = lowered["careless"]
    assert careless["element_accesses"] > 0
    assert careless["int64_vectors"] > 0
    assert careless["scalar_stores"] > 0
