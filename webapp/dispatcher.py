"""Lets waiting runs have their turn, as long as the server runs."""

import contextlib
import logging
import threading
from collections.abc import AsyncIterator

import psutil

from trainer_core.run_folders import RunFolders
from webapp.run_queue import RunQueue
from webapp.supervisor import start_queued, starting

LOOK_SECONDS = 1.0
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
    has_taken_up = False
    while not ending.wait(LOOK_SECONDS):
        try:
            start_queued(runs)
            if not has_taken_up:
                with starting(runs):
                    RunQueue(runs).take_up(before=psutil.Process().create_time())
                has_taken_up = True
        except Exception:  # as on a full disk: the next look may have more luck
            logger.exception("The queue could not be looked after; trying again.")
