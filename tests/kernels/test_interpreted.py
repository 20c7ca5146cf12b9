"""Starts the process in which kernels run in Triton's interpreter; `interpreted/conftest.py` says why it is another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels' tests need triton: pip install 'rung[dev]'")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_kernels_are_right_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels/interpreted", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout
