"""What happens in a run, as typed records: one JSON line each in `events.jsonl`, the only record of the run.

Lines are numbered from 1 without gaps, so line N holds `seq` N. There is one writer, the trainer, and it only appends.
"""

import contextlib
import math
import struct
import time
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trainer_core.sources import plain


class Event(BaseModel):
    """`seq` counts from 1; `time` is in seconds since 1970. Both are set as the event is written."""

    # A number that is not finite is written as null: NaN is not JSON and breaks the page's parser.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")

    type: str
    seq: int = 0
    time: float = 0.0

    @field_validator("*", mode="before")
    @classmethod
    def _make_plain(cls, value: Any) -> Any:
        return plain(value) if isinstance(value, str) else value


class Phase(Event):
    """The run went over to something that takes a while."""

    type: Literal["phase"] = "phase"
    name: Literal["importing", "loading_data", "loading_model", "loading_adapter", "compiling", "training", "saving"]
    message: str


class Started(Event):
    """Everything is loaded and the first step is next. Counts are those of the whole run."""

    type: Literal["started"] = "started"
    device: str
    precision: str
    variant: str
    base_dtype: str
    gradient_checkpointing: str | bool
    """`off`, `full`, or how many blocks are computed again of how many; a switch in the files of older runs."""
    estimated_bytes: int | None = None
    """Of memory at the peak; older runs have none."""
    window_attention: str = ""
    compiled: bool = False
    samples: int
    validation_samples: int
    total_epochs: int
    total_steps: int
    first_step: int
    trainable_parameters: int
    adapted_modules: int
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    """What each phase before it took, in order. The first, `starting`, is from the start of the process by Descant to
    the first event."""


class Step(Event):
    """One optimizer update. `loss` is the plain mean over its samples; `grad_norm` is the norm before clipping."""

    type: Literal["step"] = "step"
    step: int
    epoch: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    seconds: float
    memory_bytes: int


class Skipped(Event):
    """An update that was discarded; weights and schedule are as before. `step` is the update it would have been."""

    type: Literal["skipped"] = "skipped"
    step: int
    epoch: int
    reason: str
    nonfinite_tensors: int
    total_tensors: int
    names: list[str]


class Epoch(Event):
    """An epoch is over. `loss` is the mean over the samples of its successful updates."""

    type: Literal["epoch"] = "epoch"
    epoch: int
    loss: float | None
    updates: int
    skipped: int
    seconds: float


class Validation(Event):
    """The mean loss over the held-out samples after `step`, each time with the same noise and timesteps."""

    type: Literal["validation"] = "validation"
    step: int
    epoch: int
    loss: float | None


class Checkpoint(Event):
    """A checkpoint is complete on disk: `tensors` and `bytes` were counted in the written file."""

    type: Literal["checkpoint"] = "checkpoint"
    name: str
    step: int
    epoch: int
    bytes: int
    tensors: int


class Warning(Event):
    """Something the person should know that does not end the run."""

    type: Literal["warning"] = "warning"
    message: str


class Finished(Event):
    """Always the last line."""

    type: Literal["finished"] = "finished"
    reason: Literal["completed", "stopped", "aborted", "failed"]
    message: str
    step: int
    epoch: int


PLACE = struct.Struct("<qd")
"""Of a line in `events.index`: where it begins, and the loss of a step (NaN where it was not finite) or its kind."""
AN_EPOCH, ANOTHER = math.inf, -math.inf
"""The kinds of lines that are no steps."""
MAX_WAITING_BYTES, RETRY_SECONDS = 4 << 20, 1.0
"""Of lines that wait for room: some hours of them."""


class EventWriter:
    """Appends events to a file. Each line reaches the operating system before `write` returns.

    But for a full disk: then lines wait in memory until there is room, and once that is a few megabytes, so does
    `write`. Beside the file it keeps an index, 16 bytes a line, by which a page opens a long run at once. Nothing is
    lost without it: it ends with the first of its writes that fails, and readers look at the lines themselves.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._seq = 0
        self._end = self._file.seek(0, 2)
        self._waiting = b""
        self._index: FileIO | None = None
        if self._end == 0:
            with contextlib.suppress(OSError):
                self._index = FileIO(path.with_suffix(".index"), "w")

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file. Raises OSError where lines that wait can't be written even now."""
        with self._file, self._index or contextlib.nullcontext():
            self._write_waiting()

    def write(self, event: Event) -> None:
        """Number, stamp and append `event`."""
        self._seq += 1
        event.seq, event.time = self._seq, time.time()
        line = event.model_dump_json().encode() + b"\n"
        self._note_place(event)
        self._end += len(line)
        self._waiting += line
        with contextlib.suppress(OSError):
            self._write_waiting()
        while len(self._waiting) > MAX_WAITING_BYTES:
            time.sleep(RETRY_SECONDS)
            with contextlib.suppress(OSError):
                self._write_waiting()

    def _note_place(self, event: Event) -> None:
        if self._index is None:
            return
        kind = ANOTHER
        if isinstance(event, Epoch):
            kind = AN_EPOCH
        elif isinstance(event, Step):
            kind = event.loss if event.loss is not None and math.isfinite(event.loss) else math.nan
        try:
            is_written = self._index.write(PLACE.pack(self._end, kind)) == PLACE.size
        except OSError:
            is_written = False
        if not is_written:
            self._index.close()
            self._index = None

    def _write_waiting(self) -> None:
        while self._waiting:  # a nearly full disk takes a part; the rest of that line follows it
            self._waiting = self._waiting[self._file.write(self._waiting) :]
