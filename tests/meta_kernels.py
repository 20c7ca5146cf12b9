"""Asks torch_npu itself: the schemas that its wheel registers, and the shapes that its meta kernels answer with.

Runs in a process of its own, which sees the wheel and stub libraries in place of CANN (`scripts/npu/meta_env`) and
nothing of ours. Reads JSON with `calls` and `operators` from standard input and writes JSON on its last line of output;
`described` and `restored` are the form that tensors have in it.

    PYTHONPATH=FOLDER/site LD_LIBRARY_PATH=FOLDER/stubs TORCH_DEVICE_BACKEND_AUTOLOAD=0 python tests/meta_kernels.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException


def described(value: Any) -> Any:
    """Plain data in place of tensors."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape], "stride": [*value.stride()]}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """Tensors without memory in place of their descriptions."""
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
    return [restored(item) for item in value] if isinstance(value, list) else value


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """`made`: descriptions of the results; `accepted`: the wheel has no meta kernel, its schema takes the arguments; or
    `refused`: why not."""
    namespace, _, name = call["name"].partition("::")
    overload = getattr(getattr(getattr(torch.ops, namespace), name), call["overload"])
    full = call["name"] + ("" if call["overload"] == "default" else f".{call['overload']}")
    arguments = [restored(value) for value in call["args"]]
    named = {key: restored(value) for key, value in call["kwargs"].items()}
    try:
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"):
            return {"made": described(overload(*arguments, **named))}
        with FakeTensorMode(allow_non_fake_inputs=True):
            overload(*arguments, **named)
    except UnsupportedOperatorException:
        pass  # said after the arguments were matched
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError) as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"accepted": True}


def main() -> None:
    import torch_npu

    asked = json.load(sys.stdin)
    schemas = [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name in asked["operators"]]
    answers = [answer(call) for call in asked["calls"]]
    print()
    print(json.dumps({"version": torch_npu.__version__, "schemas": schemas, "answers": answers}))


if __name__ == "__main__":
    main()
