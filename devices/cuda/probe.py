"""Whether a CUDA device can open here, and if not, why and what to do: one line, before anything is imported twice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from devices.base import KernelChoice

LEAST_CAPABILITY = (8, 0)
TRITON_VERSIONS = ((3, 6), (3, 9))
"""The kernels are judged with the first to the last of these; they use nothing newer or removed."""

TORCH_FORMS = "use --kernels torch, which needs no Triton and is slower"


@dataclass(frozen=True, slots=True)
class Machine:
    """What matters of a machine.

    Attributes:
        torch_cuda: version of CUDA that torch was built for.
        has_gpu: whether torch finds a GPU and its driver.
        capability: compute capability, (major, minor).
        triton: installed version.
    """

    torch: str
    torch_cuda: str | None
    has_gpu: bool = False
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    triton: str | None = None


def this_machine() -> Machine:
    import torch

    cuda = torch.version.cuda
    if cuda is None or not torch.cuda.is_available():
        return Machine(torch.__version__, cuda)
    index = torch.cuda.current_device()
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return Machine(torch.__version__, cuda, True, name, capability, triton)


def refusal(machine: Machine, kernels: KernelChoice) -> str | None:
    """Why the device cannot open on a machine, and the way out; None when it can."""
    if machine.torch_cuda is None:
        return f"torch {machine.torch} has no CUDA; install a CUDA build of torch, or use --device cpu"
    if not machine.has_gpu:
        return (
            f"torch {machine.torch} is built for CUDA {machine.torch_cuda} but finds no usable GPU or driver; "
            "see nvidia-smi, or use --device cpu"
        )
    return None if kernels == "torch" else _kernels_refusal(machine)


def _kernels_refusal(machine: Machine) -> str | None:
    if machine.capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, numbers)) for numbers in (machine.capability, LEAST_CAPABILITY))
        return f"{machine.gpu} has compute capability {have}, the kernels need {least} (Ampere) or newer; {TORCH_FORMS}"
    first, last = (".".join(map(str, numbers)) for numbers in TRITON_VERSIONS)
    if machine.triton is None:
        return f"triton is not installed; pip install 'rung[cuda]', or {TORCH_FORMS}"
    if not TRITON_VERSIONS[0] <= _release(machine.triton) <= TRITON_VERSIONS[1]:
        return f"triton {machine.triton} is untested: the kernels are judged with {first} to {last}; {TORCH_FORMS}"
    return None


def _release(text: str) -> tuple[int, int]:
    """(major, minor) of a version; (0, 0) of what is no version."""
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)
