"""The kernels as they are launched for common models: what `devices.cuda.aot` compiles and budgets.json keeps.

To add a kernel: a `KernelCase` here with the types of its arguments and the constants of a real shape, then
`python -m devices.cuda.aot --only NAME --write`. Compiling is CPU time in every run of the tests: few cases, real ones.
"""

from __future__ import annotations

from devices.cuda.aot import KernelCase


def _types(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


CASES: tuple[KernelCase, ...] = (
    KernelCase(
        name="update_tables page64",
        kernel="page_tables:update_tables_kernel",
        arguments={
            **_types(
                "*i32", "tables", "rows", "change_starts", "change_at", "change_page", "starts", "token_starts", "slots"
            ),
            "width": "i32",
        },
        constants={"PAGE": 64, "BLOCK": 1024},
        floor="one launch: 8 bytes a token",
        target="<= 12 us for 256 rows with 8192 new tokens; <= 6 us for decode",
    ),
)
