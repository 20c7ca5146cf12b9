"""Tensors on `npu` are real: memory, views, copies, types, devices, threads; aten computes what the CPU computes."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from devices.npu.emulator import ContractViolation, poison, relaxed

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("npu")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_a_tensor_goes_there_and_back(dtype: torch.dtype) -> None:
    host = (torch.randn(3, 4) * 3).to(dtype)
    there = on_npu(host)
    assert there.device == torch.device("npu", 0)
    assert there.dtype is dtype
    assert torch.equal(there.cpu().view(torch.uint8), host.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 5, 1)])
def test_odd_shapes_exist(shape: tuple[int, ...]) -> None:
    there = torch.ones(shape, device="npu")
    assert there.shape == shape
    assert torch.equal((there + 1).cpu(), torch.full(shape, 2.0))


def test_a_view_writes_through_and_shares_the_storage() -> None:
    base = torch.zeros(4, 6, device="npu")
    for view in (
        base.view(2, 12),
        base[1:3],
        base.t(),
        base.unsqueeze(0),
        base.as_strided((2, 2), (6, 1)),
        base.flatten(),
    ):
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    base.t()[2, 1] = 5.0
    base.view(2, 12)[1] += 1.0
    expected = torch.zeros(4, 6)
    expected[1, 2] = 5.0
    expected[2:] += 1.0
    assert torch.equal(base.cpu(), expected)


def test_strides_and_offsets_are_the_cpus() -> None:
    host = torch.arange(24.0).view(2, 3, 4)
    there = on_npu(host)
    for cut in (lambda x: x[:, 1], lambda x: x.permute(2, 0, 1), lambda x: x[..., ::2], lambda x: x.expand(5, 2, 3, 4)):
        assert (cut(there).stride(), cut(there).storage_offset()) == (cut(host).stride(), cut(host).storage_offset())
        assert torch.equal(cut(there).cpu(), cut(host))


COMPUTATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + x.exp()).div_(3) - x.mean(-1, keepdim=True),
    "matrix product": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: F.rms_norm(x, (8,), x[0]),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "embedding": lambda x: F.embedding(torch.arange(4, device=x.device), x),
    "cat and stack": lambda x: torch.stack([torch.cat([x, x]), torch.cat([x, -x])]),
    "sort": lambda x: x.sort(dim=-1, descending=True),
    "topk": lambda x: x.topk(3),
    "cumsum": lambda x: x.cumsum(0),
    "argmax": lambda x: x.argmax(-1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "boolean index": lambda x: x[x > 0],
    "index": lambda x: x[torch.tensor([1, 0], device=x.device)],
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1], device=x.device)),
    "scatter": lambda x: x.scatter(1, (x > 0).long(), 7.0),
    "unique": lambda x: (x > 0).long().unique(return_counts=True),
    "nonzero": lambda x: (x > 0).nonzero(),
    "searchsorted": lambda x: torch.searchsorted(x[0].sort().values, x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1], device=x.device), dim=0),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "tri": lambda x: x.tril() + x.triu(1),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv": lambda x: F.conv1d(x[None], x[:, :4, None].expand(4, 4, 3).contiguous()),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_aten_computes_what_the_cpu_computes(name: str) -> None:
    host = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected, found = COMPUTATIONS[name](host), COMPUTATIONS[name](on_npu(host))
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(expected, found, strict=True):
        assert other.device.type == "npu"
        torch.testing.assert_close(other.cpu(), one, atol=1e-6, rtol=1e-6)


def test_in_place_operators_write_into_the_memory() -> None:
    table = torch.zeros(5, 2, device="npu")
    table.index_copy_(0, torch.tensor([1, 3], device="npu"), torch.ones(2, 2, device="npu"))
    table[4] = 3.0
    table[torch.tensor([0], device="npu")] = 2.0
    table.add_(1.0)
    assert table.cpu()[:, 0].tolist() == [3.0, 2.0, 1.0, 2.0, 4.0]
    table.copy_(torch.ones(5, 2))
    table[1:2].copy_(torch.zeros(1, 2, device="npu"))
    assert table.sum().item() == 8.0


def test_a_resized_tensor_gets_memory_of_its_own() -> None:
    tensor = torch.arange(4.0, device="npu")
    tensor.resize_(2, 6)
    tensor.fill_(1.0)
    assert tensor.shape == (2, 6)
    assert tensor.sum().item() == 12.0


def test_modules_parameters_and_copies() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    x = torch.randn(3, 8)
    expected = module(x)
    moved = copy.deepcopy(module).to("npu")
    again = copy.deepcopy(moved)
    for one in (moved, again):
        assert {parameter.device.type for parameter in one.parameters()} == {"npu"}
        assert torch.equal(one(on_npu(x)).cpu(), expected)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_gradients_flow() -> None:
    weight = torch.randn(3, 3, device="npu", requires_grad=True)
    (weight @ weight).sum().backward()
    host = weight.detach().cpu().requires_grad_()
    (host @ host).sum().backward()
    assert weight.grad is not None
    assert host.grad is not None
    assert torch.allclose(weight.grad.cpu(), host.grad)


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(2, 3, device="npu")
        x[0] += 1
        assert x.view(6).sum().item() == 9.0


def test_the_second_device_is_another() -> None:
    x = torch.ones(2, device="npu:1")
    assert (x + 1).device == torch.device("npu", 1)
    assert torch.zeros(2, device=x.device).device.index == 1


def test_operands_on_both_sides_are_refused() -> None:
    there = torch.ones(3, device="npu")
    with pytest.raises(ContractViolation, match="on the CPU and on the NPU") as refusal:
        there + torch.ones(3)
    assert refusal.value.rule == "one-device"
    assert (there + torch.tensor(2.0)).sum().item() == 9.0  # a scalar may come from the host
    assert there[torch.tensor([0, 2])].shape == (2,)  # and indices


def test_float64_does_not_exist() -> None:
    with pytest.raises(ContractViolation, match="float64"):
        torch.zeros(2, device="npu", dtype=torch.float64)
    with pytest.raises(ContractViolation, match="float64"):
        torch.zeros(2, device="npu").double()
    with relaxed(dtypes=False):
        assert torch.zeros(2, device="npu").double().dtype is torch.float64


def test_a_tensor_says_where_it_is() -> None:
    assert repr(torch.ones(2, device="npu")) == "tensor([1., 1.], device='npu:0')"
    assert repr(torch.ones(2)) == "tensor([1., 1.])"


def test_poison_is_what_a_freed_page_holds() -> None:
    kv, ids = torch.zeros(4, 2, device="npu"), torch.zeros(4, dtype=torch.int32, device="npu")
    poison([kv[1:2], ids[2:]])
    assert kv.cpu().isnan().all(dim=1).tolist() == [False, True, False, False]
    assert ids.cpu().tolist() == [0, 0, -(2**31), -(2**31)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_goes_back() -> None:
    """200 tensors of 4 MiB one after the other, each with a view, a copy and a result, leave nothing behind."""

    def touch() -> None:
        tensor = torch.ones(1 << 20, device="npu")
        (tensor.view(1024, -1)[3] + 1).cpu()

    for _ in range(3):
        touch()
    gc.collect()
    before = resident_bytes()
    for _ in range(200):
        touch()
    gc.collect()
    assert resident_bytes() - before < 64 << 20


def test_threads_compute_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            host = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
            x = on_npu(host)
            for _ in range(20):
                assert torch.equal((x @ x + x).cpu(), host @ host + host)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
