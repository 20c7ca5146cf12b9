"""Every way in which a machine has no usable NPU is one line that says what to do; and what a found one declares."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from devices.npu import probe
from devices.npu.chips import GIB, chip_of, npu_capabilities
from devices.registry import DeviceUnavailable, try_open

VISIBLE = probe.VISIBLE_DEVICES


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands in for an installed torch_npu: `vendor(devices=1, name="Ascend910B4")`, or one whose import fails."""

    def install(*, devices: int = 1, name: str = "Ascend910B4", import_error: BaseException | None = None) -> None:
        monkeypatch.setattr(probe, "find_spec", lambda module: SimpleNamespace() if module == "torch_npu" else None)
        monkeypatch.delenv(VISIBLE, raising=False)
        module = ModuleType("torch_npu")
        module.__version__ = "2.13.0"  # type: ignore[attr-defined]
        module.npu = SimpleNamespace(  # type: ignore[attr-defined]
            is_available=lambda: devices > 0, device_count=lambda: devices, get_device_name=lambda: name
        )
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        if import_error is not None:
            monkeypatch.delitem(sys.modules, "torch_npu")
            plain = builtins.__import__

            def failing(name: str, *args: Any, **kwargs: Any) -> Any:
                if name == "torch_npu":
                    raise import_error
                return plain(name, *args, **kwargs)

            monkeypatch.setattr(builtins, "__import__", failing)

    return install


def reason() -> str:
    """Why "npu" does not open; one line."""
    refused = try_open("npu")
    assert isinstance(refused, str)
    assert "\n" not in refused
    return refused


def test_torch_npu_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda module: None)
    assert reason() == "torch_npu is not installed (pip install 'rung[npu]' on a machine with CANN)"


def test_torch_npu_is_installed_without_cann(vendor: Callable[..., None]) -> None:
    missing = "libhccl.so: cannot open shared object file: No such file or directory\nmore"
    vendor(import_error=ImportError(missing))
    assert reason() == (
        "torch_npu is installed and CANN is not usable: libhccl.so: cannot open shared object file: No such file or "
        "directory (source /usr/local/Ascend/ascend-toolkit/set_env.sh)"
    )


def test_torch_npu_is_of_another_torch(vendor: Callable[..., None]) -> None:
    vendor(import_error=RuntimeError("Two accelerators cannot be used at the same time\n[ERROR] 2026"))
    assert reason() == "torch_npu is installed and cannot be imported: Two accelerators cannot be used at the same time"


def test_there_is_no_driver(vendor: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendor(devices=0)
    monkeypatch.setattr(probe, "DRIVER", tmp_path / "davinci_manager")
    assert "no Ascend driver" in reason()
    assert "--device" in reason()


def test_no_device_is_visible(vendor: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vendor(devices=0)
    monkeypatch.setattr(probe, "DRIVER", tmp_path)
    assert reason().startswith("no NPU is visible: npu-smi info must list one")
    for listed in ("9", "1,0", "0,0"):  # B070: the driver shows none of a list that descends
        monkeypatch.setenv(VISIBLE, listed)
        assert reason().startswith(f"no NPU is visible: {VISIBLE}={listed} must name NPUs that npu-smi info lists")
        assert "ascending order" in reason()


@pytest.mark.parametrize("empty", ["", "  "])
def test_the_list_of_visible_devices_is_empty(
    vendor: Callable[..., None], monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    vendor()
    monkeypatch.setenv(VISIBLE, empty)
    assert reason() == f"{VISIBLE} is empty, which hides every NPU; unset it or name some, like 0,1"


def test_an_unknown_chip_is_not_guessed_at(vendor: Callable[..., None]) -> None:
    vendor(name="Ascend310P3")
    assert reason().startswith("Ascend310P3 is not a chip that Rung knows; it knows A3, A2, A5")


def test_what_is_found_is_not_called_emulated(vendor: Callable[..., None]) -> None:
    vendor(name="Ascend910_9382")
    found = probe.find_npu()
    assert (found.chip.family, found.is_emulated, found.name) == ("A3", False, "Ascend910_9382")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Ascend910B1", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend 910B4 (emulated)", "A2"),
        ("Ascend910_9392", "A3"),
        ("Ascend950PR", "A5"),
        ("Ascend910A", None),
        ("", None),
    ],
)
def test_chips_by_name(name: str, family: str | None) -> None:
    chip = chip_of(name)
    assert (None if chip is None else chip.family) == family


def test_capabilities_follow_the_memory() -> None:
    assert [npu_capabilities(size * GIB).graph_buckets[-1] for size in (32, 64, 96)] == [16, 64, 256]
    capabilities = npu_capabilities(64 * GIB)
    assert capabilities.graph_buckets[:6] == (1, 2, 4, 8, 16, 24)
    assert capabilities.default_page_size == 128
    assert (capabilities.resume_unit, capabilities.slot_dtype, capabilities.table_dtype) == ("page", "int32", "int32")
    assert capabilities.collectives == "hccl"
    assert "float32" not in capabilities.dtypes


def test_the_emulated_one_says_so_wherever_it_is_named() -> None:
    device = try_open("npu-sim")
    assert not isinstance(device, str)
    assert device.description.startswith("emulated")
    assert device.name == "npu-sim"


def test_keys_and_values_begin_where_transfers_can_register_them() -> None:
    import torch

    device = try_open("npu-sim")
    assert not isinstance(device, str)
    layer = device.kv_layer(3, 5, 128, 2, 16, torch.bfloat16)
    for side in (layer.k, layer.v):
        assert side.data_ptr() % (2 << 20) == 0
        assert tuple(side.shape) == (5, 128, 2, 16)
        assert side.is_contiguous()
        assert not side.cpu().any()
    assert layer.k.data_ptr() != layer.v.data_ptr()


def test_a_pool_that_attention_cannot_address_is_refused() -> None:
    import torch

    device = try_open("npu-sim")
    assert not isinstance(device, str)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1 elements .* use --max-total-tokens 2096896"):
        device.kv_layer(0, 16385, 128, 8, 128, torch.bfloat16)


def test_a_refusal_is_what_the_doctor_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda module: None)
    with pytest.raises(DeviceUnavailable) as refused:
        probe.find_npu()
    assert reason() == refused.value.reason
