"""The law of the house (ARCHITECTURE 1 and 7), read from the source of every file: who may import, ask and divide.

Each law is a function from a file to its offences. It runs over the four packages, and over a small bad file of its
own, so that a law that has gone blind is noticed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devices.registry import DEVICE_NAMES
from mem_cache.kv_info import ReqKvInfo

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ("devices", "mem_cache", "session", "engine")
"""The packages, lowest first: each may import itself and what stands before it."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
VENDOR_MODULES = ("torch_npu", "triton")
VENDOR_FOLDERS = ("devices/npu/", "devices/cuda/")
KERNEL_SOURCES = "devices/cuda/kernels/"
"""Written in Triton, so they import it at once, and everybody else imports them when they are used."""

PAGE_ARITHMETIC = ("devices/pages.py", "devices/cpu/", "devices/cuda/", "devices/npu/", "devices/torch_forms/")
PAGE_NAMES = ("page_size", "tokens_per_page")
TORCH_FREE = ("mem_cache/", "session/", "engine/scheduler/")
TORCH_ALLOWED = ("mem_cache/pools.py",)
ENVIRONMENT_READERS = ("engine/config.py", "devices/npu/probe.py")
"""The engine's own variables, and those by which a vendor hides devices."""
RECORD = "mem_cache/kv_info.py"
RECORD_FIELDS = frozenset(name for name in ReqKvInfo.__slots__ if name.startswith("_"))


@dataclass(frozen=True)
class SourceFile:
    """A file of the house: its path below the root, and its text."""

    path: str
    text: str

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    def offence(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}: {what}"


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Every import: the statement, the module's full name, and whether it runs when the file is imported."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.stmt, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child, child.module or "", at_import
            elif isinstance(child, ast.If) and _is_type_checking(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), False)
                yield from walk(ast.Module(child.orelse, []), at_import)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_import and not later)

    yield from walk(tree, True)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


# The laws.


def arrows_run_one_way(file: SourceFile) -> Iterator[str]:
    rank = HOUSE.index(file.package)
    for node, module, _ in imports(file.tree):
        top = module.split(".")[0]
        if top in HOUSE and HOUSE.index(top) > rank:
            yield file.offence(node, f"{file.package} imports {module}")


def vendors_stay_in_their_folder_and_are_imported_when_used(file: SourceFile) -> Iterator[str]:
    is_kernel_source = file.path.startswith(KERNEL_SOURCES)
    for node, module, at_import in imports(file.tree):
        is_vendor = module.split(".")[0] in VENDOR_MODULES
        if is_vendor or f"{module}.".startswith(KERNEL_SOURCES.replace("/", ".")):
            if is_vendor and not file.path.startswith(VENDOR_FOLDERS):
                yield file.offence(node, f"{module} is imported outside {', '.join(VENDOR_FOLDERS)}")
            if at_import and not is_kernel_source:
                yield file.offence(node, f"{module} is imported at import time")


def planners_import_no_torch(file: SourceFile) -> Iterator[str]:
    if file.path.startswith(TORCH_FREE) and file.path not in TORCH_ALLOWED:
        for node, module, at_import in imports(file.tree):
            if module.split(".")[0] == "torch" and at_import:
                yield file.offence(node, "torch is imported at import time")


def nobody_above_asks_a_devices_name(file: SourceFile) -> Iterator[str]:
    if file.package == "devices":
        return
    for node in ast.walk(file.tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            asked = node.args
        for name in _strings(asked):
            if name in DEVICE_NAMES:
                yield file.offence(node, f"a device's name is compared: {name!r}; ask its capabilities")


def _strings(expressions: list[ast.expr]) -> Iterator[str]:
    """String literals that stand alone or in a literal tuple, list or set."""
    for expression in expressions:
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            yield expression.value
        elif isinstance(expression, ast.Tuple | ast.List | ast.Set):
            yield from _strings(expression.elts)


def page_arithmetic_stands_in_one_place(file: SourceFile) -> Iterator[str]:
    if file.path.startswith(PAGE_ARITHMETIC):
        return
    for node in ast.walk(file.tree):
        divisor: ast.expr | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Div):
            if not (isinstance(node.left, ast.Constant | ast.JoinedStr) and isinstance(node.op, ast.Mod)):
                divisor = node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Div):
            divisor = node.value
        elif isinstance(node, ast.Call) and _name(node.func) in ("divmod", "floor_divide", "mod", "remainder"):
            divisor = node.args[1] if len(node.args) > 1 else None
        for part in ast.walk(divisor) if divisor is not None else ():
            if _name(part).endswith(PAGE_NAMES):
                yield file.offence(node, f"a division by {_name(part)}; devices/pages.py has all page arithmetic")


def _name(node: ast.AST) -> str:
    """The last word of a name or attribute."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def few_files_read_the_environment(file: SourceFile) -> Iterator[str]:
    if file.path in ENVIRONMENT_READERS:
        return
    words = ("environ", "environb", "getenv", "putenv")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr in words and _name(node.value) == "os":
            yield file.offence(node, f"os.{node.attr} outside {', '.join(ENVIRONMENT_READERS)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in words:
                    yield file.offence(node, f"os.{alias.name} outside {', '.join(ENVIRONMENT_READERS)}")


def nobody_assigns_the_records_fields(file: SourceFile) -> Iterator[str]:
    if file.path == RECORD:
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if node.attr in RECORD_FIELDS and _name(node.value) != "self":
                yield file.offence(node, f"{node.attr} of a record is assigned; its moves are methods")
        elif isinstance(node, ast.Call) and _name(node.func) in ("setattr", "__setattr__", "delattr"):
            for field in _strings(node.args):
                if field in RECORD_FIELDS:
                    yield file.offence(node, f"{field} of a record is assigned; its moves are methods")


def files_and_functions_have_one_job(file: SourceFile) -> Iterator[str]:
    lines = file.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield file.offence(ast.Pass(), f"{lines} lines, the limit is {MAX_FILE_LINES}")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.lineno
            if file.path.startswith(KERNEL_SOURCES):  # an argument is a line there: only what follows them is counted
                first = node.body[_has_docstring(node)].lineno
            length = (node.end_lineno or first) - first + 1
            if length > MAX_FUNCTION_LINES:
                yield file.offence(node, f"{node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}")


def _has_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node) is not None and len(node.body) > 1


Law = Callable[[SourceFile], Iterator[str]]
LAWS: tuple[Law, ...] = (
    arrows_run_one_way,
    vendors_stay_in_their_folder_and_are_imported_when_used,
    planners_import_no_torch,
    nobody_above_asks_a_devices_name,
    page_arithmetic_stands_in_one_place,
    few_files_read_the_environment,
    nobody_assigns_the_records_fields,
    files_and_functions_have_one_job,
)


def house() -> list[SourceFile]:
    paths = [path for package in HOUSE for path in sorted((ROOT / package).rglob("*.py"))]
    return [SourceFile(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_file_of_the_house_keeps_the_law(law: Law) -> None:
    files = house()
    assert {file.package for file in files} >= {"devices", "mem_cache"}
    offences = [offence for file in files for offence in law(file)]
    assert offences == [], "\n".join(offences)


BAD: list[tuple[Law, str, str]] = [
    (arrows_run_one_way, "devices/a.py", "import mem_cache.kv_info"),
    (arrows_run_one_way, "devices/a.py", "def f():\n    from engine.config import Config"),
    (arrows_run_one_way, "mem_cache/a.py", "from session.log import Log"),
    (arrows_run_one_way, "mem_cache/a.py", "if TYPE_CHECKING:\n    from engine import request"),
    (arrows_run_one_way, "session/a.py", "from engine.request import Request"),
    (vendors_stay_in_their_folder_and_are_imported_when_used, "engine/a.py", "def f():\n    import torch_npu"),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cpu/a.py",
        "def f():\n    import triton.language",
    ),
    (vendors_stay_in_their_folder_and_are_imported_when_used, "devices/npu/a.py", "import torch_npu"),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "try:\n    import triton\nfinally: ...",
    ),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "class A:\n    from triton import jit",
    ),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "from devices.cuda.kernels.decode import attend",
    ),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "from devices.cuda.kernels import b",
    ),
    (planners_import_no_torch, "mem_cache/a.py", "import torch"),
    (planners_import_no_torch, "session/a.py", "from torch.nn import functional"),
    (planners_import_no_torch, "engine/scheduler/a.py", "if True:\n    import torch"),
    (nobody_above_asks_a_devices_name, "engine/a.py", "if device.name == 'npu': ..."),
    (nobody_above_asks_a_devices_name, "mem_cache/a.py", "x = 'cuda' != kind"),
    (nobody_above_asks_a_devices_name, "session/a.py", "x = kind in ('cpu', 'other')"),
    (nobody_above_asks_a_devices_name, "engine/a.py", "x = kind not in {'npu-sim'}"),
    (nobody_above_asks_a_devices_name, "engine/a.py", "match kind:\n    case 'cuda': ..."),
    (nobody_above_asks_a_devices_name, "engine/a.py", "x = kind.startswith('npu')"),
    (page_arithmetic_stands_in_one_place, "engine/a.py", "x = n // page_size"),
    (page_arithmetic_stands_in_one_place, "mem_cache/a.py", "x = n % self.geometry.page_size"),
    (page_arithmetic_stands_in_one_place, "devices/page_pool.py", "x = -(-n // family.tokens_per_page)"),
    (page_arithmetic_stands_in_one_place, "engine/a.py", "x = n // (bytes * allocation_page_size)"),
    (page_arithmetic_stands_in_one_place, "engine/a.py", "x = math.ceil(n / page_size)"),
    (page_arithmetic_stands_in_one_place, "engine/a.py", "n //= page_size"),
    (page_arithmetic_stands_in_one_place, "engine/a.py", "x = np.divmod(n, page_size)"),
    (few_files_read_the_environment, "devices/a.py", "x = os.environ['HOME']"),
    (few_files_read_the_environment, "engine/a.py", "x = os.getenv('HOME')"),
    (few_files_read_the_environment, "mem_cache/a.py", "from os import environ"),
    (nobody_assigns_the_records_fields, "mem_cache/allocation.py", "record._committed = 3"),
    (nobody_assigns_the_records_fields, "engine/a.py", "request.kv._allocated += 16"),
    (nobody_assigns_the_records_fields, "session/a.py", "slot.record._row, x = None, 1"),
    (nobody_assigns_the_records_fields, "session/a.py", "setattr(record, '_owner', None)"),
    (nobody_assigns_the_records_fields, "session/a.py", "object.__setattr__(record, '_protected', 0)"),
    (files_and_functions_have_one_job, "engine/a.py", "x = 1\n" * 501),
    (files_and_functions_have_one_job, "engine/a.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 70),
    (files_and_functions_have_one_job, "devices/cuda/a.py", "def f(\n" + "    a,\n" * 40 + "):\n" + "    x = 1\n" * 30),
    (files_and_functions_have_one_job, "devices/cuda/kernels/a.py", "def f():\n" + "    x = 1\n" * 71),
]

GOOD: list[tuple[Law, str, str]] = [
    (arrows_run_one_way, "engine/a.py", "import devices.pages, mem_cache.rows, session.log, engine.step"),
    (arrows_run_one_way, "mem_cache/a.py", "import devices.pages\nfrom mem_cache import rows\nfrom . import tree"),
    (arrows_run_one_way, "devices/a.py", "import engines_of_others, sessions"),
    (vendors_stay_in_their_folder_and_are_imported_when_used, "devices/npu/a.py", "def f():\n    import torch_npu"),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "if TYPE_CHECKING:\n    import triton",
    ),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/kernels/a.py",
        "import triton.language as tl\nfrom devices.cuda.kernels.softmax import step",
    ),
    (
        vendors_stay_in_their_folder_and_are_imported_when_used,
        "devices/cuda/a.py",
        "def f():\n    from devices.cuda.kernels.decode import attend",
    ),
    (planners_import_no_torch, "mem_cache/a.py", "if TYPE_CHECKING:\n    import torch"),
    (planners_import_no_torch, "mem_cache/pools.py", "import torch"),
    (planners_import_no_torch, "engine/runner.py", "import torch"),
    (nobody_above_asks_a_devices_name, "devices/registry.py", "if name == 'npu': ..."),
    (nobody_above_asks_a_devices_name, "engine/a.py", "x = name == 'auto'\ny = load(map_location='cpu')"),
    (page_arithmetic_stands_in_one_place, "devices/pages.py", "x = n // page_size"),
    (page_arithmetic_stands_in_one_place, "devices/npu/attention.py", "x = n // page_size"),
    (
        page_arithmetic_stands_in_one_place,
        "engine/a.py",
        "x = page_size // 2\ny = n // block\nz = 'page %s' % page_size",
    ),
    (few_files_read_the_environment, "engine/config.py", "x = os.environ['HOME']"),
    (few_files_read_the_environment, "engine/a.py", "x = request.environ\ny = os.path"),
    (nobody_assigns_the_records_fields, "mem_cache/kv_info.py", "record._committed = 3"),
    (nobody_assigns_the_records_fields, "engine/a.py", "self._row = 3\nx = record._committed"),
    (files_and_functions_have_one_job, "engine/a.py", "x = 1\n" * 500),
    (files_and_functions_have_one_job, "engine/a.py", "def f():\n" + "    x = 1\n" * 69),
    (
        files_and_functions_have_one_job,
        "devices/cuda/kernels/a.py",
        "def f(\n" + "    a,\n" * 40 + "):\n    '''what\n\n    it does'''\n" + "    x = 1\n" * 70,
    ),
]


@pytest.mark.parametrize(("law", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", None) or value[:40])
def test_a_law_sees_a_file_that_breaks_it(law: Law, path: str, text: str) -> None:
    assert list(law(SourceFile(path, text)))


@pytest.mark.parametrize(
    ("law", "path", "text"), GOOD, ids=lambda value: getattr(value, "__name__", None) or value[:40]
)
def test_a_law_has_nothing_against_a_file_that_keeps_it(law: Law, path: str, text: str) -> None:
    assert list(law(SourceFile(path, text))) == []


def test_every_law_has_been_seen_to_fail() -> None:
    assert {law for law, _, _ in BAD} == {law for law, _, _ in GOOD} == set(LAWS)


def test_an_offence_says_where_and_what() -> None:
    (offence,) = arrows_run_one_way(SourceFile("devices/a.py", "\nimport engine.cli\n"))
    assert offence == "devices/a.py:2: devices imports engine.cli"


def imported_by(statement: str) -> set[str]:
    """Which of the heavy modules a fresh Python has loaded after `statement`."""
    heavy = ("torch", "transformers", "torch_npu", "triton")
    program = f"import sys\n{statement}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_planning_modules_import_no_torch() -> None:
    planners = [file.path for file in house() if file.path.startswith(TORCH_FREE) and file.path not in TORCH_ALLOWED]
    assert "mem_cache/allocation.py" in planners
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in planners]
    assert imported_by(f"import {', '.join(['devices.registry', 'devices.base', *modules])}") == set()


def test_the_torch_probe_sees_torch() -> None:
    assert imported_by("sys.modules['torch'] = sys") == {"torch"}
