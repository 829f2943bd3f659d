import json
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.conftest import step
from trainer_core import events
from trainer_core.events import AnyEvent, Event, EventReader, EventWriter, Warning, parse_event


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
    assert parse_event.validate_json(line) == step(1, loss=None, grad_norm=None).model_copy(
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
    path.write_text('{"seq":1}\n{"se')
    assert reader.read() == ['{"seq":1}']
    assert reader.read() == []
    with path.open("a") as file:
        file.write('q":2}\n')
    assert reader.read() == ['{"seq":2}']


def test_no_character_of_a_message_breaks_a_line(tmp_path: Path) -> None:
    text = "línea\u2028\u2029\x85\x0b\x1c\r\n終"
    with EventWriter(tmp_path / "events") as writer:
        writer.write(Warning(message=text))
    (line,) = EventReader(tmp_path / "events").read()
    assert strict(line)["message"] == text


def test_a_long_history_comes_in_pieces_and_a_longer_line_whole(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events") as writer:
        for size in (10, 5000, 10):
            writer.write(Warning(message="x" * size))
    reader = EventReader(tmp_path / "events")
    seen: list[int] = []
    while lines := reader.read(most=200):
        seen += [len(strict(line)["message"]) for line in lines]
    assert seen == [10, 5000, 10]


def test_every_event_class_is_part_of_any_event() -> None:
    classes = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}
    assert classes - {Event} == set(get_args(get_args(AnyEvent)[0]))
