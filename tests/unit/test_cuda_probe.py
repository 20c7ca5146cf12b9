"""Why a CUDA device does not open: every reason is one line that names the limit and the way out."""

from dataclasses import replace

import pytest

from devices.cuda.probe import Machine, refusal, this_machine

GOOD = Machine("2.13.0+cu130", "13.0", True, "NVIDIA H200", (9, 0), "3.7.1")


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.0+git1234"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_machine_with_everything_opens(triton: str, capability: tuple[int, int]) -> None:
    assert refusal(replace(GOOD, triton=triton, capability=capability), "auto") is None


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(GOOD, torch="2.13.0+cpu", torch_cuda=None), ("has no CUDA", "--device cpu")),
        (replace(GOOD, has_gpu=False), ("CUDA 13.0", "no usable GPU or driver", "--device cpu")),
        (replace(GOOD, capability=(7, 5), gpu="Tesla T4"), ("Tesla T4", "7.5", "8.0", "--kernels torch")),
        (replace(GOOD, triton=None), ("triton is not installed", "pip install", "--kernels torch")),
        (replace(GOOD, triton="3.5.1"), ("triton 3.5.1 is untested", "3.6 to 3.9", "--kernels torch")),
        (replace(GOOD, triton="3.10.0"), ("triton 3.10.0 is untested", "--kernels torch")),
        (replace(GOOD, triton="nightly"), ("triton nightly is untested", "--kernels torch")),
    ],
    ids=["no-cuda", "no-gpu", "old-gpu", "no-triton", "old-triton", "new-triton", "odd-triton"],
)
def test_a_refusal_is_one_line_with_the_limit_and_the_way_out(machine: Machine, words: tuple[str, ...]) -> None:
    reason = refusal(machine, "auto")
    assert reason is not None
    assert "\n" not in reason
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize("machine", [replace(GOOD, triton=None), replace(GOOD, capability=(7, 0))])
def test_the_torch_forms_need_no_triton_and_no_new_gpu(machine: Machine) -> None:
    assert refusal(machine, "torch") is None


def test_this_machine_is_looked_at_without_an_error() -> None:
    machine = this_machine()
    assert machine.has_gpu or refusal(machine, "auto") is not None
