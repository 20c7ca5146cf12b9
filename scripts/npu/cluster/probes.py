"""Questions about this machine that no tool answers everywhere. An answer is lines of text, so that it can be recorded.

Probes look and change nothing: a port is tried by binding it, a library by loading it in a process of its own.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGES = ("torch", "torch_npu", "triton", "triton-ascend")
LIBRARIES = ("libascendcl.so", "libhccl.so", "libatb.so")
REACH_TIMEOUT_S = 3.0
LOAD_TIMEOUT_S = 30.0
_SIOCGIFADDR = 0x8915

RECORDED_VARIABLES = (
    "ASCEND_",
    "HCCL_",
    "GLOO_",
    "TP_SOCKET_",
    "RANK_TABLE",
    "PYTORCH_NPU_",
    "TASK_QUEUE_",
    "LD_LIBRARY_",
)
"""Beginnings of the variables that `environment` shows; the others may hold secrets and decide nothing here."""


def packages(_: Mapping[str, str]) -> str:
    """`name==version` of Python and the packages that must fit each other."""
    lines = [f"python=={platform.python_version()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} missing")
    return "\n".join(lines) + "\n"


def libraries(environment: Mapping[str, str]) -> str:
    """`name ok` or `name <the loader's words>`, each library loaded by a process that ends."""
    lines = []
    for name in LIBRARIES:
        code = f"import ctypes; ctypes.CDLL({name!r})"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                timeout=LOAD_TIMEOUT_S,
                env=dict(environment),
                check=False,
            )
            said = done.stderr.strip().splitlines()
            reason = said[-1].removeprefix("OSError: ") if said else f"the loader ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            done, reason = None, f"loading took more than {LOAD_TIMEOUT_S:g} s"
        lines.append(f"{name} {'ok' if done is not None and done.returncode == 0 else reason}")
    return "\n".join(lines) + "\n"


def environment(values: Mapping[str, str]) -> str:
    """`NAME=value` of the variables that the checks look at."""
    shown = {name: value for name, value in values.items() if name.startswith(RECORDED_VARIABLES)}
    return "".join(f"{name}={value}\n" for name, value in sorted(shown.items()))


def interfaces(_: Mapping[str, str]) -> str:
    """`name address` of every network interface; `-` without an IPv4 address."""
    lines = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _index, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
            except OSError:
                address = "-"
            lines.append(f"{name} {address}")
    return "\n".join(lines) + "\n"


def ports(_: Mapping[str, str], *numbers: str) -> str:
    """`port free` or `port taken`, tried by binding it on every address."""
    lines = []
    for number in numbers:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", int(number)))
                lines.append(f"{number} free")
            except OSError as error:
                lines.append(f"{number} {'taken' if error.errno == 98 else error.strerror}")
    return "\n".join(lines) + "\n"


def reach(_: Mapping[str, str], *targets: str) -> str:
    """`host:port ok` or `host:port <reason>`."""
    lines = []
    for target in targets:
        host, _colon, port = target.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), REACH_TIMEOUT_S):
                lines.append(f"{target} ok")
        except (OSError, ValueError) as error:
            lines.append(f"{target} {error}")
    return "\n".join(lines) + "\n"


def limits(_: Mapping[str, str]) -> str:
    """`nofile`, `memlock_kb` (-1 is no limit) and `shm_mb` of this process."""
    nofile, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = -1 if memlock == resource.RLIM_INFINITY else memlock >> 10
    lines = [f"nofile {nofile}", f"memlock_kb {locked}"]
    if Path("/dev/shm").is_dir():
        memory = os.statvfs("/dev/shm")
        lines.append(f"shm_mb {memory.f_frsize * memory.f_blocks >> 20}")
    return "\n".join(lines) + "\n"


PROBES: Mapping[str, Callable[..., str]] = {
    "packages": packages,
    "libraries": libraries,
    "environment": environment,
    "interfaces": interfaces,
    "ports": ports,
    "reach": reach,
    "limits": limits,
}
