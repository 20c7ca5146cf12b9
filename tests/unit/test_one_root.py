"""The four packages are one distribution's: another package of the same name is refused, by its place."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["session", "mem_cache", "devices"])
def test_a_package_that_shadows_one_of_ours_is_named_with_its_place(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import engine"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert f"package {name!r} was imported from {tmp_path}" in ended.stderr
    assert str(ROOT) in ended.stderr


def test_our_own_four_are_accepted():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import engine"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
