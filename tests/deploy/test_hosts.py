"""Bare hosts: real replicas of `rung serve` as processes of this machine, and ssh through a fake one on the PATH."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import hosts
from cluster.cluster_file import ClusterFile, Host, parse_cluster
from cluster.deploy_cli import main
from cluster.errors import ClusterError
from cluster.plan import Plan, make_plan
from cluster.transport import Ssh, ask_agent
from tiny_models import save_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that are free now, one after another, below those that the system gives out."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(first, first + count):
                trial = stack.enter_context(socket.socket())
                trial.bind(("127.0.0.1", number))
            return list(range(first, first + count))
    raise AssertionError("no free ports")


def local_cluster(folder: Path, model: str, **fields: Any) -> ClusterFile:
    server, _, router = free_ports(3)
    here = {"name": "here", "address": "127.0.0.1", "transport": "local", "state_dir": str(folder / "state")}
    values = {
        "name": f"{folder.name[:24].replace('_', '-').strip('-')}-{os.getpid()}",
        "model": model,
        "device": "cpu",
        "ports": {"server": server, "router": router},
        "timeouts": {"ready_s": 240, "drain_s": 5},
        "serve": {"dtype": "float32", "max_total_tokens": 2048},
        "hosts": [here],
    }
    return parse_cluster({**values, **fields})


def marked_processes(deployment: str) -> list[int]:
    """Everything that lives with this deployment's mark, found without the code under test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"RUNG_DEPLOYMENT={deployment}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, list[str]]]:
    """Two replicas of a tiny model behind a router, up and ready; down at the end, with nothing left."""
    folder = tmp_path_factory.mktemp("deployment")
    model = folder / "model"
    model.mkdir()
    save_tiny_llama(model, max_position_embeddings=1024)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = make_plan(local_cluster(folder, str(model), replicas=2, router={}))
    said: list[str] = []
    try:
        hosts.up(plan, said.append)
        yield plan, said
    finally:
        hosts.down(plan, said.append)
        assert marked_processes(plan.cluster.name) == []
        assert [state.alive for state in hosts.status(plan)] == [False] * 3


def complete(url: str, prompt: str = "hello there", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_every_replica_and_the_router_answer(deployment: tuple[Plan, list[str]]) -> None:
    plan, said = deployment
    texts = set()
    for url in (*(replica.url for replica in plan.replicas), str(plan.router_url)):
        answer = complete(url)
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
    assert [line for line in said if "ready at" in line][-1] == f"router: ready at {plan.router_url}"


def test_status_and_logs(deployment: tuple[Plan, list[str]]) -> None:
    plan, _ = deployment
    states = hosts.status(plan)
    assert [(one.name, one.alive, one.ready) for one in states] == [
        ("replica-0", True, True),
        ("replica-1", True, True),
        ("router", True, True),
    ]
    assert any(f"serving {plan.cluster.model}" in line for line in hosts.tail(plan, "replica-1", 50))
    with pytest.raises(ClusterError, match="known: replica-0, replica-1, router"):
        hosts.tail(plan, "replica", 5)


def test_a_second_up_is_refused_and_harms_nothing(deployment: tuple[Plan, list[str]]) -> None:
    plan, _ = deployment
    with pytest.raises(ClusterError, match="is up already: run down first"):
        hosts.up(plan, lambda _: None)
    assert all(state.ready for state in hosts.status(plan))


def test_streams_pass_the_router(deployment: tuple[Plan, list[str]]) -> None:
    plan, _ = deployment
    body = {"prompt": "hello", "max_tokens": 4, "stream": True}
    url = f"{plan.router_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert len(events) >= 4


def test_a_session_stays_with_its_replica(deployment: tuple[Plan, list[str]]) -> None:
    """Turns of several sessions all find their history; each session is known to exactly one replica."""
    plan, _ = deployment
    with httpx.Client(base_url=str(plan.router_url), timeout=60, trust_env=False) as client:
        names = [client.post("/open_session", json={"capacity_of_str_len": 200}).json() for _ in range(3)]
        for turn in range(2):
            for name in names:
                sampling = {"max_new_tokens": 3, "temperature": 0}
                body = {"text": f"turn {turn}", "session_params": {"id": name}, "sampling_params": sampling}
                answer = client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
        assert [client.get(f"/sessions/{name}").json()["turns"] for name in names] == [2, 2, 2]
        for name in names:
            known = [httpx.get(f"{one.url}/sessions/{name}", trust_env=False).status_code for one in plan.replicas]
            assert sorted(known) == [200, 404]
        assert client.post("/close_session", json={"session_id": names[0]}).status_code == 200
        assert client.get(f"/sessions/{names[0]}").status_code == 404


def test_the_router_refuses_what_is_about_one_replica(deployment: tuple[Plan, list[str]]) -> None:
    plan, _ = deployment
    answer = httpx.get(f"{plan.router_url}/metrics", trust_env=False)
    assert answer.status_code == 404
    assert plan.replicas[0].url in answer.json()["error"]["message"]


def test_a_replica_that_is_killed_is_seen_and_passed_over(deployment: tuple[Plan, list[str]]) -> None:
    """Last of the deployment's tests. No orphan is left of the killed replica, and down ends the rest."""
    plan, _ = deployment
    pid = hosts.status(plan)[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while hosts.status(plan)[0].alive and time.monotonic() < deadline:
        time.sleep(0.05)  # until it is gone it may take a request, which is then not sent to another
    for number in range(6):
        assert complete(str(plan.router_url), f"prompt {number}").status_code == 200
    assert [state.alive for state in hosts.status(plan)] == [False, True, True]


def test_a_process_that_ends_while_it_starts_is_seen_at_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    plan = make_plan(local_cluster(tmp_path, str(model), serve={"no_such_flag": 1}))
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"replica-0 on here has ended:\n(.*\n)*.*no-such-flag"):
        hosts.up(plan, lambda _: None)
    assert time.monotonic() - began < 60
    assert marked_processes(plan.cluster.name) == []


def test_nothing_is_started_when_a_host_cannot(tmp_path: Path) -> None:
    """Every problem of every host in one answer: the model, the port, the key."""
    plan = make_plan(local_cluster(tmp_path, str(tmp_path / "no-model"), replicas=2))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", plan.replicas[1].port))
        taken.listen()
        with pytest.raises(ClusterError) as refused:
            hosts.up(plan, lambda _: None)
    assert "no-model does not exist" in str(refused.value)
    assert f"port {plan.replicas[1].port} (replica-1) cannot be had" in str(refused.value)
    assert not (tmp_path / "state").exists()
    keyed = make_plan(local_cluster(tmp_path, str(tmp_path), api_key_env="NO_SUCH_KEY_HERE"))
    with pytest.raises(ClusterError, match="NO_SUCH_KEY_HERE, which is not set"):
        hosts.up(keyed, lambda _: None)


def test_an_npu_host_without_its_devices_is_refused(tmp_path: Path) -> None:
    """No device is made a CPU silently: the missing device files are named (CASES B070)."""
    if Path("/dev/davinci0").exists():
        pytest.skip("this machine has an NPU")
    here = {"name": "here", "address": "127.0.0.1", "transport": "local", "interface": "lo", "devices": [0]}
    fields = {"device": "npu", "hosts": [{**here, "state_dir": str(tmp_path / "state")}]}
    plan = make_plan(local_cluster(tmp_path, "smollm2-135m-instruct", **fields))
    with pytest.raises(ClusterError, match="over which no other host answers"):
        hosts.up(plan, lambda _: None)
    fields["hosts"] = [{**here, "interface": "eth0", "state_dir": str(tmp_path / "state")}]
    with pytest.raises(ClusterError, match="/dev/davinci0 does not exist"):
        hosts.up(make_plan(local_cluster(tmp_path, "smollm2-135m-instruct", **fields)), lambda _: None)


# The agent


def here(folder: Path, **fields: Any) -> Host:
    values = {"name": "here", "address": "127.0.0.1", "transport": "local", "state_dir": str(folder / "state")}
    return Host(**{**values, **fields})


def start(host: Host, deployment: str, name: str, command: list[str]) -> int:
    marker = {"RUNG_DEPLOYMENT": f"{deployment}/{name}"}
    request = {"verb": "start", "deployment": deployment, "name": name, "command": command, "environment": marker}
    pid: int = ask_agent(host, {**request, "removed": ["http_proxy"], "files": {}, "setup": []})["pid"]
    return pid


def stop(host: Host, deployment: str, grace_s: float) -> dict[str, Any]:
    return ask_agent(host, {"verb": "stop", "deployment": deployment, "grace_s": grace_s, "first": ["router"]})


def test_down_touches_nothing_that_is_not_its_own(tmp_path: Path) -> None:
    """A pid file that names somebody else's process, as after a reboot, kills nobody; nor does a longer name."""
    host, name = here(tmp_path), f"own-{os.getpid()}"
    stranger = subprocess.Popen(["sleep", "60"])
    neighbour = start(host, f"{name}-0", "replica-0", ["sleep", "60"])
    mine = start(host, name, "replica-0", ["sleep", "60"])
    (tmp_path / "state" / name / "replica-1.pid").write_text(str(stranger.pid))
    try:
        answer = stop(host, name, 5.0)
        assert answer == {"stopped": [f"{name}/replica-0"], "killed": [], "left": []}
        assert not Path(f"/proc/{mine}/exe").exists() or marked_processes(name) == []
        assert stranger.poll() is None
        assert marked_processes(f"{name}-0") == [neighbour]
    finally:
        stop(host, f"{name}-0", 5.0)
        stranger.kill()
        stranger.wait()


def test_what_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    host, name = here(tmp_path), f"stubborn-{os.getpid()}"
    code = "trap '' TERM; sleep 61 & sleep 62 & echo up; wait; wait"
    start(host, name, "replica-0", ["sh", "-c", code])
    deadline = time.monotonic() + 20
    while len(marked_processes(name)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(marked_processes(name)) == 3
    answer = stop(host, name, 0.3)
    assert answer["killed"] == [f"{name}/replica-0"]
    assert marked_processes(name) == []


FAKE_DOCKER = """#!/bin/sh
echo "$@" >> {folder}/docker-calls
[ "$1" = run ] || exit 0
trap '' TERM
sleep 60
"""


def test_a_container_whose_client_is_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "docker"
    tool.write_text(FAKE_DOCKER.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "KILL_MARGIN_S", 0)
    fields = {"container": {"image": "rung:1"}, "timeouts": {"ready_s": 1, "drain_s": 1}}
    plan = make_plan(local_cluster(tmp_path, "smollm2-135m-instruct", **fields))
    with pytest.raises(ClusterError, match="replica-0 not ready after 1 s"):
        hosts.up(plan, lambda _: None)
    calls = (tmp_path / "docker-calls").read_text().splitlines()
    assert calls[0].startswith(f"run --rm --init --name {plan.cluster.name}-replica-0 --network host")
    assert calls[1] == f"rm -f {plan.cluster.name}-replica-0"
    assert marked_processes(plan.cluster.name) == []


# ssh

FAKE_SSH = """#!{python}
import json, os, pathlib, subprocess, sys
folder = pathlib.Path({folder!r})
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if "unreachable" in sys.argv:
    sys.exit("ssh: connect to host unreachable port 22: Connection timed out")
print("Welcome to this host, the banner of a login shell")
sys.stdout.flush()
sys.exit(subprocess.call(["sh", "-c", " ".join(sys.argv[sys.argv.index("--") + 2:])]))
"""
"""As sshd does: the words behind the host are joined with spaces and given to a shell."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "bin" / "ssh"
    tool.parent.mkdir()
    tool.write_text(FAKE_SSH.format(python=sys.executable, folder=str(tmp_path)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tmp_path


def test_words_reach_the_other_side_as_they_are(ssh: Path) -> None:
    host = Host("far", "10.0.0.9", user="rung", ssh_port=2222)
    words = ["printf", "%s|", "a b", "it's", '"$HOME"', "`id`", ";", "*", "", "\\", "é\n"]
    done = Ssh(host).run(words)
    assert done.stdout.split("\n", 1)[1] == "".join(f"{word}|" for word in words[2:])
    (call,) = [json.loads(line) for line in (ssh / "calls").read_text().splitlines()]
    assert call[: call.index("--")] == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-p", "2222"]
    assert call[call.index("--") + 1] == "rung@10.0.0.9"


def test_the_agent_over_ssh_with_awkward_paths(ssh: Path) -> None:
    """Start, see, read and stop a process; its secret is in no command line."""
    folder = ssh / "it's a place; $HOME"
    folder.mkdir()
    python = folder / "python 3"
    python.symlink_to(sys.executable)
    name = f"far-{os.getpid()}"
    host = Host("far", "10.0.0.9", python=str(python), state_dir=str(folder / "state"))
    marker = {"RUNG_DEPLOYMENT": f"{name}/replica-0", "RUNG_API_KEY": "s3cr3t"}
    command = ["sh", "-c", "echo key $RUNG_API_KEY proxy ${http_proxy:-none} kit $TOOLKIT; exec sleep 60"]
    request = {"verb": "start", "deployment": name, "name": "replica-0", "command": command, "environment": marker}
    request |= {"removed": ["http_proxy"], "files": {f"{folder}/tables/t.json": "{}"}}
    request["setup"] = [str(folder / "set env.sh"), str(folder / "more.sh")]
    with pytest.raises(ClusterError, match=r"set env\.sh.* cannot be sourced: .*No such file"):
        ask_agent(host, request)
    (folder / "set env.sh").write_text('echo noise; export http_proxy=p TOOLKIT="$(dirname "${BASH_SOURCE[0]}")/lib"\n')
    (folder / "more.sh").write_text('export TOOLKIT=$(basename "$TOOLKIT") RUNG_API_KEY=other\n')
    ask_agent(host, request)
    try:
        states = ask_agent(host, {"verb": "status", "deployment": name, "names": ["replica-0"]})["processes"]
        assert states["replica-0"]["alive"]
        tail = {"verb": "tail", "deployment": name, "name": "replica-0", "lines": 5}
        deadline = time.monotonic() + 20
        while not (lines := ask_agent(host, tail)["lines"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lines == ["key s3cr3t proxy none kit lib"]
        assert (folder / "tables" / "t.json").read_text() == "{}"
    finally:
        assert stop(host, name, 5.0)["stopped"] == [f"{name}/replica-0"]
    assert "s3cr3t" not in (ssh / "calls").read_text()


def test_a_host_out_of_reach_is_an_error_with_ssh_own_words(ssh: Path) -> None:
    host = Host("far", "unreachable")
    with pytest.raises(ClusterError, match=r"far \(unreachable\): status 1: ssh: connect to host .* timed out"):
        ask_agent(host, {"verb": "status", "deployment": "x", "names": []})


def test_missing_ssh_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="ssh is not installed"):
        Ssh(Host("far", "10.0.0.9")).run(["true"])


# The script


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The script's exit status, run in this process."""
    monkeypatch.setattr(sys, "argv", ["deploy", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_script_plans_and_dry_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    ports = free_ports(3)
    fields = {
        "name": "demo",
        "model": "smollm2-135m-instruct",
        "device": "npu",
        "replicas": 2,
        "ports": {"server": 40000, "router": ports[2]},
        "router": {},
        "hosts": [{"name": "a", "address": "10.0.0.1", "interface": "eth0", "devices": [3, 1], "workdir": "/opt/rung"}],
    }
    file.write_text(json.dumps(fields))
    plan = tmp_path / "plan.json"
    assert run_main(monkeypatch, "plan", str(file), "--json", str(plan)) == 0
    replicas = json.loads(plan.read_text())["replicas"]
    assert [one["nodes"][0]["environment"]["ASCEND_RT_VISIBLE_DEVICES"] for one in replicas] == ["1", "3"]
    capsys.readouterr()
    assert run_main(monkeypatch, "up", str(file), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines().count("source /usr/local/Ascend/ascend-toolkit/set_env.sh") == 2
    commands = [shlex.split(line) for line in shown.splitlines() if line.startswith("env ")]
    assert [words[words.index("--port") + 1] for words in commands] == ["40000", "40001", str(ports[2])]
    assert "ASCEND_RT_VISIBLE_DEVICES=3" in commands[1]
    assert commands[2][-4:] == ["--backend", "http://10.0.0.1:40000", "--backend", "http://10.0.0.1:40001"]
    assert run_main(monkeypatch, "down", str(file), "--dry-run") == 0
    assert "would stop replica-0, replica-1, router" in capsys.readouterr().err


def test_the_script_says_errors_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/npu/deploy"), "up", str(tmp_path / "missing.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("deploy: the cluster file")
    assert "Traceback" not in done.stderr
