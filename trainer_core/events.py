"""What happens in a run, as typed records: one JSON line each in `events.jsonl`, the only record of the run.

Lines are numbered from 1 without gaps, so line N holds `seq` N and a reader's cursor needs no parsing.
There is one writer, the trainer, and it only appends. A reader may come upon a line that is still being
written; such a line has no newline yet and is left for the next look.
"""

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, field_validator

from trainer_core.sources import plain

READ_BYTES = 1 << 18
"""What a reader takes at once: a message of it is smaller than the MiB that many websocket clients allow."""


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
    name: Literal["importing", "loading_data", "loading_model", "loading_adapter", "training", "saving"]
    message: str


class Started(Event):
    """Everything is loaded and the first step is next. Counts are those of the whole run."""

    type: Literal["started"] = "started"
    device: str
    precision: str
    variant: str
    base_dtype: str
    gradient_checkpointing: bool
    samples: int
    validation_samples: int
    total_epochs: int
    total_steps: int
    first_step: int
    trainable_parameters: int
    adapted_modules: int


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


MAX_WAITING_BYTES, RETRY_SECONDS = 4 << 20, 1.0
"""Of lines that wait for room: some hours of them."""


class EventWriter:
    """Appends events to a file. Each line reaches the operating system before `write` returns.

    But for a full disk: then lines wait in memory until there is room, and once that is a few megabytes, so does
    `write`.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._seq = 0
        self._waiting = b""

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file. Raises OSError where lines that wait can't be written even now."""
        with self._file:
            self._write_waiting()

    def write(self, event: Event) -> None:
        """Number, stamp and append `event`."""
        self._seq += 1
        event.seq, event.time = self._seq, time.time()
        self._waiting += event.model_dump_json().encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write_waiting()
        while len(self._waiting) > MAX_WAITING_BYTES:
            time.sleep(RETRY_SECONDS)
            with contextlib.suppress(OSError):
                self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:  # a nearly full disk takes a part; the rest of that line follows it
            self._waiting = self._waiting[self._file.write(self._waiting) :]


class LineHead(msgspec.Struct, gc=False):
    """What a reader needs of every line, read ten times as fast as the whole record."""

    type: str
    seq: int
    time: float = 0.0
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    loss: float | None = None


DAMAGED = "damaged"
"""The type of a line that is not strictly JSON (NaN is not), no event, or has another number than its place."""
_decoder = msgspec.json.Decoder(LineHead)


def read_heads(lines: bytes, after: int, count: int) -> list[LineHead]:
    """The heads of `count` complete lines, of which the first should have the `seq` `after` + 1."""
    numbers = range(after + 1, after + 1 + count)
    try:
        heads = _decoder.decode_lines(lines)
        # The decoder minds no line ends: as many lines with a beginning as there are events, so that each has one.
        begun = lines.startswith(b"{") + lines.count(b"\n{")
        if begun == count and [head.seq for head in heads] == list(numbers):
            return heads
    except (msgspec.MsgspecError, RecursionError):
        pass
    return [_read_head(line, seq) for line, seq in zip(lines.split(b"\n"), numbers, strict=False)]


def _read_head(line: bytes, seq: int) -> LineHead:
    try:
        head = _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return LineHead(DAMAGED, seq)
    return head if head.seq == seq else LineHead(DAMAGED, seq)


def damaged_line(seq: int) -> Warning:
    """What is shown in place of a damaged line."""
    return Warning(seq=seq, message=f"Line {seq} of events.jsonl is damaged.")


class EventReader:
    """Follows an event file: each `read` gives the complete lines written since the one before."""

    def __init__(self, path: Path, after: int = 0) -> None:
        """Start behind the event with `seq` `after`."""
        self._path = path
        self._after = after
        self.seq = 0
        """How many lines are behind."""
        self.offset = 0
        """Where the next one begins."""

    def read(self, most: int = READ_BYTES) -> list[str]:
        """Complete lines, without their newlines; about `most` bytes of them, none when there is nothing new.

        A line that is damaged, as a power cut can leave it, comes as a warning with its number.
        """
        found: list[str] = []
        while not found and (data := self.read_bytes(most)):
            before, count = self.seq, data.count(b"\n")
            self.seq += count
            if self.seq <= self._after:
                continue
            # Not splitlines(): it also breaks at characters such as U+2028 that JSON leaves as they are.
            lines = data.decode(errors="replace").split("\n")
            for head, line in zip(read_heads(data, before, count), lines, strict=False):
                if head.seq > self._after:
                    found.append(line if head.type != DAMAGED else damaged_line(head.seq).model_dump_json())
        return found

    def skip(self, keep: int) -> None:
        """Go on until about the last `keep` bytes of the file are left to read."""
        with contextlib.suppress(OSError):
            end = self._path.stat().st_size - keep
            while self.offset < end and (data := self.read_bytes(min(READ_BYTES, end - self.offset))):
                self.seq += data.count(b"\n")

    def read_bytes(self, most: int = READ_BYTES) -> bytes:
        """The next complete lines as they are on disk; `seq` is left to the caller, who has to count them anyhow."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(most)
                if b"\n" not in data and len(data) == most:
                    data += file.readline()
        except OSError:
            return b""
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The event in a line as plain data; None for what is no event or not strictly JSON, or a number too large."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("type"), str) else None
