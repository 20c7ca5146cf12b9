"""What the docs say of the code is true: files exist, line counts fit, links lead somewhere, flags exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_line_counts_of_the_reading_path_are_right_within_a_tenth():
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \|", (ROOT / "docs/read-the-engine.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for path, said in rows:
        lines = len((ROOT / path).read_text().splitlines())
        assert abs(lines - int(said)) <= max(10, lines / 10), f"{path} has {lines} lines, the page says {said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for path in re.findall(r"`((?:engine|devices|mem_cache|session|tests|scripts|docs)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_names_exist(page: Path):
    known = (ROOT / "engine/config.py").read_text() + "".join(
        file.read_text()
        for file in [*(ROOT / "engine").glob("*.py"), *(ROOT / "scripts").rglob("*")]
        if file.is_file() and file.suffix != ".pyc"
    )
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page.read_text()):
        assert flag.replace("-", "_") in known or f"--{flag}" in known, f"{page.name} names --{flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path):
    for path, name in re.findall(r"`(tests/[\w/.-]+)::(\w+)`", page.read_text()):
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
