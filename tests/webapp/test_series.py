"""The thinned history of a run: nothing that matters is thinned away, and it is what the events say."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Server, append_steps, make_run, read_events, started, step, writing
from trainer_core.events import PLACE, Checkpoint, Epoch, Phase, Skipped, Validation, Warning
from trainer_core.run_dir import RunDir
from webapp.series import COLUMNS, UNINDEXED_BYTES, Series

SKIPPED = Skipped(step=3, epoch=1, reason="r", nonfinite_tensors=1, total_tensors=2, names=["a"])
NAN = float("nan")


def series_of(run: RunDir, points: int = 2000) -> dict[str, Any]:
    """The series as one who has not seen the run gets it."""
    read: dict[str, Any] = json.loads(Series(run.events).snapshot(points)[0], parse_constant=pytest.fail)
    return read


def smooth(losses: list[float | None]) -> list[float | None]:
    """The average after each loss, as a page makes it."""
    average = weight = 0.0
    smoothed = []
    for loss in losses:
        if loss is not None:
            average = 0.95 * average + (1 - 0.95) * loss
            weight = 0.95 * weight + (1 - 0.95)
        smoothed.append(average / weight if weight else None)
    return smoothed


def test_a_short_run_comes_whole(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    losses = [NAN, 0.5, float("inf"), *(random.uniform(0, 1) for _ in range(500))]
    with writing(run) as writer:
        writer.write(Phase(name="training", message="m"))
        writer.write(started(total_steps=len(losses)))
        for number, loss in enumerate(losses, 1):
            writer.write(step(number, loss=loss, seconds=random.random()))
        writer.write(SKIPPED.model_copy())
        writer.write(Validation(step=2, epoch=1, loss=0.25))
        writer.write(Validation(step=3, epoch=1, loss=None))
        writer.write(Checkpoint(name="step-000003", step=3, epoch=1, bytes=1, tensors=1))
        writer.write(Phase(name="saving", message="Saving"))
    answer = shared_server.http.get(f"/api/runs/{run.id}/series", params={"points": 1000})
    assert answer.headers["content-type"] == "application/json"
    series = answer.json()
    steps = read_events(run, "step")
    smoothed = smooth([each["loss"] for each in steps])
    assert series["columns"].pop("smoothed") == [
        None if value is None else pytest.approx(value, rel=1e-12) for value in smoothed
    ]
    assert series["columns"] == {name: [each[name] for each in steps] for name in COLUMNS}
    average, weight = series["average"]
    assert average / weight == pytest.approx(smoothed[-1], rel=1e-12)
    assert series["seq"] == len(read_events(run))
    assert series["skips"] == [1, 3, 3]
    assert series["validations"] == [{"step": 2, "loss": 0.25}]
    assert series["saved_steps"] == [3]
    assert series["feed"] == [event for event in read_events(run) if event["type"] != "step"]
    assert (series["started"], series["phase"]) == (read_events(run, "started")[0], read_events(run, "phase")[-1])
    assert series["finished"] is None
    assert (series["first_time"], series["last_time"]) == (read_events(run)[0]["time"], read_events(run)[-1]["time"])


def test_a_long_run_keeps_its_peaks_its_bad_points_and_its_end(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    losses = [random.uniform(0.4, 0.6) for _ in range(50_000)]
    peaks = {777: 9.0, 20_000: 5.0, 31_234: 0.001}
    bad = sorted(random.sample(range(2, 49_000), 100))
    for number, loss in peaks.items():
        losses[number - 1] = loss
    append_steps(run, 1, losses)
    lines = run.events.read_text().splitlines()
    bad = [number for number in bad if number not in peaks]
    for number in bad:
        lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | {"loss": None})
    run.events.write_text("\n".join([*lines, ""]))

    series = series_of(run, points=500)
    shown = dict(zip(series["columns"]["step"], series["columns"]["loss"], strict=True))
    assert len(shown) == len(series["columns"]["step"]) <= 500
    assert list(shown) == sorted(shown)
    assert {number: shown.get(number) for number in peaks} == peaks
    assert [number for number, loss in shown.items() if loss is None] == series["skips"] == bad
    assert next(iter(shown)) == 1
    assert list(shown)[-50:] == list(range(49_951, 50_001))
    whole = smooth([None if number in bad else losses[number - 1] for number in range(1, 50_001)])
    expected = [whole[number - 1] for number in shown]
    assert series["columns"]["smoothed"] == [
        None if value is None else pytest.approx(value, rel=1e-12) for value in expected
    ]


def test_a_growing_run_is_read_on_as_if_from_the_start(shared_server: Server) -> None:
    """With a half-written line at every look, as a reader comes upon them."""
    run = make_run(shared_server.home)
    growing = Series(run.events)
    assert json.loads(growing.snapshot(100)[0])["columns"]["step"] == []
    for first in (1, 301, 601):
        append_steps(run, first, (random.random() for _ in range(300)))
        with run.events.open("r+b") as file:
            file.seek(-40, 2)
            rest = file.read()
            file.seek(-40, 2)
            file.truncate()
            assert json.loads(growing.snapshot(100)[0])["seq"] == first + 298
            file.write(rest)
        assert json.loads(growing.snapshot(100)[0]) == series_of(run, 100)


def test_damaged_lines_are_told_and_hide_no_other(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    append_steps(run, 1, [0.5, 0.25])
    with run.events.open("ab") as file:
        file.write(b"\0\0\0\n")  # line 3
        file.write(b"\n")
        file.write(step(5).model_copy(update={"seq": 5}).model_dump_json().replace("0.5", "NaN").encode() + b"\n")
        file.write(step(6).model_copy(update={"seq": 99}).model_dump_json().encode() + b"\n")
        # Sound at their heads, which is all that is read of most lines.
        file.write(b'{"type":"warning","seq":7,"message":"\xff"}\n')
        file.write(b'{"type":"started","seq":8,"total_steps":1e999}\n')
        file.write(b'{"type":"skipped","seq":9,"step":9223372036854775808}\n')
        file.write(b'{"type":"warning","seq":10,"message":""}{"type":"warning","seq":11,"message":""}\n\n')
    append_steps(run, 12, [0.125])
    series = series_of(run)
    assert series["columns"]["step"] == [1, 2, 12]
    assert [event["seq"] for event in series["feed"]] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert series["feed"][0]["message"] == "Line 3 of events.jsonl is damaged."
    assert series["seq"] == 12


def test_nothing_of_a_huge_run_is_unbounded(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    kinds = (
        SKIPPED,
        Validation(step=1, epoch=1, loss=0.5),
        Checkpoint(name="step-000001", step=1, epoch=1, bytes=1, tensors=1),
        Warning(message="w" * 10_000),
    )
    with run.events.open("w") as file:
        for seq in range(1, 4001):
            event = kinds[seq % len(kinds)].model_copy(update={"seq": seq})
            file.write(f"{event.model_dump_json()}\n")
    append_steps(run, 4001, [0.5] * 1000)
    series = series_of(run, points=100)
    assert (len(series["skips"]), len(series["saved_steps"]), len(series["feed"])) == (100, 100, 200)
    assert 50 < len(series["validations"]) <= 100
    assert 50 < len(series["columns"]["loss"]) <= 100


@pytest.mark.parametrize("points", ["x", "99", "10001", "-5", "1e3", "²"])
def test_a_number_of_points_out_of_bounds_is_refused_by_name(points: str, shared_server: Server) -> None:
    run = make_run(shared_server.home)
    answer = shared_server.http.get(f"/api/runs/{run.id}/series", params={"points": points})
    assert answer.status_code == 400
    assert answer.json() == {"error": f"points={points!r} was given; it takes a whole number from 100 to 10000."}


def test_a_run_that_was_copied_back_under_its_name_is_read_anew(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    append_steps(run, 1, [0.5] * 10)
    address = f"/api/runs/{run.id}/series"
    assert shared_server.http.get(address).json()["seq"] == 10
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.unlink()
    run.events.write_bytes(b"".join(lines[:3]))
    assert shared_server.http.get(address).json()["columns"]["step"] == [1, 2, 3]
    run.delete()
    assert shared_server.http.get(address).status_code == 404


def test_an_index_gives_what_the_lines_give_and_a_wrong_one_is_not_believed(tmp_path: Path) -> None:
    run, other = make_run(tmp_path), make_run(tmp_path)
    with writing(other) as writer:
        writer.write(started())
        for number in range(1, 1000):
            writer.write(step(number))
    with writing(run) as writer:
        writer.write(started())
        for number in range(1, 12_001):
            writer.write(step(number, loss=math.inf if number % 3000 == 7 else 1 + math.sin(number)))
            if number % 40 == 0:
                writer.write(Epoch(epoch=number // 40, loss=0.5, updates=40, skipped=0, seconds=1))
            if number % 2000 == 0:
                writer.write(Validation(step=number, epoch=number // 40, loss=number / 1e6))
                writer.write(Checkpoint(name="c", step=number, epoch=1, bytes=1, tensors=1))
                writer.write(SKIPPED.model_copy(update={"step": number + 1}))
    index = run.events.with_suffix(".index")
    indexed = Series(run.events)
    seen = indexed.snapshot(500)
    assert run.events.stat().st_size > 2 * UNINDEXED_BYTES
    whole = index.read_bytes()
    assert len(whole) == PLACE.size * seen[1]
    kinds = [PLACE.pack(offset, 7.0) for offset, _ in PLACE.iter_unpack(whole)]
    taken = Series(run.events)
    taken._take_index()
    assert run.events.stat().st_size - 2 * UNINDEXED_BYTES < taken.offset < run.events.stat().st_size

    for damaged in (
        whole[: 16 * 5000 + 3],
        whole[16:],
        whole[: 16 * 3000] + whole[16 * 3001 :],
        bytes(len(whole)),
        b"\xff" * len(whole),
        b"".join(kinds),
        b"",
        other.events.with_suffix(".index").read_bytes(),
    ):
        index.write_bytes(damaged)
        assert Series(run.events).snapshot(500) == seen
    index.unlink()
    assert Series(run.events).snapshot(500) == seen
