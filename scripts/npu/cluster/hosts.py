"""A deployment on bare hosts: look first, start, wait until it is ready, show, stop. One agent call a step and host.

`up` checks every host before it starts anything, sees at once when a process ends while others load, and takes back
what it has started when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.cluster_file import ClusterFile, Host
from cluster.containers import container_command, device_files
from cluster.environment import REMOVED
from cluster.errors import ClusterError
from cluster.plan import (
    MARKER,
    Node,
    Plan,
    Replica,
    check_plan,
    ports_of,
    rank_table_path,
    serve_arguments,
    setup_of,
)
from cluster.start import ROOT
from cluster.transport import ask_agent, python_of, transport_of
from cluster.verdicts import Severity

Say = Callable[[str], None]
HTTP_TIMEOUT_S = 5.0
POLL_S = 0.25
LOOK_EVERY_S = 1.0
KILL_MARGIN_S = 10
LOG_LINES = 20


@dataclass(frozen=True)
class Process:
    """One process to start: what, where, with what, and where it answers."""

    name: str
    host: Host
    command: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    setup: tuple[str, ...]
    """Scripts that are sourced before it starts; what they set stands behind `environment`."""
    url: str | None
    """Where `/ready` answers; None for a node that is not its replica's first."""


@dataclass(frozen=True)
class ProcessState:
    """What is known of a process. `ready` is None when it does not answer over HTTP."""

    name: str
    host: str
    url: str | None
    pid: int | None
    alive: bool
    ready: bool | None


def replicas_of(plan: Plan, api_key: str | None = None) -> list[Process]:
    """The replicas' processes, nodes of one replica together."""
    return [_node_process(plan.cluster, replica, node, api_key) for replica in plan.replicas for node in replica.nodes]


def processes_of(plan: Plan, api_key: str | None = None) -> list[Process]:
    """All processes; the router, when there is one, stands last."""
    router = [_router_process(plan, plan.router_host)] if plan.router_host is not None else []
    return [*replicas_of(plan, api_key), *router]


def _node_process(cluster: ClusterFile, replica: Replica, node: Node, api_key: str | None) -> Process:
    name = replica.name if node.node_rank == 0 else f"{replica.name}-node-{node.node_rank}"
    environment = dict(node.environment) | {MARKER: f"{cluster.name}/{name}"}
    if api_key is not None:
        environment["RUNG_API_KEY"] = api_key
    words = serve_arguments(cluster, node.host.address, replica.port)
    if cluster.container is not None:
        command = container_command(
            cluster.container,
            _container_name(cluster, name),
            ["rung", *words],
            environment,
            node.devices,
            cluster.model,
            cluster.device == "npu",
        )
    else:
        command = [python_of(node.host), "-c", "from engine.cli import main; main()", *words]
    table = replica.table
    files = {} if table is None else {rank_table_path(cluster, node.host, replica.name): json.dumps(table, indent=1)}
    url = replica.url if node.node_rank == 0 else None
    return Process(name, node.host, tuple(command), environment, files, setup_of(cluster, node.host), url)


def _router_process(plan: Plan, host: Host) -> Process:
    router = plan.cluster.router
    assert router is not None
    script = f"{workdir_of(host)}/scripts/npu/router"
    words = [python_of(host), script, "--host", router.listen or host.address, "--port", str(plan.cluster.ports.router)]
    words += ["--prefix-chars", str(router.prefix_chars), "--max-load-factor", str(router.max_load_factor)]
    words += ["--drain-timeout-s", str(plan.cluster.timeouts.drain_s)]
    for replica in plan.replicas:
        words += ["--backend", replica.url]
    return Process("router", host, tuple(words), {MARKER: f"{plan.cluster.name}/router"}, {}, (), plan.router_url)


def workdir_of(host: Host) -> str | None:
    """Where processes run: the checkout on that host; this one on this machine."""
    return host.workdir or (str(ROOT) if host.transport == "local" else None)


def api_key_of(cluster: ClusterFile) -> str | None:
    """The replicas' key, from the variable that the file names.

    Raises:
        ClusterError: it names one that is not set here.
    """
    if cluster.api_key_env is None:
        return None
    key = os.environ.get(cluster.api_key_env)
    if not key:
        raise ClusterError(f"api_key_env names {cluster.api_key_env}, which is not set here; export it")
    return key


def refuse_wrong_plan(plan: Plan) -> None:
    """Raises ClusterError when the plan cannot work."""
    wrong = [f"{one.what}; {one.change}" for one in check_plan(plan) if one.severity is Severity.FAIL]
    if plan.router_host is not None and workdir_of(plan.router_host) is None:
        wrong.append(f"{plan.router_host.name}: the router needs the checkout there; set workdir")
    if wrong:
        raise ClusterError("the plan cannot work:\n  " + "\n  ".join(wrong))


def look(plan: Plan) -> None:
    """Ask every host whether it can start its processes.

    Raises:
        ClusterError: with everything that is wrong on any host.
    """
    problems = []
    for host in plan.cluster.hosts:
        request = _check_request(plan, host)
        try:
            problems += [f"{host.name}: {one}" for one in _ask(plan, host, request)["problems"]]
        except ClusterError as error:
            problems.append(str(error))
    if problems:
        raise ClusterError("nothing was started:\n  " + "\n  ".join(problems))


def _check_request(plan: Plan, host: Host) -> dict[str, Any]:
    cluster = plan.cluster
    nodes = [node for replica in plan.replicas for node in replica.nodes if node.host.name == host.name]
    paths = [cluster.model] if nodes and cluster.model.startswith(("/", "~", ".")) else []
    if cluster.device == "npu":
        paths += device_files(sorted(device for node in nodes for device in node.devices)) if nodes else []
    paths += setup_of(cluster, host) if nodes else ()
    if (workdir := workdir_of(host)) is not None:
        paths.append(workdir)
    packages = ["engine"] if nodes and cluster.container is None else []
    tools = [cluster.container.runtime] if nodes and cluster.container is not None else []
    if plan.router_host is not None and plan.router_host.name == host.name:
        packages += ["fastapi", "httpx", "uvicorn"]
        paths.append(f"{workdir}/scripts/npu/router")
    ports = ports_of(plan).get(host.name, [])
    return {
        "verb": "check",
        "address": host.address,
        "ports": ports,
        "paths": paths,
        "tools": tools,
        "packages": packages,
    }


def up(plan: Plan, say: Say, keep: bool = False) -> None:
    """Start everything and wait until it is ready.

    Args:
        keep: leave what was started when something fails, to look at it.
    Raises:
        ClusterError: the plan is wrong, a host cannot, a process ended, or it took too long. Nothing is left running
            unless `keep`.
    """
    refuse_wrong_plan(plan)
    api_key = api_key_of(plan.cluster)
    look(plan)
    with _taken_back(plan, say, keep):
        replicas = replicas_of(plan, api_key)
        _start(plan, replicas, say)
        _wait_until_ready(plan, replicas, say)
        if plan.router_host is not None:
            router = [_router_process(plan, plan.router_host)]
            _start(plan, router, say)
            _wait_until_ready(plan, router, say)


@contextlib.contextmanager
def _taken_back(plan: Plan, say: Say, keep: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not keep:
            say("it failed; stopping what was started")
            down(plan, say)
        raise


def _start(plan: Plan, processes: list[Process], say: Say) -> None:
    for process in processes:
        request = {
            "verb": "start",
            "name": process.name,
            "command": process.command,
            "environment": process.environment,
            "removed": REMOVED,
            "files": process.files,
            "setup": process.setup,
        }
        answer = _ask(plan, process.host, request)
        say(f"{process.name}: process {answer['pid']} on {process.host.name}, log {answer['log']}")


def _wait_until_ready(plan: Plan, processes: list[Process], say: Say) -> None:
    waiting = [process for process in processes if process.url is not None]
    deadline = time.monotonic() + plan.cluster.timeouts.ready_s
    looked = time.monotonic()
    while waiting:
        for process in list(waiting):
            if is_ready(str(process.url)):
                say(f"{process.name}: ready at {process.url}")
                waiting.remove(process)
        if time.monotonic() - looked >= LOOK_EVERY_S:
            _raise_if_one_ended(plan, processes)
            looked = time.monotonic()
        if waiting and time.monotonic() > deadline:
            names = ", ".join(process.name for process in waiting)
            raise ClusterError(
                f"{names} not ready after {plan.cluster.timeouts.ready_s} s; see logs, or raise timeouts.ready_s"
            )
        if waiting:
            time.sleep(POLL_S)


def _raise_if_one_ended(plan: Plan, processes: list[Process]) -> None:
    for process in processes:
        request = {"verb": "status", "names": [process.name]}
        if not _ask(plan, process.host, request)["processes"][process.name]["alive"]:
            lines = tail(plan, process.name, LOG_LINES)
            raise ClusterError(f"{process.name} on {process.host.name} has ended:\n  " + "\n  ".join(lines))


def is_ready(url: str) -> bool:
    """Whether `/ready` says 200."""
    try:
        return httpx.get(f"{url}/ready", timeout=HTTP_TIMEOUT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def status(plan: Plan) -> list[ProcessState]:
    """The state of every process, asked of its host and of itself."""
    states = []
    for process in processes_of(plan):
        request = {"verb": "status", "names": [process.name]}
        found = _ask(plan, process.host, request)["processes"][process.name]
        ready = is_ready(process.url) if found["alive"] and process.url is not None else None
        states.append(ProcessState(process.name, process.host.name, process.url, found["pid"], found["alive"], ready))
    return states


def tail(plan: Plan, name: str, lines: int) -> list[str]:
    """The last lines of a process's log."""
    process = process_named(plan, name)
    answer = _ask(plan, process.host, {"verb": "tail", "name": name, "lines": lines})
    found: list[str] = answer["lines"]
    return found


def follow(plan: Plan, name: str, lines: int) -> int:
    """Show a log as it grows, until it is interrupted."""
    process = process_named(plan, name)
    log = f"{process.host.state_dir.rstrip('/')}/{plan.cluster.name}/{name}.log"
    command = ["sh", "-c", 'eval "exec tail -n $1 -F $2"', "sh", str(lines), _shell_path(log)]
    return subprocess.run(transport_of(process.host).words(command), check=False).returncode


def _shell_path(path: str) -> str:
    return "~/" + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def process_named(plan: Plan, name: str) -> Process:
    """The process with exactly this name.

    Raises:
        ClusterError: there is none.
    """
    processes = {process.name: process for process in processes_of(plan)}
    if name not in processes:
        raise ClusterError(f"{name!r} is no process of {plan.cluster.name}; known: {', '.join(processes)}")
    return processes[name]


def down(plan: Plan, say: Say) -> None:
    """Stop everything, the router's host first so that no new request comes.

    Raises:
        ClusterError: a host is out of reach, or a process will not end.
    """
    hosts = sorted(plan.cluster.hosts, key=lambda host: plan.router_host is None or host.name != plan.router_host.name)
    grace_s = plan.cluster.timeouts.drain_s + KILL_MARGIN_S
    problems = []
    for host in hosts:
        try:
            answer = _ask(plan, host, {"verb": "stop", "grace_s": grace_s, "first": ["router"]}, 2 * grace_s + 30.0)
        except ClusterError as error:
            problems.append(str(error))
            continue
        if answer["killed"]:
            _remove_containers(plan, host)
        said = f"stopped {', '.join(answer['stopped'])}" if answer["stopped"] else "nothing was running"
        say(f"{host.name}: {said}" + (f"; killed {', '.join(answer['killed'])}" if answer["killed"] else ""))
        if answer["left"]:
            problems.append(f"{host.name}: processes {answer['left']} do not end")
    if problems:
        raise ClusterError("\n  ".join(problems))


def _remove_containers(plan: Plan, host: Host) -> None:
    """A client that was killed has told its container nothing."""
    container = plan.cluster.container
    if container is not None:
        processes = [one for one in replicas_of(plan) if one.host.name == host.name]
        names = [_container_name(plan.cluster, process.name) for process in processes]
        transport_of(host).run([container.runtime, "rm", "-f", *names])


def _container_name(cluster: ClusterFile, process: str) -> str:
    return f"{cluster.name}-{process}"


def _ask(plan: Plan, host: Host, request: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    return ask_agent(host, {"deployment": plan.cluster.name, "workdir": workdir_of(host), **request}, timeout_s)
