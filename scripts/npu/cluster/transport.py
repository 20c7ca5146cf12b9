"""How a command reaches a host: as a list of words with a text for its standard input, on this machine or over ssh.

ssh hands its words to a shell on the other side, so they are quoted here, once. Secrets travel in the standard input,
never in the words, which every user of a host can list.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster import host_agent
from cluster.cluster_file import Host
from cluster.errors import ClusterError

CONNECT_TIMEOUT_S = 10
CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Done:
    """A command's end."""

    status: int
    stdout: str
    stderr: str


class Transport(Protocol):
    """Runs commands on one host."""

    def words(self, command: Sequence[str]) -> list[str]:
        """The local command that runs this command there."""
        ...

    def run(self, command: Sequence[str], stdin: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Done: ...


@dataclass(frozen=True)
class Local:
    """This machine."""

    def words(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def run(self, command: Sequence[str], stdin: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Done:
        return _run(self.words(command), stdin, timeout_s)


@dataclass(frozen=True)
class Ssh:
    """Another machine. Keys and known hosts are ssh's own business; it is never asked for a password."""

    host: Host

    def words(self, command: Sequence[str]) -> list[str]:
        target = f"{self.host.user}@{self.host.address}" if self.host.user else self.host.address
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-p", str(self.host.ssh_port)]
        return ["ssh", *options, "--", target, shlex.join(command)]

    def run(self, command: Sequence[str], stdin: str = "", timeout_s: float = CALL_TIMEOUT_S) -> Done:
        return _run(self.words(command), stdin, timeout_s)


def _run(words: list[str], stdin: str, timeout_s: float) -> Done:
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"{words[0]} is not installed or not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{words[0]} gave no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ClusterError(f"{words[0]} cannot be run: {error.strerror}") from None
    return Done(done.returncode, done.stdout, done.stderr)


def transport_of(host: Host) -> Transport:
    """The host's own way."""
    return Local() if host.transport == "local" else Ssh(host)


def python_of(host: Host) -> str:
    """The Python that has rung there."""
    return host.python or (sys.executable if host.transport == "local" else "python3")


def ask_agent(host: Host, request: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
    """Have the host's agent do a request.

    Raises:
        ClusterError: the host is out of reach, its Python fails, or the agent names a problem.
    """
    source = Path(host_agent.__file__).read_text()
    full = {"state_dir": host.state_dir, "workdir": host.workdir, **request}
    script = f"{source}\nanswer({json.dumps(full)!r})\n"
    done = transport_of(host).run([python_of(host), "-"], script, timeout_s)
    for line in done.stdout.splitlines():
        if line.startswith(host_agent.ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(host_agent.ANSWER))
            if "problem" in answer:
                raise ClusterError(f"{host.name}: {answer['problem']}")
            return answer
    said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
    raise ClusterError(f"{host.name} ({host.address}): status {done.status}: {said}")
