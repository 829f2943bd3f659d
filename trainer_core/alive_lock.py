"""Whether somebody holds a lock file, asked without getting in anybody's way."""

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    from filelock import FileLock, Timeout

    PROBE_SECONDS = 0.1
    """How long a look tries the lock: another process that looks holds it for an instant, a trainer for good."""

    def is_held(path: Path) -> bool:
        """Whether a process holds the lock."""
        if not path.exists():  # trying it would make it
            return False
        try:
            with FileLock(path).acquire(timeout=PROBE_SECONDS, poll_interval=PROBE_SECONDS / 10):
                return False
        except Timeout:
            return True
        except OSError:  # a read-only folder: nobody trains there
            return False

else:
    import fcntl

    def is_held(path: Path) -> bool:
        """Whether a process holds the lock; those that look share it, so that none takes another for a holder."""
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second on some network file systems
            return True
        except OSError:  # a file system without locks, which can't hold a home
            return False
        finally:
            os.close(handle)
        return False
