"""`scripts/npu/deploy`: plan, render, start, show and stop replicas of `rung serve` from one cluster file.

Exit status: 0 it worked, 1 something is not ready, 2 the file, the plan or a host is wrong. See docs/deploy-npu.md.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster import hosts, kube
from cluster.cluster_file import ClusterFile, read_cluster_file
from cluster.errors import ClusterError
from cluster.manifests import check_manifests, dump_manifests, render_manifests
from cluster.plan import Plan, check_plan, make_plan, setup_of
from cluster.verdicts import Severity

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
notes = Console(stderr=True, highlight=False, soft_wrap=True)
File = Annotated[Path, typer.Argument(help="The cluster file.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
TABLE_WIDTH = 140


def say(text: str) -> None:
    notes.print(text, markup=False)


@app.command()
def plan(
    file: File,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan to this file as well.")] = None,
) -> None:
    """Who runs where with which devices, ports, environment and rank table; what cannot work."""
    cluster = read_cluster_file(file)
    if cluster.kubernetes is not None:
        raise ClusterError("ranks on Kubernetes are planned by its scheduler; use render")
    planned = make_plan(cluster)
    _show_plan(planned)
    if json_file is not None:
        json_file.write_text(json.dumps(plan_as_json(planned), indent=1) + "\n")
    findings = check_plan(planned)
    for one in findings:
        say(f"{one.severity.label}: {one.what}; {one.change}")
    raise typer.Exit(2 if any(one.severity is Severity.FAIL for one in findings) else 0)


@app.command()
def render(
    file: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of to standard output.")
    ] = None,
) -> None:
    """Kubernetes: the checked manifests. Bare hosts: the commands of every process, and the rank tables."""
    cluster = read_cluster_file(file)
    text = _manifests(cluster) if cluster.kubernetes is not None else _commands(make_plan(cluster))
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


@app.command()
def up(
    file: File,
    dry_run: DryRun = False,
    keep: Annotated[bool, typer.Option(help="Leave what was started when something fails.")] = False,
) -> None:
    """Start everything and wait until it is ready."""
    cluster = read_cluster_file(file)
    if cluster.kubernetes is not None:
        text = _manifests(cluster)
        print(text, end="") if dry_run else kube.up(cluster, text, say)
        return
    planned = make_plan(cluster)
    if dry_run:
        hosts.refuse_wrong_plan(planned)
        print(_commands(planned), end="")
        return
    hosts.up(planned, say, keep)
    say(f"serving {cluster.model} at {planned.router_url or ', '.join(one.url for one in planned.replicas)}")


@app.command()
def status(
    file: File,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the states to this file as well.")] = None,
) -> None:
    """Every process or pod: does it live, is it ready. Exit status 1 when one is not."""
    cluster = read_cluster_file(file)
    table, rows = Table(title=cluster.name), []
    if cluster.kubernetes is not None:
        columns = ("pod", "node", "phase", "restarts", "ready")
        rows = [(one.name, one.node, one.phase, str(one.restarts), _yes(one.ready)) for one in kube.status(cluster)]
        is_well = bool(rows) and all(row[-1] == "yes" for row in rows)
    else:
        columns = ("process", "host", "url", "alive", "ready")
        states = hosts.status(make_plan(cluster))
        rows = [(one.name, one.host, one.url or "-", _yes(one.alive), _yes(one.ready)) for one in states]
        is_well = all(one.alive and one.ready is not False for one in states)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1) + "\n")
    raise typer.Exit(0 if is_well else 1)


@app.command()
def logs(
    file: File,
    process: Annotated[str, typer.Argument(help="Its exact name: replica-0, router, or a pod's.")],
    lines: Annotated[int, typer.Option(help="How many of the last lines.", min=0)] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
) -> None:
    """The log of one process."""
    cluster = read_cluster_file(file)
    if cluster.kubernetes is not None:
        raise typer.Exit(kube.logs(cluster, process, lines, follow))
    planned = make_plan(cluster)
    if follow:
        raise typer.Exit(hosts.follow(planned, process, lines))
    for line in hosts.tail(planned, process, lines):
        print(line)


@app.command()
def down(file: File, dry_run: DryRun = False) -> None:
    """Stop everything: requests in flight are finished, then nothing is left."""
    cluster = read_cluster_file(file)
    if cluster.kubernetes is not None:
        text = _manifests(cluster)
        say(f"would delete what render {file} shows") if dry_run else kube.down(cluster, text, say)
        return
    planned = make_plan(cluster)
    if dry_run:
        names = ", ".join(process.name for process in hosts.processes_of(planned))
        say(f"would stop {names}")
        return
    hosts.down(planned, say)


def plan_as_json(planned: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "name": planned.cluster.name,
        "router": planned.router_url,
        "replicas": [
            {
                "name": replica.name,
                "url": replica.url,
                "rendezvous": replica.rendezvous,
                "nodes": [
                    {
                        "host": node.host.name,
                        "node_rank": node.node_rank,
                        "nnodes": node.nnodes,
                        "devices": list(node.devices),
                        "environment": node.environment,
                        "setup": list(setup_of(planned.cluster, node.host)),
                    }
                    for node in replica.nodes
                ],
                "rank_table": replica.table,
            }
            for replica in planned.replicas
        ],
    }


def _show_plan(planned: Plan) -> None:
    table = Table(title=planned.cluster.name)
    for column in ("replica", "url", "node", "host", "devices", "ranks"):
        table.add_column(column, overflow="fold")
    for replica in planned.replicas:
        for node in replica.nodes:
            ranks = [str(rank.rank_id) for rank in replica.ranks if rank.server_id == node.host.address]
            devices = ",".join(map(str, node.devices)) or "-"
            place = f"{node.node_rank} of {node.nnodes}"
            table.add_row(replica.name, replica.url, place, node.host.name, devices, ",".join(ranks) or "-")
    if planned.router_host is not None:
        table.add_row("router", str(planned.router_url), "-", planned.router_host.name, "-", "-")
    _console().print(table)


def _commands(planned: Plan) -> str:
    """Every process as a shell command, with secrets left out."""
    parts = []
    for process in hosts.processes_of(planned):
        parts.append(f"# {process.name} on {process.host.name} ({process.host.address}, {process.host.transport})")
        parts += [
            f"# {path}:\n" + "\n".join(f"#   {line}" for line in text.splitlines())
            for path, text in process.files.items()
        ]
        parts += [f"source {shlex.quote(path)}" for path in process.setup]
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in process.environment.items())
        parts.append(f"env {variables} {shlex.join(process.command)}\n")
    return "\n".join(parts)


def _manifests(cluster: ClusterFile) -> str:
    documents = render_manifests(cluster)
    if wrong := check_manifests(cluster, documents):
        raise ClusterError("the manifests are wrong:\n  " + "\n  ".join(wrong))
    return dump_manifests(documents)


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    return console


def main(run: Callable[[], None] = app) -> None:
    try:
        run()
    except ClusterError as error:
        print(f"deploy: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
