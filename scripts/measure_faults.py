#!/usr/bin/env python
"""How many seeds each deliberate fault of the simulator's registry takes to be caught; writes docs/simulator.md.

    python scripts/measure_faults.py            measure, and write the table between the marks of docs/simulator.md
    python scripts/measure_faults.py --print    measure, and print the table only
    python scripts/measure_faults.py --only fork      faults whose name has this text

Each fault is looked for from several first seeds; what counts is the number of seeds until its own checker caught it.
The numbers are exact: equal seeds are equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))

import pytest
from sim.faults import FAULTS, NUM_STEPS, Fault, seeds_to_catch

STARTS = (0, 1000, 2000, 3000, 4000)
"""First seeds; the tests begin at the first of them."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def measured(fault: Fault) -> list[int | None]:
    """Seeds until the fault was caught, from each start; None where so many as it may take were not enough."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault.inject(monkeypatch)
        return [seeds_to_catch(fault, start) for start in STARTS]


def table(rows: list[tuple[Fault, list[int | None]]]) -> str:
    """As the page has it: the faults in the order of their registry, then what all of them say together."""
    lines = ["| fault | caught by | profile | median seeds | most |", "|---|---|---|---|---|"]
    missed = 0
    medians = []
    for fault, seeds in rows:
        counted = [fault.max_seeds + 1 if n is None else n for n in seeds]
        missed += None in seeds
        medians.append(median(counted))
        most = f"more than {fault.max_seeds}" if None in seeds else str(max(counted))
        lines.append(f"| {fault.name} | `{fault.checker}` | {fault.profile} | {median(counted):g} | {most} |")
    said = (
        f"{len(rows)} faults, seeds of {NUM_STEPS} steps, from {len(STARTS)} first seeds each: the median fault is "
        f"caught by its checker after {median(medians):g} seed(s), the slowest after {max(medians):g} (medians); "
        f"{missed} were missed from one start or more within the seeds that their test allows."
    )
    return "\n".join([said, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", dest="only_print")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    for fault in FAULTS:
        if arguments.only in fault.name:
            rows.append((fault, measured(fault)))
            print(f"{fault.name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    text = table(rows)
    if arguments.only_print or arguments.only:
        print(text)
        return
    page = PAGE.read_text()
    before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:before]}\n{text}\n{page[after:]}")


if __name__ == "__main__":
    main()
