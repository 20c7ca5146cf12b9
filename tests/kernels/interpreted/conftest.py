"""Tests that run kernels in Triton's interpreter, each under a meter that checks bounds and races.

Interpreted and compiled kernels cannot share a process, and `TRITON_INTERPRET` must be set before Triton is imported.
So a plain `pytest` skips this folder, and `tests/kernels/test_interpreted.py` runs it in a process of its own. By hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted -k decode

To add a kernel: it and its launcher go to `devices/cuda/kernels/`, its torch form to `devices.torch_forms/`, and a test
that calls both with the same arguments comes here. The fixture `meter` has what the test's kernels read and wrote. Then
a `KernelCase` goes to `devices/cuda/kernel_cases.py`, whose docstring says how it gets its budget.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from kernels.interpreter import install
    from kernels.meter import Meter

    install()
    np.seterr(all="ignore")  # dead lanes divide by zero and take logarithms of it, as on a GPU

    @pytest.fixture(autouse=True)
    def meter() -> Iterator[Meter]:
        with Meter() as active:
            yield active
