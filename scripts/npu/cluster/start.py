"""Runs an entry of this package from its script file, also when that was started with a bare Python.

Only the standard library stands here: when a library is missing the script goes on in the repository's own
environment, and says in one line what to install when there is none.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
USAGE_ERROR = 2


def run(module: str) -> None:
    """Import `cluster.<module>` and run its `main()`."""
    try:
        entry = importlib.import_module(f"cluster.{module}")
    except ModuleNotFoundError as error:
        own_python = ROOT / ".venv" / "bin" / "python"
        if own_python.exists() and Path(sys.prefix) != own_python.parents[1]:
            os.execv(own_python, [str(own_python), *sys.argv])
        print(f"{error.name} is not installed; pip install 'rung[deploy]'", file=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None
    entry.main()
