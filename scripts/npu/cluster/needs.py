"""What a host must offer: the numbers that the checks compare with, from flags or from a cluster file's plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cluster.environment import Features


@dataclass(frozen=True)
class Needs:
    """The needs of one host.

    `devices` are physical ids; empty means the first `num_devices`. `ports` are (number, what for).
    """

    num_devices: int = 1
    devices: tuple[int, ...] = ()
    num_hosts: int = 1
    min_free_mb: int = 1024
    min_driver: str | None = None
    interface: str | None = None
    ports: tuple[tuple[int, str], ...] = ((30000, "server"),)
    store: str | None = None
    """`host:port` of the transfer store."""
    peers: tuple[str, ...] = ()
    """Device addresses on other hosts that must answer."""
    load_skew_s: int = 600
    """The longest that one rank may load weights while another waits for it."""
    min_shm_mb: int = 1024
    min_nofile: int = 65535
    uses_hugepages: bool = False
    rank_table: Path | None = None
    prefill_geometry: Path | None = None
    decode_geometry: Path | None = None
    features: Features = field(default_factory=Features)

    @property
    def is_distributed(self) -> bool:
        return self.num_hosts > 1
