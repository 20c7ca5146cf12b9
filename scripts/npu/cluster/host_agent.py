"""What runs on a host: sent over standard input to its Python, it does one request and prints one line of JSON.

Standard library only, and nothing is installed on the host. Processes are found by RUNG_DEPLOYMENT in their
environment, so a recycled process id is never mistaken for one of ours and nobody else's process is touched.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARKER = "RUNG_DEPLOYMENT"
ANSWER = "RUNG-AGENT "
POLL_S = 0.1
KILL_WAIT_S = 5.0
SETUP_TIMEOUT_S = 60.0


def check(request: dict[str, Any]) -> dict[str, Any]:
    """What is missing or in the way: ports, files, the package, processes that are up already."""
    problems = []
    for number, what in request["ports"]:
        with socket.socket(socket.AF_INET6 if ":" in request["address"] else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((request["address"], number))
            except OSError as error:
                problems.append(f"port {number} ({what}) cannot be had on {request['address']}: {error.strerror}")
    problems += [f"{path} does not exist" for path in request["paths"] if not _path(path).exists()]
    problems += [f"{tool} is not installed" for tool in request["tools"] if shutil.which(tool) is None]
    if request["workdir"] is not None:
        sys.path.insert(0, str(_path(request["workdir"])))
    for package in request["packages"]:
        if importlib.util.find_spec(package) is None:
            problems.append(f"{sys.executable} has no package {package}: install rung there, or set python and workdir")
    running = _marked(request["deployment"])
    if running:
        names = ", ".join(sorted(set(running.values())))
        problems.append(f"{names} of {request['deployment']} is up already: run down first")
    return {"problems": problems}


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a process that outlives this one, with its output in a log."""
    folder = _folder(request)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in request["files"].items():
        _path(path).parent.mkdir(parents=True, exist_ok=True)
        _path(path).write_text(text)
    log = folder / (request["name"] + ".log")
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    values = _after_setup(request["setup"])
    if isinstance(values, str):
        return {"problem": values}
    for name in request["removed"]:
        values.pop(name, None)
    for name, value in request["environment"].items():
        values[name] = str(_path(value)) if value.startswith("~/") else value
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                request["command"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=str(_path(request["workdir"] or str(folder))),
                env=values,
                start_new_session=True,
            )
        except OSError as error:
            return {"problem": f"{request['command'][0]} cannot be started: {error.strerror}"}
    (folder / (request["name"] + ".pid")).write_text(f"{process.pid}\n")
    return {"pid": process.pid, "log": str(log)}


def _after_setup(scripts: "list[str]") -> "dict[str, str] | str":
    """The environment that a shell has when it has sourced the scripts, one after another; or why it has not."""
    if not scripts:
        return dict(os.environ)
    lines = [f". {shlex.quote(str(_path(one)))} >&2 || exit 1" for one in scripts]
    command = ["bash", "-c", "\n".join([*lines, "exec env -0"])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SETUP_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' and '.join(scripts)} cannot be sourced: {error}"
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return f"{' and '.join(scripts)} cannot be sourced: {said[-1] if said else f'status {done.returncode}'}"
    pairs = (entry.partition(b"=") for entry in done.stdout.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Of each name: its process id, and whether it lives."""
    alive = _marked(request["deployment"])
    found = {}
    for name in request["names"]:
        pid = _pid_of(_folder(request) / (name + ".pid"))
        found[name] = {"pid": pid, "alive": pid is not None and alive.get(pid) == f"{request['deployment']}/{name}"}
    return {"processes": found}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End the deployment: the started processes by SIGTERM, which drains, those named `first` before the others; what
    is left after the grace by SIGKILL."""
    folder, deployment = _folder(request), request["deployment"]
    files = sorted(folder.glob("*.pid"))
    stopped = _marked(deployment)
    first = [file for file in files if file.stem in request["first"]]
    for wave in (first, [file for file in files if file not in first]):
        pids = {pid for file in wave if (pid := _pid_of(file)) is not None and pid in stopped}
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        names = {stopped[pid] for pid in pids}
        _wait_until_gone(deployment, request["grace_s"] if pids else 0.0, names)
    killed = _marked(deployment)
    for pid in killed:
        _signal(pid, signal.SIGKILL)
    left = _wait_until_gone(deployment, KILL_WAIT_S)
    if not left:
        for file in files:
            file.unlink()
    return {"stopped": sorted(set(stopped.values())), "killed": sorted(set(killed.values())), "left": sorted(left)}


def tail(request: dict[str, Any]) -> dict[str, Any]:
    """The last lines of a log."""
    path = _folder(request) / (request["name"] + ".log")
    if not path.exists():
        return {"problem": f"{path} does not exist: {request['name']} was never started here"}
    return {"lines": path.read_text(errors="replace").splitlines()[-request["lines"] :]}


def _marked(deployment: str) -> dict[int, str]:
    """Live processes of the deployment, and the marker of each. A zombie has no environment and is not among them."""
    found = {}
    wanted = f"{MARKER}={deployment}/".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            for variable in variables:
                if variable.startswith(wanted):
                    found[int(entry.name)] = variable.decode().partition("=")[2]
    return found


def _wait_until_gone(deployment: str, limit_s: float, names: "set[str] | None" = None) -> dict[int, str]:
    """What is left of these processes and their children, or of all, when they are gone or the time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        left = {pid: name for pid, name in _marked(deployment).items() if names is None or name in names}
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pid_of(file: Path) -> "int | None":
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _folder(request: dict[str, Any]) -> Path:
    return _path(request["state_dir"]) / str(request["deployment"])


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def answer(text: str) -> None:
    """Do the request in this JSON and print the answer."""
    request = json.loads(text)
    verbs = {"check": check, "start": start, "status": status, "stop": stop, "tail": tail}
    print(ANSWER + json.dumps(verbs[request["verb"]](request)), flush=True)
