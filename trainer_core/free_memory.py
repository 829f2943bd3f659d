"""The main memory that there is, and whether a data set is held in it. Light: no torch."""

import sys
from pathlib import Path

import psutil

DATASET_SHARE = 0.25
"""Of the free main memory: what a data set may take of it. A larger one is mapped from its files."""


def holds(dataset_bytes: int) -> bool:
    """Whether a data set of this size is held in memory, by DATASET_SHARE; if not it stays in its files."""
    return dataset_bytes <= free_bytes() * DATASET_SHARE


def free_bytes() -> int:
    """What this machine's main memory can still take, or what the control group that Descant runs in lets it."""
    return min(psutil.virtual_memory().available, free_in_group(Path("/sys/fs/cgroup")))


def free_in_group(group: Path) -> int:
    """The rest of a control group's limit (cgroup v2, as containers have it); without a limit without end."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])  # which the system gives back when it is needed
    except (OSError, ValueError, KeyError):
        return sys.maxsize
