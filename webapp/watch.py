"""What all clients of a run share: its new events and its state, looked at once for everyone.

A watch begins with the first client and ends with the last. It keeps the newest megabyte of events, so that a client
in step costs a send and no look at the disk.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_core.event_reader import EventReader
from trainer_core.run_dir import RunDir, RunSummary
from webapp import runs

POLL_SECONDS = 0.05
"""Between looks at the event file: half of it is the mean delay of an event."""
STATUS_SECONDS = 0.5
"""Between looks at the lock, which also wake every client."""
SETTLE_SECONDS = 2.0
"""How long an ended run's state must stay the same before the stream ends: the exit status comes after the end."""
TAIL_BYTES = 1 << 20
"""About 5,000 steps."""


@dataclass(frozen=True)
class Batch:
    """Events that were read together, and the message for each client that has just those before them."""

    first: int
    last: int
    lines: list[str]
    message: str

    def after(self, seq: int) -> str:
        """The message for a client that has the events up to `seq`."""
        return self.message if seq < self.first else events_message(self.lines[seq + 1 - self.first :])


def events_message(lines: list[str]) -> str:
    """The message that brings these events."""
    return f'{{"events":[{",".join(lines)}]}}'


class Watch:
    """One run as its clients see it."""

    def __init__(self, run: RunDir) -> None:
        self.state: str | None = None
        """The message with the run's summary, another one when more changes than its counters; None at first."""
        self.is_deleted = False
        self.has_settled = False
        """Whether the run has ended and nothing more is to come."""
        self.catching_up = asyncio.Lock()
        """For clients that read the file: one at a time, since many at once would delay those in step."""
        self.wakers: set[asyncio.Event] = set()
        """One a client, set whenever there may be something for it."""
        self.task = asyncio.create_task(self._follow(run))
        self._seq = 0
        self._tail: deque[Batch] = deque()
        self._tail_size = 0
        self._summary: RunSummary | None = None
        self._changed_at = 0.0

    def holds(self, seq: int) -> bool:
        """Whether the tail goes on without a gap after the event `seq`."""
        return seq >= (self._tail[0].first - 1 if self._tail else self._seq)

    def batch_after(self, seq: int) -> Batch | None:
        """The part of the tail that comes after the event `seq`; None at its end."""
        place = bisect_left(self._tail, seq + 1, key=lambda batch: batch.last)
        return self._tail[place] if place < len(self._tail) else None

    async def _follow(self, run: RunDir) -> None:
        reader = EventReader(run.events)
        await asyncio.to_thread(reader.skip, TAIL_BYTES)
        self._seq = reader.seq
        looked_at = 0.0
        try:
            while not self.is_deleted:
                # The state first, so that an ended run's last events are read before the stream ends.
                if is_due := time.monotonic() - looked_at >= STATUS_SECONDS:
                    looked_at = time.monotonic()
                    self._take(*await asyncio.to_thread(_look_at, run))
                if lines := await asyncio.to_thread(reader.read):
                    self._add(lines)
                if lines or is_due:
                    self._wake()
                await asyncio.sleep(0 if lines else POLL_SECONDS)
        finally:
            self._wake()

    def _wake(self) -> None:
        for waker in self.wakers:
            waker.set()

    def _take(self, summary: RunSummary | None, is_alive: bool) -> None:
        """Take in the run's state, None if it is gone, and whether its trainer lives."""
        if summary is None:
            self.is_deleted = True
            return
        now = time.monotonic()
        steady = replace(summary, step=0, epoch=0, loss=None)
        if steady != self._summary:
            self._summary, self._changed_at = steady, now
            self.state = f'{{"run":{json.dumps(runs.as_data(summary))}}}'
        has_ended = not summary.active and summary.status != "queued"
        # Not while the trainer hangs, which the page will offer to end.
        self.has_settled = has_ended and not is_alive and now - self._changed_at > SETTLE_SECONDS

    def _add(self, lines: list[str]) -> None:
        first, self._seq = self._seq + 1, self._seq + len(lines)
        self._tail.append(Batch(first, self._seq, lines, events_message(lines)))
        self._tail_size += len(self._tail[-1].message)
        while len(self._tail) > 1 and self._tail_size > TAIL_BYTES:
            self._tail_size -= len(self._tail.popleft().message)


def _look_at(run: RunDir) -> tuple[RunSummary | None, bool]:
    return (run.summary(), run.is_alive()) if run.config.is_file() else (None, False)


@asynccontextmanager
async def watching(watches: dict[Path, Watch], run: RunDir) -> AsyncIterator[tuple[Watch, asyncio.Event]]:
    """The run's watch out of `watches`, begun if there is none, and an event that is set when to look at it again."""
    watch = watches.get(run.path)
    if watch is None or watch.task.done():
        watch = watches[run.path] = Watch(run)
    waker = asyncio.Event()
    watch.wakers.add(waker)
    try:
        yield watch, waker
    finally:
        watch.wakers.discard(waker)
        if not watch.wakers:
            watch.task.cancel()
            if watches.get(run.path) is watch:
                del watches[run.path]
