"""What the two scripts raise at their edge: one line that tells the reader what to change."""

from __future__ import annotations


class ClusterError(Exception):
    """A cluster file, a plan, a host or a command is wrong; the message says what to change."""
