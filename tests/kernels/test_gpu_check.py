"""`scripts/gpu_check`: its arithmetic on measurements made up here, what it says without a GPU, and a dry run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

from report import Ceilings, Report, Row, relative_error, share_wrong  # noqa: E402

CEILINGS = Ceilings(bytes_per_s=4e12, flops_per_s=8e14)


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)


def a_report(*rows: Row) -> Report:
    return Report("a GPU", "versions", CEILINGS, list(rows))


def test_a_floor_is_the_larger_of_the_times_to_move_and_to_multiply() -> None:
    assert CEILINGS.floor_s(4e6, 0) == pytest.approx(1e-6)
    assert CEILINGS.floor_s(4e6, 8e9) == pytest.approx(1e-5)


def test_the_table_has_a_kernels_share_of_its_floor_and_whether_it_meets_its_target() -> None:
    fast = Row("fast", 1e-3, 1e-2, num_bytes=4e6, seconds=1.25e-6, target=0.75)
    slow = Row("slow", 1e-3, 1e-2, num_bytes=4e6, seconds=4e-6, target=0.75)
    free = Row("free", 1e-3, 1e-2, num_bytes=4e6, seconds=4e-6)
    lines = a_report(fast, slow, free).table().splitlines()
    assert "4.00 TB/s copied, 800 TFLOP/s" in lines[0]
    assert lines[2].split() == ["fast", "1.0e-03", "1.2", "1.0", "0.80", "0.75", "meets"]
    assert lines[3].split() == ["slow", "1.0e-03", "4.0", "1.0", "0.25", "0.75", "misses"]
    assert lines[4].split()[-2:] == ["-", "right"]


def test_a_launch_that_moves_little_has_a_time_to_stay_under() -> None:
    rows = (Row(str(us), 0.0, 0.0, num_bytes=8.0, seconds=us * 1e-6, most_s=12e-6) for us in (11, 13))
    lines = [
        line.split() for line in a_report(*rows, Row("bad", 1.0, 0.0, seconds=1e-6, most_s=12e-6)).table().splitlines()
    ]
    assert [line[-3:] for line in lines[2:4]] == [["12", "us", "meets"], ["12", "us", "misses"]]
    assert "WRONG" in lines[4]


@pytest.mark.parametrize(
    "row",
    [Row("wrong", 0.2, 1e-2, seconds=1e-6), Row("nan", float("nan"), 1e-2), Row("x", 0.0, 0.0, failure="OutOfMemory")],
    ids=["wrong", "nan", "failed"],
)
def test_a_wrong_kernel_is_seen_whatever_its_speed(row: Row) -> None:
    report = a_report(Row("good", 0.0, 0.0), row)
    assert not report.is_right
    assert "WRONG" in report.table() or "FAILED: OutOfMemory" in report.table()


def test_a_wrong_token_of_the_matrix_is_seen() -> None:
    report = a_report(Row("good", 0.0, 0.0))
    report.engine["matrix"] = {"page 16": True, "graphs": True}
    assert report.is_right
    report.engine["matrix"]["graphs"] = False
    assert not report.is_right
    report.engine["matrix"] = "FAILED: it did not start"
    assert not report.is_right


def test_json_has_what_the_table_has(tmp_path: Path) -> None:
    report = a_report(Row("fast", 1e-3, 1e-2, num_bytes=4e6, seconds=1.25e-6, target=0.75), Row("untimed", 0.0, 0.0))
    report.skipped.append("peers")
    report.write(tmp_path / "out.json")
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["is_right"] is True
    assert [row["share"] for row in values["rows"]] == [pytest.approx(0.8), None]
    assert values["ceilings"]["bytes_per_s"] == 4e12
    assert values["skipped"] == ["peers"]


def test_errors_are_relative_norms_and_shares() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.5 / 29.25**0.5)
    assert share_wrong([1, 2, 3, 4], [1, 2, 3, 5]) == 0.25


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU to check: ")
    assert done.stderr.count("\n") == 1


def test_a_dry_run_checks_kernels_without_timing_them(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = gpu_check("--dry-run", "--only", "64 x", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["name"].split(" 64 x")[0] for row in rows} == {"decode", "latent decode", "edit", "sample"}
    assert all(row["is_right"] and row["seconds"] is None for row in rows)
    assert 0 < rows[0]["error"] < rows[0]["tolerance"]
