"""I4: a log of any size costs a page nothing, and can be had whole."""

import psutil

from tests.conftest import Server, make_run, step, writing
from trainer_core.run_dir import RunDir

LONGEST_LINE = b"\xff" * 5_000_000 + b"\n"
"""No text in any encoding: each byte is shown as another character of three."""


def crash(run: RunDir) -> None:
    """Leave the run as a trainer that was killed does."""
    with writing(run) as writer:
        writer.write(step(1))


def test_the_whole_log_downloads_and_the_page_gets_its_end(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    crash(run)
    older = b"".join(b"line %d\n" % number for number in range(200_000))
    run.log.with_name("trainer.log.1").write_bytes(older)
    run.log.write_bytes(LONGEST_LINE * 2 + b"the end")
    summary = shared_server.http.get(f"/api/runs/{run.id}")
    page = shared_server.http.get(f"/runs/{run.id}")
    assert summary.json()["status"] == "crashed"
    assert summary.json()["log_tail"][-1] == "the end"
    assert len(summary.content) < 60_000
    assert len(page.content) < 100_000
    assert f'href="/runs/{run.id}/log"' in page.text

    process = psutil.Process(shared_server.process.pid)
    before = process.memory_full_info().uss
    answer = shared_server.http.get(f"/runs/{run.id}/log")
    assert answer.content == older + LONGEST_LINE * 2 + b"the end"
    assert process.memory_full_info().uss - before < len(answer.content) / 2
    head = shared_server.http.head(f"/runs/{run.id}/log")
    assert int(head.headers["content-length"]) == len(answer.content)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-disposition"] == f"attachment; filename*=UTF-8''{run.id}.log"


def test_a_run_without_a_log_says_so(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    answer = shared_server.http.get(f"/runs/{run.id}/log")
    assert answer.status_code == 404
    assert "This run has no log: its trainer has printed nothing yet." in answer.text.replace("&#39;", "'")
