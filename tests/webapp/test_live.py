"""The live stream and the processes behind it: real sockets, real kills."""

import asyncio
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.conftest import Server, append_steps, kill_trainer, make_run, read_events, started, step, wait_for, writing
from trainer_core.events import Finished, Warning
from trainer_core.run_dir import RunDir
from webapp import live
from webapp.cli import server_config
from webapp.settings import Settings, listen

LONG = {"epochs": 100_000}


class Client:
    """A page's socket: what it received so far."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.heartbeats = 0
        self.close_code: int | None = None

    def receive(self, seconds: float) -> None:
        """Take in messages for so long, or until the server closes."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                message = json.loads(self.socket.recv(timeout=left), parse_constant=pytest.fail)
                self.events += message.get("events", [])
                self.runs += [message["run"]] if "run" in message else []
                self.snapshots += [message["snapshot"]] if "snapshot" in message else []
                self.heartbeats += message == {}
        except TimeoutError:
            pass
        except ConnectionClosed as closed:
            self.close_code = closed.rcvd.code if closed.rcvd else 1006

    def until(self, condition: Any, what: str, seconds: float = 30) -> None:
        """Receive until `condition()`."""

        def check() -> Any:
            self.receive(0.1)
            return condition()

        wait_for(check, what, seconds)

    def follow(self, after: int, last: int) -> None:
        """Receive the events behind `after` up to `last`, each the one after the one before, and keep none."""
        while after < last:
            for seq in re.findall(r'"seq":(\d+)', str(self.socket.recv(timeout=30))):
                assert int(seq) == after + 1
                after += 1

    @property
    def seqs(self) -> list[int]:
        return [event["seq"] for event in self.events]


@contextmanager
def page(server: Server | str, run: RunDir, after: int | str = 0) -> Iterator[Client]:
    """A socket as a page of the server opens it."""
    address = server if isinstance(server, str) else server.address
    live_address = f"{address.replace('http', 'ws')}/runs/{run.id}/live?after={after}"
    with connect(live_address, origin=Origin(address), close_timeout=1) as socket:
        yield Client(socket)


@contextmanager
def serving_here(home: Path) -> Iterator[tuple[str, Callable[[], tuple[int, int]]]]:
    """A server in this process: its address, and how many tasks and watches it has."""
    listening = listen("127.0.0.1", 0)
    settings = Settings(home, "127.0.0.1", listening.getsockname()[1])
    config = server_config(settings)
    app: Any = config.app
    server, loop = uvicorn.Server(config), asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listening])))
    thread.start()

    async def count() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(app.state.watches)

    try:
        wait_for(lambda: server.started, "the server")
        yield settings.address, lambda: asyncio.run_coroutine_threadsafe(count(), loop).result(10)
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
        loop.close()


def test_every_client_gets_the_whole_history_then_what_is_new(shared_server: Server) -> None:
    """G1: a reload, a second tab and a reconnect see the same events, no gap, no repeat."""
    run = make_run(shared_server.home)
    with page(shared_server, run) as first:
        with writing(run) as writer:
            writer.write(started())
            writer.write(step(1))
            first.until(lambda: len(first.events) == 2, "two events")
            with page(shared_server, run) as second, page(shared_server, run, after=1) as reconnected:
                for number in range(2, 200):
                    writer.write(step(number))
                for client in (first, second, reconnected):
                    client.until(lambda client=client: client.seqs and client.seqs[-1] == 200, "all events")
                assert first.seqs == second.seqs == list(range(1, 201))
                assert reconnected.seqs == list(range(2, 201))
                assert first.events == second.events == read_events(run)
                first.until(lambda: first.runs[-1]["status"] == "running", "the status")
            writer.write(Finished(reason="completed", message="m", step=199, epoch=1))
        first.until(lambda: first.close_code, "the end of the stream")
    assert first.close_code == 1000
    assert first.runs[-1]["status"] == "completed"
    assert first.events[-1]["type"] == "finished"


def test_a_half_written_line_is_not_sent(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer, page(shared_server, run) as client:
        writer.write(step(1))
        line = step(2).model_copy(update={"seq": 2}).model_dump_json().encode() + b"\n"
        with run.events.open("ab", buffering=0) as file:
            file.write(line[:30])
            client.receive(0.7)
            assert client.seqs == [1]
            file.write(line[30:])
        client.until(lambda: client.seqs == [1, 2], "the whole line")


def test_no_number_or_text_breaks_a_message(shared_server: Server) -> None:
    """I1: the client's parser refuses NaN and Infinity."""
    run = make_run(shared_server.home)
    with writing(run) as writer, page(shared_server, run) as client:
        for loss in (float("nan"), float("inf"), float("-inf"), 0.5):
            writer.write(step(1, loss=loss))
        writer.write(Warning(message='"quoted"\u2028\n</script>音'))
        client.until(lambda: len(client.events) == 5, "all events")
    assert [event["loss"] for event in client.events[:4]] == [None, None, None, 0.5]
    assert client.events[4]["message"] == '"quoted"\u2028\n</script>音'


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 30, "²"])
def test_a_cursor_that_is_no_number_is_refused(after: str, shared_server: Server) -> None:
    run = make_run(shared_server.home)
    with page(shared_server, run, after) as client:
        client.receive(2)
        assert (client.events, client.close_code) == ([], 4400)
    assert shared_server.http.get(f"/api/runs/{run.id}/events", params={"after": after}).status_code == 400


def test_a_run_that_is_not_there_or_is_deleted_closes_with_its_own_code(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    with page(shared_server, run) as client:
        client.until(lambda: client.runs, "the run")
        run.delete()
        client.until(lambda: client.close_code, "the close")
        assert client.close_code == 4404
    with page(shared_server, run) as client:
        client.receive(2)
        assert client.close_code == 4404


def test_a_run_is_deleted_for_good_with_its_pages_open(shared_server: Server) -> None:
    def folders() -> set[str]:
        found = {path.name for path in (shared_server.home / "runs").iterdir()}
        return {name for name in found if not name.startswith(".start")}

    before = folders()
    for _ in range(10):
        run = make_run(shared_server.home)
        with writing(run) as writer:
            writer.write(Finished(reason="completed", message="m", step=0, epoch=0))
        with page(shared_server, run) as first, page(shared_server, run):
            first.until(lambda first=first: first.runs, "the run")
            assert shared_server.http.post(f"/runs/{run.id}/delete").status_code == 303
        assert not run.path.exists()
    assert folders() <= before


def test_a_damaged_line_does_not_end_the_stream(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer, page(shared_server, run) as client:
        writer.write(step(1))
        with run.events.open("ab") as file:
            file.write(b"\0\0\0\n")
        writer.write(step(2))  # numbered 2, on line 3
        client.until(lambda: len(client.events) == 3, "three lines")
    assert client.seqs == [1, 2, 3]
    assert client.events[1]["message"] == "Line 2 of events.jsonl is damaged."


def test_a_client_comes_back_to_a_restarted_server_without_gap_or_repeat(server: Server) -> None:
    """To what the server has in memory, and to what is so old that it is read from the file."""
    run = make_run(server.home)
    with run.lock():
        append_steps(run, 1, [0.5] * 30_000)
        with page(server, run) as before:
            before.until(lambda: len(before.events) > 1000, "some events")
            server.kill()
            before.until(lambda: before.close_code, "the cut")
        append_steps(run, 30_001, [0.25] * 20_000)
        server.start()
        with page(server, run, before.seqs[-1]) as old, page(server, run, 49_999) as recent:
            append_steps(run, 50_001, [0.125] * 10)
            old.until(lambda: old.seqs and old.seqs[-1] == 50_010, "the rest")
            recent.until(lambda: recent.seqs and recent.seqs[-1] == 50_010, "the newest")
    assert before.seqs + old.seqs == list(range(1, 50_011))
    assert recent.seqs == list(range(50_000, 50_011))


def test_a_slow_reader_is_given_a_snapshot_and_costs_nobody_anything(server: Server) -> None:
    """50 MB go by one that doesn't read: the other gets all of it, and the server keeps none of it."""
    run = make_run(server.home)
    append_steps(run, 1, [0.5] * 10)
    measured = psutil.Process(server.process.pid)
    with run.lock(), page(server, run) as slow, page(server, run) as healthy:
        slow.until(lambda: len(slow.events) == 10, "the first events")
        healthy.follow(0, 10)
        before, most = measured.memory_full_info().uss, 0
        for seq in range(10, 320_000, 10_000):
            append_steps(run, seq + 1, [0.25] * 10_000)
            healthy.follow(seq, seq + 10_000)
            most = max(most, measured.memory_full_info().uss)
        assert run.events.stat().st_size > 50e6
        assert most - before < 20e6
        slow.until(lambda: slow.snapshots, "the snapshot")
        append_steps(run, 320_011, [0.125] * 5)
        slow.until(lambda: slow.seqs[-1] == 320_015, "what came after it")
    snapshot = slow.snapshots[0]
    received = slow.seqs.index(snapshot["seq"] + 1)
    assert slow.seqs[:received] == list(range(1, received + 1))
    assert received < 200_000
    assert slow.seqs[received:] == list(range(snapshot["seq"] + 1, 320_016))
    assert len(snapshot["columns"]["step"]) <= 2000


def test_clients_that_vanish_or_stop_reading_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G6."""
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 1.0)
    monkeypatch.setattr(live, "GONE_SECONDS", 2.0)
    run = make_run(tmp_path / "home")
    append_steps(run, 1, [0.5] * 100_000)
    with serving_here(tmp_path / "home") as (address, tasks_and_watches), run.lock():
        tasks, watches = tasks_and_watches()
        assert watches == 0
        with page(address, run, 100_000) as healthy, page(address, run):  # which reads nothing of 18 MB
            for _ in range(50):
                with page(address, run, 99_000) as vanishing:
                    vanishing.socket.socket.close()
            append_steps(run, 100_001, [0.25] * 1000)
            healthy.until(lambda: healthy.seqs and healthy.seqs[-1] == 101_000, "all events")
            healthy.until(lambda: healthy.heartbeats, "a sign of life when nothing happens")
            # The server's accept of one, and its watch with one client that waits for events and for its end.
            wait_for(lambda: tasks_and_watches() == (tasks + 3, 1), "the others to be forgotten")
        wait_for(lambda: tasks_and_watches() == (tasks, 0), "everything to be as before")
        with page(address, run):  # stuck when its run is deleted
            wait_for(lambda: tasks_and_watches()[1] == 1, "its watch")
            shutil.rmtree(run.path)
            wait_for(lambda: tasks_and_watches() == (tasks, 0), "it to be given up")
    assert healthy.seqs == list(range(100_001, 101_001))


def test_a_killed_trainer_is_reported_with_its_exit_status_and_log(server: Server) -> None:
    """G3."""
    run = server.begin(training=LONG)
    with page(server, run) as client:
        client.until(lambda: any(event["type"] == "step" for event in client.events), "a step", 60)
        kill_trainer(run)
        client.until(lambda: client.runs[-1]["exit_status"] is not None, "the crash", 3)
    last = client.runs[-1]
    assert (last["status"], last["exit_status"]) == ("crashed", -9)
    assert any("loading_model" in line for line in last["log_tail"])
    assert server.http.post(f"/runs/{run.id}/stop").status_code == 303
    assert not run.stop.exists()
    wait_for(server.begin().is_alive, "a new start, allowed at once")


def test_training_goes_on_without_the_server_and_a_new_one_shows_it(server: Server) -> None:
    """G1, G4."""
    run = server.begin(training=LONG)
    wait_for(lambda: read_events(run, "step"), "a step", 60)
    server.kill()
    before = len(read_events(run))
    wait_for(lambda: len(read_events(run)) > before + 10, "training without a server", 90)
    server.start()
    assert server.http.get(f"/api/runs/{run.id}").json()["status"] == "running"
    assert server.http.post("/api/runs", json={}).status_code == 409
    with page(server, run) as client:
        client.until(lambda: len(client.events) > before + 20, "the history and new events", 90)
        assert client.seqs == list(range(1, len(client.seqs) + 1))
        server.http.post(f"/runs/{run.id}/stop")
        client.until(lambda: client.close_code == 1000, "the end", 20)
    assert client.runs[-1]["status"] == "stopped"
    assert client.events[-2]["type"] == "checkpoint"
    assert client.events[-1]["type"] == "finished"


def test_killing_both_ends_in_the_truth(server: Server) -> None:
    """G3: nothing stays running for ever, and nothing is blocked."""
    run = server.begin(training=LONG)
    wait_for(lambda: read_events(run, "step"), "a step", 60)
    server.kill()
    kill_trainer(run)
    server.start()
    shown = server.http.get(f"/api/runs/{run.id}").json()
    assert (shown["status"], shown["exit_status"]) == ("crashed", None)
    assert server.http.post(f"/api/runs/{run.id}/stop").json()["status"] == "crashed"
    with page(server, run) as client:
        client.until(lambda: client.close_code == 1000, "the end")
        assert client.events == read_events(run)


def test_ctrl_c_ends_the_server_at_once_with_pages_open(server: Server, tmp_path: Path) -> None:
    """G6."""
    run = make_run(server.home)
    append_steps(run, 1, [0.5] * 100_000)
    with page(server, run), page(server, run, 100_000) as healthy:  # the first reads nothing of 18 MB
        healthy.until(lambda: healthy.runs, "the run")
        server.process.send_signal(signal.SIGINT)
        server.end(seconds=5)
    server.start()
    assert server.http.get("/").status_code == 200
