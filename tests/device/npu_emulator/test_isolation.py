"""The device is process-wide and stays: nothing happens at import, a second install does nothing, the CPU computes what
it did before, and the real torch_npu is never replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from devices.npu import emulator
from devices.npu.emulator.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[3]

LIFE_OF_A_PROCESS = """
import devices.npu, sys
assert "torch" not in sys.modules
import devices.npu.emulator as emulator
import copy, io, torch
import torch.nn.functional as F
assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not hasattr(torch, "npu")
assert not hasattr(torch.ops.npu, "npu_rms_norm")
torch.set_num_threads(1)

def work():
    torch.manual_seed(0)
    results = []
    x = torch.randn(8, 16, requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.LayerNorm(16))
    y = copy.deepcopy(layer)(x)
    y.sum().backward()
    results += [y.detach(), x.grad, x.detach().to(torch.float64).softmax(-1), x.detach()[x.detach() > 0]]
    with torch.inference_mode():
        q = torch.randn(1, 2, 4, 8)
        results += [F.scaled_dot_product_attention(q, q, q, is_causal=True), q.bfloat16() @ q.bfloat16().mT]
    buffer = io.BytesIO()
    torch.save({"y": y.detach()}, buffer)
    buffer.seek(0)
    results += [torch.load(buffer)["y"], torch.randn(3, generator=torch.Generator().manual_seed(3))]
    results += [torch.from_numpy(y.detach().numpy()), torch.ones(1, dtype=torch.float64), torch.arange(4).unique()]
    return results, repr(x.detach())

before, shown = work()
emulator.install()
emulator.install()
after, shown_after = work()
assert len(before) == len(after)
for one, other in zip(before, after):
    assert one.device == other.device == torch.device("cpu")
    assert one.dtype is other.dtype and torch.equal(one, other)
assert shown == shown_after
assert torch.zeros(2).device.type == "cpu" and torch.get_default_device().type == "cpu"

# Tensors, views and graphs are alive when the interpreter ends.
x = torch.ones(4, 4, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = x + 1
torch.alive = (x, x[1:].t(), x @ x, x.cpu(), graph, y)
"""


def test_a_process_imports_works_installs_works_the_same_and_ends() -> None:
    """Importing does nothing, the CPU's results are the same bits before and after, and the end is silent."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIFE_OF_A_PROCESS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_device_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that forgot its own install meets a device of that kind as it would meet torch_npu's."""
    monkeypatch.setattr(emulator._installed, "done", False)
    with pytest.raises(emulator.EmulatorUnavailable, match="already has a device 'npu'"):
        emulator.install()


def test_the_backend_answers_what_torch_npu_would(npu: SimpleNamespace) -> None:
    assert npu.npu is torch.npu
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 2
    assert "emulated" in torch.npu.get_device_name()
    assert "emulated" in npu.__version__
    assert "emulated" in emulator.BANNER
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total
    torch.npu.set_device(1)
    assert torch.npu.current_device() == 1
    assert torch.ones(1, device="npu").device.index == 1
    torch.npu.set_device("npu:0")
    with pytest.raises(RuntimeError, match="has 2 devices"):
        torch.npu.set_device(2)
    torch.npu.manual_seed(3)
    first = torch.rand(3, device="npu")
    torch.npu.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(3, device="npu").cpu())


def test_operators_have_the_vendors_schemas(npu: SimpleNamespace) -> None:
    """What is registered reads, name by name and default by default, as the dump of the vendor's list does."""
    for text in SCHEMAS:
        schema = torch._C.parse_schema(text)
        namespace, name = schema.name.split("::")
        overload = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
        assert str(overload._schema) == str(schema)
        assert hasattr(npu, name)
