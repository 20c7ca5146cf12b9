"""`scripts/npu/preflight`: is this host ready to serve on NPUs? A table for people, JSON for programs, an exit status.

Exit status: 0 all is well, 1 warnings, 2 failures (or a wrong argument). See docs/deploy-npu.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.errors import ClusterError
from cluster.evidence import CachedEvidence, Evidence, LiveEvidence, RecordedEvidence, Recorder
from cluster.needs import Needs
from cluster.preflight import run_checks
from cluster.verdicts import Severity, Verdict, exit_status
from cluster.visible_devices import parse_visible_devices

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
COLOURS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "red", Severity.NOT_APPLICABLE: "dim"}
TABLE_WIDTH = 140
"""Columns of a table that goes to a file or another program."""


@app.command(help=__doc__)
def preflight(
    from_dir: Annotated[Path | None, typer.Option(help="Read recorded texts instead of this machine.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write what this machine says to this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the verdicts to this file as well.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Take the needs from this cluster file; needs --host.")] = None,
    host: Annotated[str | None, typer.Option(help="The host of the cluster file that this is.")] = None,
    num_devices: Annotated[int, typer.Option(help="Devices that are needed here.", min=1)] = 1,
    devices: Annotated[str | None, typer.Option(help="Their physical ids, such as 0,1.")] = None,
    num_hosts: Annotated[int, typer.Option(help="Hosts that work together.", min=1)] = 1,
    interface: Annotated[str | None, typer.Option(help="The network interface between hosts.")] = None,
    port: Annotated[list[int] | None, typer.Option(help="A port that must be free; may be repeated.")] = None,
    store: Annotated[str | None, typer.Option(help="host:port of the transfer store that must answer.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="A device address that must answer; may be repeated.")] = None,
    rank_table: Annotated[Path | None, typer.Option(help="The rank table; RANK_TABLE_FILE when not given.")] = None,
    prefill_geometry: Annotated[Path | None, typer.Option(help="JSON of what a prefill server holds.")] = None,
    decode_geometry: Annotated[Path | None, typer.Option(help="The same of a decode server.")] = None,
    min_driver: Annotated[str | None, typer.Option(help="The oldest driver that will do.")] = None,
    load_skew_s: Annotated[int, typer.Option(help="Seconds that loading may differ between ranks.")] = 600,
    timeout_s: Annotated[float, typer.Option(help="Seconds that a command may take.")] = 20.0,
) -> None:
    try:
        if cluster is not None:
            from cluster.plan import needs_of_host

            needs = needs_of_host(cluster, host)
        else:
            needs = Needs(
                num_devices=num_devices,
                devices=parse_visible_devices(devices) if devices is not None else (),
                num_hosts=num_hosts,
                min_driver=min_driver,
                interface=interface,
                ports=tuple((number, "given") for number in port) if port else Needs.ports,
                store=store,
                peers=tuple(peer or ()),
                load_skew_s=load_skew_s,
                rank_table=rank_table,
                prefill_geometry=prefill_geometry,
                decode_geometry=decode_geometry,
            )
        source: Evidence = RecordedEvidence(from_dir) if from_dir is not None else LiveEvidence(timeout_s)
        evidence = CachedEvidence(Recorder(source, record) if record is not None else source)
        verdicts = run_checks(evidence, needs)
    except ClusterError as error:
        print(f"preflight: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json_file is not None:
        status = exit_status(verdicts)
        report = {
            "exit_status": status,
            "source": str(from_dir or "live"),
            "verdicts": [one.as_json() for one in verdicts],
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(table_of(verdicts))
    console.print(summary_of(verdicts, from_dir), markup=False)
    raise typer.Exit(exit_status(verdicts))


def table_of(verdicts: list[Verdict]) -> Table:
    """One row a finding; the check's number and name stand at its first."""
    table = Table(title="NPU preflight")
    for column in ("#", "check", "verdict", "found", "what to change"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        for place, one in enumerate(sorted(verdict.findings, key=lambda finding: -finding.severity)):
            head = (str(verdict.number), verdict.title) if place == 0 else ("", "")
            label = f"[{COLOURS[one.severity]}]{one.severity.label}[/]"
            table.add_row(*head, label, _plain(one.what), _plain(one.change))
    return table


def summary_of(verdicts: list[Verdict], from_dir: Path | None) -> str:
    """How many checks say what."""
    counts = {severity: sum(one.severity is severity for one in verdicts) for severity in Severity}
    said = ", ".join(f"{count} {severity.label}" for severity, count in sorted(counts.items(), reverse=True))
    return f"{said} (from {'recorded texts in ' + str(from_dir) if from_dir else 'this machine'})"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def main() -> None:
    app()
