"""Containers with NPUs: which devices and which files of the host they need, for Docker's command line and for pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.cluster_file import Container

CONTROL_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
DRIVER_MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/tools",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
"""Host files that a container sees read-only. `driver/tools` has hccn_tool."""


def device_files(devices: Sequence[int]) -> list[str]:
    """The device files of these physical ids, with those that every container needs."""
    return [*(f"/dev/davinci{device}" for device in sorted(devices)), *CONTROL_DEVICES]


def container_command(
    container: Container,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    devices: Sequence[int],
    model: str,
    is_npu: bool,
) -> list[str]:
    """The words that run a replica in a container, in the foreground, so that ending them ends it.

    Args:
        environment: values stay in the client's own environment; only the names stand in the words.
        devices: physical ids. A device may belong to one container only.
        model: mounted read-only when it is a path.
    """
    words = [container.runtime, "run", "--rm", "--init", "--name", name, "--network", "host"]
    words += ["--shm-size", container.shm_size, "--ulimit", "memlock=-1"]
    if container.privileged:
        words.append("--privileged")
    if is_npu:
        for path in device_files(devices):
            words += ["--device", path]
        for path in DRIVER_MOUNTS:
            words += ["-v", f"{path}:{path}:ro"]
    if "RANK_TABLE_FILE" in environment:
        table = environment["RANK_TABLE_FILE"]
        words += ["-v", f"{table}:{table}:ro"]
    if model.startswith("/"):
        words += ["-v", f"{model}:{model}:ro"]
    for mount in container.mounts:
        words += ["-v", mount]
    for variable in sorted(environment):
        words += ["-e", variable]
    return [*words, container.image, *command]
