"""Keeps what a trainer prints from filling the disk: its log is two files, the older of which is given up in time."""

import contextlib
import os
from pathlib import Path

MAX_BYTES = 32 << 20
"""Of one file. A night prints kilobytes; only a library gone wild comes near."""


def rotate(log: Path) -> None:
    """Once the log that this process prints to is full, call it `trainer.log.1` and print to a new one.

    Nothing printed is lost between the two, and what runs in this process notices nothing. Where the system forbids
    to rename an open file (Windows) the log stays one and grows.
    """
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(1), log.stat()) or log.stat().st_size < MAX_BYTES:
            return
        log.replace(log.with_name(f"{log.name}.1"))
        new = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(new, 1)
        os.dup2(new, 2)
        os.close(new)
