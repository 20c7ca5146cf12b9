"""The emulator's operators answer as torch_npu's own meta kernels do: the same shapes and dtypes, for every call that
the package makes and for legal calls of every operator with many small changes; what torch_npu refuses, the emulator
refuses too.

The wheel cannot be imported beside torch without CANN, so it is asked in a process of its own, with stub libraries.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import npu_calls
import pytest
import torch
from meta_kernels import described, restored
from npu_workload import exercise

from devices.npu.arguments.attention import AttentionShape
from devices.npu.arguments.contract import Call
from devices.npu.arguments.several import SinkAttention, VerifyAttention
from devices.npu.emulator import ContractViolation, library, operators
from devices.npu.emulator.schemas import SCHEMAS

pytestmark = [
    pytest.mark.torch_npu_meta,
    pytest.mark.devices("npu-sim"),
    pytest.mark.usefixtures("on_device"),
]

CALLED = Path(__file__).resolve().parents[1] / "data" / "torch_npu-2.13-called.txt"
SCRIPT = Path(__file__).resolve().parents[1] / "meta_kernels.py"
Ask = Callable[[list[dict[str, Any]]], dict[str, Any]]
WRONG_NAME = r"no_such_argument|expected at most \d+ argument"
OPERATORS = sorted({torch._C.parse_schema(text).name for text in SCHEMAS})


@pytest.fixture(scope="module")
def ask(pytestconfig: pytest.Config) -> Ask:
    """Asks the wheel; skips where it is not."""
    folder = Path(pytestconfig.getoption("--torch-npu-meta")).expanduser()
    if not (folder / "stubs" / "libascendcl.so").exists():
        pytest.skip(f"no torch_npu with stubs of CANN in {folder}; run: scripts/npu/meta_env {folder}")
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"that torch_npu goes with torch 2.13, here is {torch.__version__}")

    def ask(calls: list[dict[str, Any]]) -> dict[str, Any]:
        sees = {"PYTHONPATH": str(folder / "site"), "LD_LIBRARY_PATH": str(folder / "stubs")}
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            input=json.dumps({"operators": OPERATORS, "calls": calls}),
            env=os.environ | sees | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answered: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answered

    return ask


@contextmanager
def recording(into: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Every different call of a vendor operator goes `into`, by what it was called with, and with what it made."""
    plain = library._FrontOverload.__call__

    def call(front: library._FrontOverload, *args: Any, **kwargs: Any) -> Any:
        form: dict[str, Any] = {"name": front._operator.name, "overload": front._overload, "args": described(args)}
        form["kwargs"] = {name: described(value) for name, value in kwargs.items()}
        key = json.dumps(form)
        result = plain(front, *args, **kwargs)
        into.setdefault(key, form | {"made": described(result)})
        return result

    library._FrontOverload.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        library._FrontOverload.__call__ = plain  # type: ignore[method-assign]


def variations(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The call with one argument less, of another type, shorter, or of another value; many are not legal."""
    for name, value in call.items():
        yield {key: other for key, other in call.items() if key != name}
        if isinstance(value, torch.Tensor):
            kinds = {torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64} - {value.dtype}
            changed: list[Any] = [value.to(dtype) for dtype in sorted(kinds, key=str)]
            changed += [value.narrow(dim, 0, value.shape[dim] - 1) for dim in range(value.dim())]
            changed += [value.unsqueeze(0), value.flatten(-2)] if value.dim() > 1 else [value.unsqueeze(0)]
        elif isinstance(value, int):
            changed = [value - 1, value + 1, 2 * value]
        elif isinstance(value, str):
            changed = ["BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD_TND", "half", "interleave", "nonsense"]
        else:
            changed = [value[:-1]] if isinstance(value, list) else []
        for other in changed:
            yield call | {name: other}


def without_caller() -> Iterator[Call]:
    """Calls of builders that no model reaches yet: rows of a few tokens each, sinks."""
    mask = npu_calls.npu(npu_calls.causal_mask())
    table = npu_calls.npu(torch.tensor([[3, 5], [7, 0], [2, 6]], dtype=torch.int32))
    rows = ([4, 1, 3], [130, 9, 256], table, mask)
    cache = npu_calls.npu(npu_calls.random(8, 128, 256))
    for window in (None, 50):
        verify = VerifyAttention(AttentionShape(6, 2, 128), 128, *rows, window)
        yield verify.of(npu_calls.npu(npu_calls.random(3, 4, 768)), cache, cache)
        sinks = SinkAttention(AttentionShape(6, 2, 128), 128, *rows, npu_calls.npu(npu_calls.random(6)), window)
        yield sinks.of(npu_calls.npu(npu_calls.random(8, 6, 128)), cache, cache)


@pytest.fixture(scope="module")
def accepted(on_device: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every call that the emulator accepted, with its results: the package's, the legal ones, variations of them."""
    if on_device != "npu-sim":
        pytest.skip("only the emulator records calls")
    found: dict[str, dict[str, Any]] = {}
    npu = operators()
    with recording(found):
        exercise(tmp_path_factory.mktemp("meta"))
        for built in without_caller():
            npu.npu_fused_infer_attention_score_v2(*built.args, **built.kwargs)
        for name, builds in npu_calls.LEGAL.items():
            for call in (call for build in builds for call in (build(), build(**LSE.get(name, {})))):
                getattr(npu, name)(**call)
                for changed in variations(call):
                    with suppress(ContractViolation, RuntimeError, TypeError, ValueError, IndexError, KeyError):
                        getattr(npu, name)(**changed)
    return list(found.values())


LSE = {
    "npu_fused_infer_attention_score": {"softmax_lse_flag": True},
    "npu_fused_infer_attention_score_v2": {"return_softmax_lse": True},
}


def test_the_wheel_makes_what_the_emulator_makes(ask: Ask, accepted: list[dict[str, Any]]) -> None:
    assert {call["name"] for call in accepted} == set(OPERATORS)
    differences = set()
    for call, answer in zip(accepted, ask(accepted)["answers"], strict=True):
        if is_disputed(call, answer):
            continue
        if "refused" in answer:
            differences.add(f"{said(call)}: {answer['refused']}")
        elif "made" in answer and forms(answer["made"]) != forms(call["made"]):
            differences.add(f"{said(call)}: {forms(answer['made'])}, emulated {forms(call['made'])}")
    assert not differences, "\n".join(sorted(differences))


def is_disputed(call: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Where the wheel contradicts itself, and we follow the text or the schema: sums of exponentials that nobody asked
    for are one number in the documentation and none in the meta kernel; a filter without k is legal by its schema, and
    its meta kernel has no default for k."""
    if call["name"].startswith("npu::npu_fused_infer_attention_score") and "made" in answer:
        return (
            forms(answer["made"]) == [forms(call["made"])[0], "float32[0]"] and forms(call["made"])[1] == "float32[1]"
        )
    return call["name"] == "npu::npu_top_k_top_p" and "k" not in call["kwargs"] and "'k'" in answer.get("refused", "")


def said(call: dict[str, Any]) -> str:
    """A call as a line of text."""
    words = [str(forms(value)) for value in call["args"]]
    words += [f"{name}={forms(value)}" for name, value in call["kwargs"].items()]
    return f"{call['name']}.{call['overload']}({', '.join(words)})"


def forms(made: Any) -> Any:
    """Shapes and dtypes in place of tensors."""
    if isinstance(made, dict):
        return f"{made['dtype']}{made['shape']}"
    return [forms(item) for item in made] if isinstance(made, list) else made


def test_the_schemas_are_those_of_the_wheel(ask: Ask) -> None:
    answered = ask([])
    registered = {(s.name, s.overload_name): s for s in map(torch._C.parse_schema, answered["schemas"])}
    called = [line for line in CALLED.read_text().splitlines() if not line.startswith("#")]
    for schema in map(torch._C.parse_schema, (*SCHEMAS, *called)):
        assert str(schema) == str(registered[schema.name, schema.overload_name])


def test_an_unknown_name_is_refused_by_both(ask: Ask, accepted: list[dict[str, Any]]) -> None:
    calls = list({(call["name"], call["overload"]): call for call in accepted}.values())
    wrong = [call | {"kwargs": call["kwargs"] | {"no_such_argument": 1}} for call in calls]
    for call, answer in zip(wrong, ask(wrong)["answers"], strict=True):
        assert re.search(WRONG_NAME, answer["refused"])
        namespace, _, name = call["name"].partition("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), call["overload"])
        with pytest.raises(RuntimeError, match=WRONG_NAME):
            operator(*restored(call["args"]), **{key: restored(value) for key, value in call["kwargs"].items()})
