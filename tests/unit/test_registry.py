"""Opening a device: lazy, with every refusal's reason, and never another one than was asked for."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from devices import registry
from devices.base import Capabilities, UnsupportedPageSize, check_page_size
from devices.doctor import Diagnosis, diagnose, report
from devices.registry import AUTO_ORDER, DEVICE_NAMES, Choice, DeviceUnavailable, open_device, try_open

ABSENT = [name for name in DEVICE_NAMES if isinstance(try_open(name), str)]
asked_for_an_absent_one = pytest.mark.parametrize("name", ABSENT or [pytest.param("none", marks=pytest.mark.skip)])


def stub(monkeypatch: pytest.MonkeyPatch, name: str, refuses: str | None) -> None:
    """Put a device module in the registry that opens, or does not."""

    class Stub:
        description = f"a stub of {name}"

    def open_stub(asked: str, kernels: str) -> Stub:
        if refuses is not None:
            raise DeviceUnavailable(refuses)
        opened = Stub()
        opened.name = asked  # type: ignore[attr-defined]
        return opened

    module = ModuleType(f"stub_{name}")
    module.open_device = open_stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry._MODULES, name, module.__name__)


def test_auto_takes_the_first_that_opens_and_keeps_the_reasons_of_the_others() -> None:
    choice = open_device("auto")
    better = AUTO_ORDER[: AUTO_ORDER.index(choice.device.name)]
    assert [name for name, _ in choice.refusals] == list(better)
    lines = choice.explain().splitlines()
    assert len(lines) == len(better) + 1
    for name, reason, line in zip(better, [reason for _, reason in choice.refusals], lines, strict=False):
        assert line == f"  {name:<5} refused: {reason}"
        assert reason
    assert lines[-1] == f"  {choice.device.name:<5} chosen:  {choice.device.description}"


def test_auto_takes_the_cpu_where_nothing_better_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, "npu", "no NPU in this rack")
    stub(monkeypatch, "cuda", "no GPU either")
    choice = open_device()
    assert choice.device.name == "cpu"
    assert choice.refusals == (("npu", "no NPU in this rack"), ("cuda", "no GPU either"))


@pytest.mark.parametrize(("opens", "taken"), [(("npu", "cuda"), "npu"), (("cuda",), "cuda")])
def test_auto_prefers_npu_then_cuda(monkeypatch: pytest.MonkeyPatch, opens: tuple[str, ...], taken: str) -> None:
    for name in ("npu", "cuda"):
        stub(monkeypatch, name, None if name in opens else "absent")
    assert open_device("auto").device.name == taken


def test_auto_says_every_reason_when_nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AUTO_ORDER:
        stub(monkeypatch, name, f"{name} is on holiday")
    with pytest.raises(DeviceUnavailable) as refused:
        open_device("auto")
    lines = str(refused.value).splitlines()
    assert lines[0] == 'no device for "auto":'
    assert lines[1:] == [f"  {name:<5} refused: {name} is on holiday" for name in AUTO_ORDER]


def test_an_emulator_is_never_picked_by_auto() -> None:
    assert "npu-sim" in DEVICE_NAMES
    assert "npu-sim" not in AUTO_ORDER


@pytest.mark.parametrize("name", ["tpu", "", "CPU", "cpu:0"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(DeviceUnavailable) as refused:
        open_device(name)
    assert f"device {name!r} is unknown" in str(refused.value)
    for known in ("auto", *DEVICE_NAMES):
        assert known in str(refused.value)


@asked_for_an_absent_one
def test_a_device_asked_for_by_name_that_cannot_open_is_an_error_with_its_reason(name: str) -> None:
    reason = try_open(name)
    assert isinstance(reason, str)
    with pytest.raises(DeviceUnavailable) as refused:
        open_device(name)
    assert str(refused.value) == f"device {name!r} was asked for and cannot open: {reason}"
    assert "\n" not in reason


def test_a_device_asked_for_by_name_opens_without_asking_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu", "cuda"):
        stub(monkeypatch, name, "must not matter")
    choice = open_device("cpu")
    assert isinstance(choice, Choice)
    assert (choice.device.name, choice.refusals) == ("cpu", ())


def test_a_broken_device_module_is_not_taken_for_an_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MODULES, "cuda", "devices.there_is_no_such_module")
    with pytest.raises(ModuleNotFoundError):
        open_device("auto" if isinstance(try_open("npu"), str) else "cuda")


def test_what_the_cpu_says_of_itself() -> None:
    device = open_device("cpu").device
    capabilities = device.capabilities
    assert capabilities.default_page_size in capabilities.page_sizes
    assert capabilities.resume_unit == "token"
    assert {"float32", "bfloat16"} <= set(capabilities.kv_dtypes)
    assert "causal" in capabilities.masks
    memory = device.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert f"page {capabilities.default_page_size}" in device.description


def test_a_device_that_declares_nothing_supports_nothing() -> None:
    nothing = Capabilities()
    with pytest.raises(UnsupportedPageSize, match="correct with none"):
        check_page_size(16, "new", nothing)
    assert (nothing.graph_capture, nothing.overlap, nothing.masks, nothing.dtypes) == (False, False, frozenset(), ())


def test_an_unsupported_page_size_says_which_to_use() -> None:
    capabilities = Capabilities(page_sizes=(128, 256))
    assert check_page_size(256, "npu", capabilities) == 256
    with pytest.raises(UnsupportedPageSize) as refused:
        check_page_size(24, "npu", capabilities)
    for words in ("page_size=24", "'npu'", "128, 256", "--page-size 128"):
        assert words in str(refused.value)


def test_the_doctor_has_a_row_for_every_device_and_a_verdict_for_each_that_opens() -> None:
    rows = diagnose()
    assert [row.name for row in rows] == list(DEVICE_NAMES)
    for row in rows:
        assert row.opens == (not isinstance(try_open(row.name), str))
        assert row.self_test == ("PASS" if row.opens else "")
        assert row.text
    cpu = next(row for row in rows if row.name == "cpu")
    assert re.search(r"pages 1,16,32,64,128; kv .*; max error \d", cpu.text)


def test_the_doctors_report_is_one_line_a_device() -> None:
    rows = [Diagnosis("cpu", True, "2 cores", "PASS"), Diagnosis("npu", False, "torch_npu is not installed")]
    first, second = report(rows).splitlines()
    assert first.split() == ["cpu", "yes", "PASS", "2", "cores"]
    assert second.split() == ["npu", "no", "torch_npu", "is", "not", "installed"]
