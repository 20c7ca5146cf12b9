"""Every call that the package makes of a torch_npu operator is one that torch_npu 2.13 has.

The calls are collected from a model with windows and norms of heads, a session, captured and eager steps on the
emulated NPU; names, overloads, argument names and types are compared with the schemas that torch_npu itself registers,
which are data beside the tests and know nothing of the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make_llm, outputs, prompts_with_shared_heads, run, run_turn
from tiny_models import save_tiny_model

from devices.npu.emulator import NpuCall, recorded_calls
from engine import SamplingParams

pytestmark = [pytest.mark.devices("npu-sim"), pytest.mark.usefixtures("on_device")]

TABLE = Path(__file__).resolve().parents[1] / "data" / "torch_npu-2.13-called.txt"
WINDOWS = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 40, "head_dim": 16}


def schemas() -> dict[tuple[str, str], Any]:
    """(name, overload) -> what torch reads in its schema."""
    read = [torch._C.parse_schema(line) for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {(schema.name, schema.overload_name or "default"): schema for schema in read}


@pytest.fixture(scope="module")
def calls(on_device: str, tmp_path_factory: pytest.TempPathFactory) -> Sequence[NpuCall]:
    if on_device != "npu-sim":
        pytest.skip("only the emulator records calls")
    before = recorded_calls()
    path = tmp_path_factory.mktemp("windowed")
    save_tiny_model(path, "qwen3", layer_types=["sliding_attention", "full_attention"], **WINDOWS)
    llm = make_llm(path, cuda_graph_max_bs=2)
    prompts = prompts_with_shared_heads(seed=3, n=3, max_len=150)
    assert len(outputs(run(llm, prompts))) == 3
    run(llm, prompts, [SamplingParams(max_new_tokens=2, **cut) for cut in ({"top_k": 9}, {"top_p": 0.9}, {})])
    session = llm.core.sessions.open()
    for turn in prompts[:2]:
        run_turn(llm, session.id, turn)
    return list(recorded_calls() - before)


def test_the_run_reached_every_operator_that_the_package_calls(calls: Sequence[NpuCall]) -> None:
    assert {(call.name, call.overload) for call in calls} == set(schemas())


def test_every_call_fits_the_schema(calls: Sequence[NpuCall]) -> None:
    for call in calls:
        offences = list(misfits(call, schemas()[call.name, call.overload]))
        assert offences == [], f"{call.name}.{call.overload}: {offences}"


def misfits(call: NpuCall, schema: Any) -> list[str]:
    """What is wrong with a call: too many positional arguments, unknown or missing names, another type."""
    known = {argument.name: argument for argument in schema.arguments}
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    found = ["too many positional arguments"] if len(call.positional) > len(positional) else []
    given = dict(zip((argument.name for argument in positional), call.positional, strict=False))
    found += [f"{name} is given twice" for name, _ in call.keywords if name in given]
    given |= dict(call.keywords)
    found += [f"{name} is unknown" for name in given if name not in known]
    found += [f"{name} is missing" for name, a in known.items() if name not in given and not a.has_default_value()]
    found += [f"{name} is {kind}" for name, kind in given.items() if name in known and not fits(kind, known[name])]
    return found


def fits(kind: str, argument: Any) -> bool:
    """Whether a kind of `NpuCall` is of the argument's type; torch would turn an int into a float, we do not let it."""
    wanted = str(argument.type)
    if wanted in ("Tensor", "Optional[Tensor]"):
        return kind.startswith("torch.") or (kind == "NoneType" and wanted != "Tensor")
    allowed = {
        "Optional[List[int]]": {"list[int]", "NoneType"},
        "List[Tensor]": {"list[torch.bfloat16]", "list[torch.float16]"},
        "int": {"int"},
        "float": {"float"},
        "str": {"str"},
        "Optional[str]": {"str", "NoneType"},
    }
    return kind in allowed[wanted]


WRONG = [
    NpuCall("npu::npu_swiglu", "default", ("torch.float16",), (("axis", "int"),)),
    NpuCall("npu::npu_swiglu", "default", (), (("dim", "int"),)),
    NpuCall("npu::npu_swiglu", "default", ("torch.float16", "int", "int"), ()),
    NpuCall("npu::npu_swiglu", "default", ("torch.float16", "int"), (("dim", "int"),)),
    NpuCall("npu::npu_rms_norm", "default", ("torch.float16", "torch.float16"), (("epsilon", "int"),)),
    NpuCall("npu::npu_rms_norm", "default", ("torch.float16", "NoneType"), ()),
]


@pytest.mark.parametrize("call", WRONG, ids=str)
def test_a_call_that_does_not_fit_is_seen(call: NpuCall) -> None:
    assert misfits(call, schemas()[call.name, call.overload])


def test_defaults_that_are_relied_on_are_those_of_the_schema() -> None:
    """What a call leaves out and the result depends on; a newer torch_npu that changes one has to be looked at."""
    table = schemas()
    relied_on = {
        ("npu::npu_fused_infer_attention_score", "inner_precise"): 0,
        ("npu::npu_fused_infer_attention_score", "softmax_lse_flag"): False,
        ("npu::npu_fused_infer_attention_score", "pre_tokens"): 2**31 - 1,
        ("npu::npu_fused_infer_attention_score", "next_tokens"): 2**31 - 1,
        ("npu::npu_fused_infer_attention_score_v2", "inner_precise"): 0,
        ("npu::npu_fused_infer_attention_score_v2", "return_softmax_lse"): False,
        ("npu::npu_rotary_mul", "rotate"): None,
    }
    for (name, argument_name), value in relied_on.items():
        (argument,) = (a for a in table[name, "default"].arguments if a.name == argument_name)
        assert argument.default_value == value
