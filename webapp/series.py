"""A run's history as columns thinned for a chart: what a page loads before it follows the live stream.

A million steps are 200 MB of events. Of each step only the loss and the place in the file are kept in memory, 16 bytes,
so that the next look reads only what is new; a first look takes both from the index that the trainer keeps beside the
events. The other columns are read for the chosen steps alone.
"""

import math
import threading
from array import array
from collections import deque
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trainer_core.event_reader import DAMAGED, EventReader, LineHead, damaged_line, parse_line, read_heads
from trainer_core.events import AN_EPOCH, ANOTHER
from webapp import runs
from webapp.thinning import averages, choose, spread

LEAST_POINTS, DEFAULT_POINTS, MOST_POINTS = 100, 2000, 10_000
COLUMNS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "seconds", "time", "memory_bytes")
FEED_LENGTH = 200
REMEMBERED_RUNS = 4
UNINDEXED_BYTES = 1 << 20
"""At the end of the events, which a power cut may have spoilt: they are read line by line whatever the index says."""
TRIED_PLACES = 50
"""Lines by which an index is proved to be that of these events."""


def series(request: Request) -> Response:
    """At most `points` steps as columns, and what else a page shows; the live stream goes on after its `seq`."""
    run = runs.requested(request)
    points = points_parameter(request.query_params.get("points"))
    try:
        return Response(snapshot(run.events, points)[0], media_type="application/json")
    except OSError as error:
        raise HTTPException(404, f"The run's events can't be read: {error.strerror}.") from error


def points_parameter(value: str | None) -> int:
    """The `points` of an address. Raises a 400."""
    if value is None:
        return DEFAULT_POINTS
    if not (value.isascii() and value.isdigit() and len(value) < 9 and LEAST_POINTS <= int(value) <= MOST_POINTS):
        raise HTTPException(
            400, f"points={value!r} was given; it takes a whole number from {LEAST_POINTS} to {MOST_POINTS}."
        )
    return int(value)


def snapshot(events: Path, points: int = DEFAULT_POINTS) -> tuple[bytes, int]:
    """The series of an event file as JSON, and the `seq` it reaches to.

    The runs that were looked at last are remembered: 16 MB for each million steps of them.
    """
    try:
        file, size = events.stat().st_ino, events.stat().st_size
    except OSError:
        file = size = 0
    # Another file under this name, as of a run that was copied back, may have the number of the one before.
    if size < _series_of(events, file).offset:
        _series_of.cache_clear()
    return _series_of(events, file).snapshot(points)


class Series:
    """What is known of an event file, read on at each `snapshot`."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._reader = EventReader(events)
        self._lock = threading.Lock()
        self._losses, self._offsets = array("d"), array("q")
        """Of each step; the loss is NaN where it was not finite."""
        self._skips, self._saved_steps = array("q"), array("q")
        self._validated_steps, self._validation_losses = array("q"), array("d")
        self._feed: deque[tuple[LineHead, int]] = deque(maxlen=FEED_LENGTH)
        self._newest: dict[str, int] = {}
        """Offsets of the newest event of each kind but steps."""
        self._first_time: float | None = None
        self._last_time: float | None = None

    @property
    def offset(self) -> int:
        """How much of the file has been read, in bytes."""
        return self._reader.offset

    def snapshot(self, points: int) -> tuple[bytes, int]:
        """The series as JSON, and the `seq` it reaches to. Raises OSError when the file has just been deleted."""
        with self._lock:
            if not self._reader.offset:
                self._take_index()
            start = self._reader.offset
            while data := self._reader.read_bytes():
                self._take(data, start)
                start = self._reader.offset
            with self._events.open("rb") if start else BytesIO() as file:
                return msgspec.json.encode(self._as_data(file, points)), self._reader.seq

    def _take_index(self) -> None:
        """Take what the index has of the events, but for their end; nothing if it does not fit them."""
        import numpy as np

        try:
            index = np.fromfile(self._events.with_suffix(".index"), [("offset", "<i8"), ("kind", "<f8")])
            size = self._events.stat().st_size
        except OSError:
            return
        offsets, kinds = index["offset"], index["kind"]
        count = int(np.searchsorted(offsets, size - UNINDEXED_BYTES)) - 1
        if count < 1 or offsets[0] != 0 or (np.diff(offsets) <= 0).any():
            return
        with self._events.open("rb") as file:

            def head_at(place: int) -> LineHead:
                file.seek(offsets[place])
                return read_heads(file.readline(), place, 1)[0]

            tried = spread(np.arange(count + 1), TRIED_PLACES).tolist()
            heads = [head_at(place) for place in tried]
            is_sound = not any(head.type == DAMAGED for head in heads)
            if not (is_sound and np.array_equal([_kind_of(head) for head in heads], kinds[tried], equal_nan=True)):
                return
            is_step = np.isfinite(kinds[:count]) | np.isnan(kinds[:count])
            epochs = np.flatnonzero(kinds[:count] == AN_EPOCH)[-FEED_LENGTH:]
            others = np.flatnonzero(np.isnan(kinds[:count]) | (kinds[:count] == ANOTHER))
            noted = [
                (head_at(place), int(offsets[place])) for place in np.sort(np.concatenate((epochs, others))).tolist()
            ]
            self._first_time = head_at(0).time
        self._losses.frombytes(kinds[:count][is_step].tobytes())
        self._offsets.frombytes(offsets[:count][is_step].tobytes())
        for head, offset in noted:
            self._note(head, offset)
        self._reader.seq, self._reader.offset = count, int(offsets[count])

    def _take(self, lines: bytes, start: int) -> None:
        """Read complete lines of which the first begins at `start`."""
        import numpy as np

        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n"))
        offsets = np.concatenate(([0], ends[:-1] + 1)) + start
        heads = read_heads(lines, self._reader.seq, len(ends))
        self._reader.seq += len(ends)
        is_step = np.array([head.type == "step" for head in heads], bool)
        losses = np.array([head.loss for head in heads], float)  # NaN for None
        self._losses.frombytes(losses[is_step].tobytes())
        self._offsets.frombytes(offsets[is_step].tobytes())
        for place in np.flatnonzero(~is_step | np.isnan(losses)).tolist():
            self._note(heads[place], int(offsets[place]))
        times = [head.time for head in (heads[0], heads[-1]) if head.type != DAMAGED]
        self._first_time = self._first_time or next(iter(times), None)
        self._last_time = next(reversed(times), self._last_time)

    def _note(self, head: LineHead, offset: int) -> None:
        """Keep what a page needs of a line that is more than a point of the curve."""
        if head.type in ("step", "skipped"):
            self._skips.append(head.step)
        elif head.type == "validation" and head.loss is not None:
            self._validated_steps.append(head.step)
            self._validation_losses.append(head.loss)
        elif head.type == "checkpoint":
            self._saved_steps.append(head.step)
        if head.type != "step":
            self._newest[head.type] = offset
            self._feed.append((head, offset))

    def _as_data(self, file: BinaryIO, points: int) -> dict[str, Any]:
        import numpy as np

        losses = np.frombuffer(self._losses)
        chosen = choose(losses, points)
        steps = [_event_at(file, self._offsets[place]) for place in chosen]
        sums = averages(losses, chosen)
        newest = self._newest.get
        is_over = newest("phase", 0) < max(newest("finished", 0), self._offsets[-1] if self._offsets else 0)
        return {
            "seq": self._reader.seq,
            "columns": {
                **{name: [step.get(name) for step in steps] for name in COLUMNS},
                "smoothed": [average / weight if weight else None for average, weight in sums],
            },
            "average": sums[-1] if sums else (0, 0),
            "skips": spread(np.frombuffer(self._skips, np.int64), points).tolist(),
            "validations": [
                {"step": self._validated_steps[place], "loss": self._validation_losses[place]}
                for place in choose(np.frombuffer(self._validation_losses), points)
            ],
            "saved_steps": spread(np.frombuffer(self._saved_steps, np.int64), points).tolist(),
            "started": _event_at(file, newest("started")) or None,
            "phase": None if is_over else _event_at(file, newest("phase")) or None,
            "finished": _event_at(file, newest("finished")) or None,
            "first_time": self._first_time,
            "last_time": self._last_time,
            "feed": [
                (head.type != DAMAGED and _event_at(file, offset)) or damaged_line(head.seq).model_dump()
                for head, offset in self._feed
            ],
        }


def _kind_of(head: LineHead) -> float:
    """What an index has of a line."""
    if head.type == "step":
        return math.nan if head.loss is None else head.loss
    return AN_EPOCH if head.type == "epoch" else ANOTHER


def _event_at(file: BinaryIO, offset: int | None) -> dict[str, Any]:
    """The event whose line begins at `offset`; empty for none."""
    if offset is None:
        return {}
    file.seek(offset)
    # Empty too where the head was sound, which is all that has been read of it, and the rest is damaged.
    return parse_line(file.readline()) or {}


@lru_cache(maxsize=REMEMBERED_RUNS)
def _series_of(events: Path, file: int) -> Series:
    return Series(events)
