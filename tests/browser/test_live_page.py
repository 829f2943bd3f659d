"""The run page over time: long runs, dead connections, and the same run however it came to the page."""

import random
import re
import signal

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.conftest import Server, append_steps, make_run, started, step, wait_for, writing
from trainer_core.events import Checkpoint, Epoch, Phase, Skipped, Validation, Warning

FIELDS = [
    "lastSeq",
    "started",
    "phase",
    "finished",
    "firstTime",
    "lastTime",
    "columns",
    "skips",
    "validations",
    "savedSteps",
    "feed",
    "stepsDone",
    "totalSteps",
    "pace",
]
"""What views read of the store."""

COMPARE = """async ([id, fields]) => {
    const { RunStore } = await import("/static/js/run_store.js");
    const text = await (await fetch(`/api/runs/${id}/events`)).text();
    const events = text.trim().split("\\n").map((line) => JSON.parse(line));
    const seen = (store) => Object.fromEntries(fields.map((name) => [name, store[name]]));
    const live = new RunStore();
    live.receive({ events: events.slice(0, -1) });
    const loaded = new RunStore();
    loaded.receive({ snapshot: JSON.parse(window.snapshot) });
    const before = [seen(live), seen(loaded)].map((fields) => JSON.parse(JSON.stringify(fields)));
    for (const store of [live, loaded]) store.receive({ events: events.slice(-1) });
    return [before, [seen(live), seen(loaded)]];
}"""

GROW = """async (id) => {
    const { RunStore } = await import("/static/js/run_store.js");
    const { RunSocket } = await import("/static/js/run_socket.js");
    const store = (window.store = new RunStore());
    window.longest = 0;
    window.seqs = [];
    store.addEventListener("step", () => {
        window.longest = Math.max(window.longest, store.columns.step.length);
        window.seqs.push(store.lastSeq);
    });
    new RunSocket(store, id);
}"""


@pytest.mark.parametrize("is_saving", [False, True])
def test_a_loaded_series_is_what_the_events_would_have_made(
    is_saving: bool, shared_server: Server, open_page: OpenPage
) -> None:
    run = make_run(shared_server.home)
    page = open_page(shared_server.address)
    with writing(run) as writer:
        writer.write(Phase(name="training", message="Training"))
        writer.write(started(total_steps=400))
        for number in range(1, 301):
            writer.write(step(number, loss=float("nan") if number in (1, 7) else random.random()))
            if number % 10 == 0:
                writer.write(Skipped(step=number, epoch=1, reason="r", nonfinite_tensors=0, total_tensors=0, names=[]))
                writer.write(Epoch(epoch=number, loss=0.5, updates=1, skipped=0, seconds=1))
                writer.write(Validation(step=number, epoch=1, loss=random.random()))
                writer.write(Checkpoint(name="step-000001", step=number, epoch=1, bytes=1, tensors=1))
                writer.write(Warning(message="w"))
                writer.write(Warning(message="w"))
                writer.write(Warning(message="w"))
        if is_saving:
            writer.write(Phase(name="saving", message="Saving"))
        snapshot = shared_server.http.get(f"/api/runs/{run.id}/series").text
        writer.write(step(301, loss=0.125))
    page.evaluate("(snapshot) => { window.snapshot = snapshot; }", snapshot)
    for live, loaded in page.evaluate(COMPARE, [run.id, FIELDS]):
        assert len(live["feed"]) == 200
        assert len(live["columns"]["step"]) >= 300
        smoothed = live["columns"].pop("smoothed")
        # Two ways to sum, the same but for the last digits.
        assert loaded["columns"].pop("smoothed") == [None, *(pytest.approx(value, rel=1e-12) for value in smoothed[1:])]
        assert loaded == live


def test_a_long_run_opens_and_stays_small_while_it_grows(shared_server: Server, open_page: OpenPage) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(started(total_steps=300_000))
    append_steps(run, 2, (random.uniform(0.4, 0.6) for _ in range(200_000)))
    with run.lock():
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        expect(page.locator("[data-figure=step]")).to_have_text("200,001", timeout=15_000)
        chart = page.locator("[data-chart]").bounding_box()
        assert chart
        page.mouse.move(chart["x"] + 300, chart["y"] + 100)
        page.mouse.down()
        page.mouse.move(chart["x"] + 400, chart["y"] + 100)
        page.mouse.up()
        page.mouse.move(0, 0)
        expect(page.locator("[data-readout]")).to_have_text("Double-click to show all steps")
        page.evaluate(GROW, run.id)
        for first in range(200_002, 220_002, 1000):
            append_steps(run, first, [0.5] * 1000)
            expect(page.locator("[data-figure=step]")).to_have_text(f"{first + 999:,}")
        wait_for(lambda: page.evaluate("store.stepsDone") == 220_001, "the newest step")
        assert page.evaluate("store.columns.step[0]") == 2
        assert 2000 < page.evaluate("longest") < 7000
        expect(page.locator("[data-readout]")).to_have_text("Double-click to show all steps")
        seqs = page.evaluate("seqs")
        assert seqs == sorted(seqs)


def expect_connection(page: Page, text: str) -> None:
    """The words about the connection."""
    expect(page.locator("[data-connection]")).to_have_text(text, timeout=15_000)


def test_a_server_that_falls_silent_is_noticed_and_found_again(server: Server, open_page: OpenPage) -> None:
    """A clock that jumps is what a page sees of a laptop that slept; a stopped process answers nothing."""
    run = make_run(server.home)
    with writing(run) as writer:
        writer.write(started())
        writer.write(step(1))
        page = open_page("about:blank")
        page.clock.install()
        page.goto(f"{server.address}/runs/{run.id}")
        expect_connection(page, "Live")
        server.process.send_signal(signal.SIGSTOP)
        try:
            writer.write(step(2))
            page.clock.fast_forward(15_000)
            expect_connection(page, "Live")
            page.clock.fast_forward(15_000)
            expect_connection(page, "Reconnecting…")
        finally:
            server.process.send_signal(signal.SIGCONT)
        expect_connection(page, "Live")
        expect(page.locator("[data-figure=step]")).to_have_text("2")


def test_a_restarted_server_is_found_again_and_a_deleted_run_is_told(server: Server, open_page: OpenPage) -> None:
    run = make_run(server.home)
    with writing(run) as writer:
        writer.write(started())
        writer.write(step(1))
        page = open_page(f"{server.address}/runs/{run.id}")
        expect_connection(page, "Live")
        server.kill()
        expect_connection(page, "Reconnecting…")
        writer.write(step(2))
        server.start()
        expect_connection(page, "Live")
        expect(page.locator("[data-figure=step]")).to_have_text("2")
        server.kill()
        expect_connection(page, "Reconnecting…")
    run.delete()
    server.start()
    expect_connection(page, "This run was deleted.")


def test_a_huge_log_leaves_the_page_small_and_is_had_whole(shared_server: Server, open_page: OpenPage) -> None:
    """I4."""
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(step(1))
    run.log.write_text("".join(f"line {number}\n" for number in range(200_000)) + "x" * 5_000_000)
    page = open_page(f"{shared_server.address}/runs/{run.id}")
    expect(page.locator("[data-status]")).to_have_text("crashed", timeout=15_000)
    expect(page.locator("[data-log-tail]")).to_contain_text(re.compile("x{100}"))
    assert len(page.content()) < 100_000
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the log").click()
    assert download.value.suggested_filename == f"{run.id}.log"
    assert download.value.path().stat().st_size == run.log.stat().st_size
