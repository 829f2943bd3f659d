import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import step
from trainer_core.event_reader import EventReader
from trainer_core.events import EventWriter, Step, Warning


def strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_become_null(value: float, tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        writer.write(step(1, loss=value, grad_norm=value))
    (line,) = EventReader(tmp_path / "events").read()
    assert strict(line)["loss"] is None
    assert Step.model_validate_json(line) == step(1, loss=None, grad_norm=None).model_copy(
        update={"seq": 1, "time": strict(line)["time"]}
    )


def test_events_are_numbered_without_gaps_and_readable_at_once(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "events")
    with EventWriter(tmp_path / "events") as writer:
        for number in range(1, 4):
            writer.write(step(1))
            assert [json.loads(line)["seq"] for line in reader.read()] == [number]
    assert reader.read() == []
    assert [json.loads(line)["seq"] for line in EventReader(tmp_path / "events", after=2).read()] == [3]
    assert EventReader(tmp_path / "events", after=99).read() == []


def test_a_half_written_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader = EventReader(path)
    assert reader.read() == []
    lines = [Warning(seq=seq, message="m").model_dump_json() for seq in (1, 2)]
    path.write_text(f"{lines[0]}\n{lines[1][:9]}")
    assert reader.read() == lines[:1]
    assert reader.read() == []
    with path.open("a") as file:
        file.write(f"{lines[1][9:]}\n")
    assert reader.read() == lines[1:]


def test_no_character_of_a_message_breaks_a_line(tmp_path: Path) -> None:
    text = "línea\u2028\u2029\x85\x0b\x1c\r\n終"
    with EventWriter(tmp_path / "events") as writer:
        writer.write(Warning(message=text))
    (line,) = EventReader(tmp_path / "events").read()
    assert strict(line)["message"] == text


def test_an_odd_or_endless_message_is_still_written(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        writer.write(Warning(message="\udcff.pt is bad"))
        writer.write(Warning(message="x" * 1_000_000))
    first, second = EventReader(tmp_path / "events").read()
    assert strict(first)["message"] == "?.pt is bad"
    assert len(strict(second)["message"]) < 5000


def test_a_long_history_comes_in_pieces_and_a_longer_line_whole(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        for size in (10, 3000, 10):
            writer.write(Warning(message="x" * size))
    reader = EventReader(tmp_path / "events")
    seen: list[int] = []
    while lines := reader.read(most=200):
        seen += [len(strict(line)["message"]) for line in lines]
    assert seen == [10, 3000, 10]


def test_a_cursor_far_into_a_long_history_gives_the_rest(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        for _ in range(1000):
            writer.write(Warning(message="x" * 50))
    reader = EventReader(tmp_path / "events", after=990)
    assert next(strict(line)["seq"] for line in reader.read(most=500)) == 991
    assert EventReader(tmp_path / "events", after=1000).read(most=500) == []


@pytest.mark.parametrize(
    "damage", ["\0\0\0", "not json", "[]", "{}", '{"type": "step", "seq": 7}', '{"type":"step","seq":2,"loss":NaN}', ""]
)
def test_a_damaged_line_comes_as_a_warning_in_its_place(damage: str, tmp_path: Path) -> None:
    first, third = (Warning(seq=seq, message="m").model_dump_json() for seq in (1, 3))
    (tmp_path / "events").write_text(f"{first}\n{damage}\n{third}\n")
    lines = EventReader(tmp_path / "events").read()
    assert [strict(line)["seq"] for line in lines] == [1, 2, 3]
    assert (lines[0], lines[2]) == (first, third)
    assert strict(lines[1])["message"] == "Line 2 of events.jsonl is damaged."


FULL_DISK = """
import resource, sys, threading
from pathlib import Path
from trainer_core import events
from trainer_core.events import EventWriter, Warning

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

limit(300)
writer = EventWriter(Path(sys.argv[1]))
for number in range(10):
    writer.write(Warning(message=f"{number} " + "x" * 50))
match sys.argv[2]:
    case "freed":
        limit(resource.RLIM_INFINITY)
    case "freed later":  # meanwhile more waits than may
        events.MAX_WAITING_BYTES = 100
        threading.Timer(1, limit, [resource.RLIM_INFINITY]).start()
    case "a little freed":
        limit(500)
try:
    with writer:
        writer.write(Warning(message="last"))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    ("then", "printed", "lines"),
    [
        ("freed", "", 11),
        ("freed later", "", 11),
        ("a little freed", "File too large\n", 4),
        ("full", "File too large\n", 2),
    ],
)
def test_events_wait_for_room_on_a_full_disk(then: str, printed: str, lines: int, tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk: it too takes a part of a write, then refuses."""
    path = tmp_path / "events"
    command = [sys.executable, "-c", FULL_DISK, str(path), then]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == printed
    whole = path.read_text().split("\n")[:-1]
    assert [strict(line)["seq"] for line in whole] == list(range(1, lines + 1))
