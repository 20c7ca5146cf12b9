"""Every kernel compiled for GPUs that are not here: hard rules, and a budget for this version of Triton.

A budget is what the compiler made when it was last written (`python -m devices.cuda.aot --write`): more registers or
shared memory, or fewer programs on a multiprocessor, is a slower kernel until somebody says otherwise. Other versions
of Triton have other numbers; where budgets.json has none, the hard rules are all that is asked.
"""

import json

import pytest

triton = pytest.importorskip("triton", reason="the kernels' tests need triton: pip install 'rung[dev]'")

from devices.cuda import aot  # noqa: E402
from devices.cuda.kernel_cases import CASES  # noqa: E402

BUDGETS = json.loads(aot.BUDGETS.read_text())
BUDGET = BUDGETS["triton"].get(triton.__version__, {})

SPILLS = BUDGETS["spills"].get(triton.__version__, {})
BINARIES = [pytest.param(case, arch, id=f"{case.name} sm_{arch}") for case in CASES for arch in case.archs]


@pytest.mark.parametrize(("case", "arch"), BINARIES)
def test_a_kernel_compiles_to_what_its_case_declares(case: aot.KernelCase, arch: int) -> None:
    binary = aot.compile_case(case, arch)
    assert aot.offences(case, arch, binary, SPILLS.get(f"{case.name} sm_{arch}", 0)) == []
    budget = BUDGET.get(f"{case.name} sm_{arch}")
    if budget is not None:
        assert binary.registers <= budget["registers"]
        assert binary.shared_bytes <= budget["shared_bytes"]
        assert binary.ctas_per_sm >= budget["ctas_per_sm"]


def test_every_case_has_a_target_and_a_budget_for_the_pinned_triton() -> None:
    assert BUDGETS["targets"] == {case.name: {"floor": case.floor, "target": case.target} for case in CASES}
    for version, budgets in BUDGETS["triton"].items():
        assert set(budgets) == {f"{case.name} sm_{arch}" for case in CASES for arch in case.archs}, version
    assert {"3.6.0", "3.7.1"} <= set(BUDGETS["triton"])


def test_only_a_newer_triton_spills_and_only_in_one_kernel() -> None:
    assert {version: list(spills) for version, spills in BUDGETS["spills"].items() if spills} == {
        "3.9.0": ["latent decode 512+64 h128 sm_90"]
    }
