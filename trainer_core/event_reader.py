"""Reading `events.jsonl`, while it is being written and whatever was done to it.

The number of a line is its place, so a reader's cursor needs no parsing. A line that is still being written has no
newline yet and is left for the next look; one that is damaged comes as a warning in its place.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trainer_core.events import Warning

READ_BYTES = 1 << 18
"""What a reader takes at once: a message of it is smaller than the MiB that many websocket clients allow."""


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
