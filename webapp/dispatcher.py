"""Lets waiting runs have their turn, as long as the server runs."""

import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator

import psutil

from trainer_core.run_folders import RunFolders
from webapp.run_queue import RunQueue
from webapp.supervisor import start_queued, starting

LOOK_SECONDS = 1.0
TAKE_UP_SECONDS = 60.0
"""Between looks for runs that are in no queue: their start was cut off, or the queue's file was damaged."""
logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def dispatching(runs: RunFolders) -> AsyncIterator[None]:
    """Look after the queue of `runs` in a thread of its own, since a look may wait for a trainer's start."""
    ending = threading.Event()
    threading.Thread(target=_dispatch, args=(runs, ending), daemon=True).start()
    try:
        yield
    finally:
        ending.set()


def _dispatch(runs: RunFolders, ending: threading.Event) -> None:
    before, look_again = psutil.Process().create_time(), 0.0
    while not ending.wait(LOOK_SECONDS):
        try:
            if time.monotonic() >= look_again:
                with starting(runs):
                    RunQueue(runs).take_up(before)
                before, look_again = time.time(), time.monotonic() + TAKE_UP_SECONDS
            start_queued(runs)
        except Exception:  # as on a full disk: the next look may have more luck
            logger.exception("The queue could not be looked after; trying again.")
