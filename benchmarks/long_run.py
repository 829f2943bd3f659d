"""How long a run of a million steps takes to open, and what it does to the server's memory.

`.venv/bin/python -m benchmarks.long_run [--steps 1000000]` writes such a run as a trainer does, asks a fresh server for
its series, then opens its page in a real Chromium on another fresh server, and once more on the same, and lets it grow.
The page's time goes from the call that opens it to the frame that shows the newest step.
"""

import argparse
import math
import random
import re
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.conftest import find_chromium
from tests.conftest import Server, append_steps, make_run, started, step, writing
from trainer_core.run_dir import RunDir

FLAGS = ["--no-sandbox", "--enable-precise-memory-info"]


def write_run(home: Path, steps: int) -> RunDir:
    """A run of so many steps, its loss falling with noise."""
    run = make_run(home)
    with writing(run) as writer:
        writer.write(started(total_steps=steps))
        for n in range(1, steps + 1):
            writer.write(step(n, loss=0.2 + math.exp(-8 * n / steps) * random.uniform(0.5, 1.5)))
    return run


def memory(server: Server) -> float:
    """The server's own memory in MB."""
    return float(psutil.Process(server.process.pid).memory_full_info().uss) / 1e6


def cpu_seconds(server: Server) -> float:
    """The processor time that the server has had."""
    return float(sum(psutil.Process(server.process.pid).cpu_times()[:2]))


def ask(server: Server, run: RunDir) -> None:
    """The series over HTTP, from a server that has not seen the run, then from one that has."""
    before = memory(server)
    for label in ("first", "again"):
        began, used = time.perf_counter(), cpu_seconds(server)
        answer = server.http.get(f"/api/runs/{run.id}/series", params={"points": 2000})
        seconds, used = time.perf_counter() - began, cpu_seconds(server) - used
        size = len(answer.content) / 1e3
        print(f"series, {label}: {seconds:.2f} s, of which the processor {used:.2f} s, {size:.0f} kB", flush=True)
    print(f"the server's memory: {before:.0f} MB before, {memory(server):.0f} MB after")


def heap(page: Page) -> float:
    """What the page's scripts hold in MB, without what can be let go."""
    page.request_gc()
    return float(page.evaluate("performance.memory.usedJSHeapSize")) / 1e6


def open_page(browser: Browser, server: Server, run: RunDir, shown: str) -> tuple[Page, float]:
    """The run's page in a window without a cache, and the seconds until it shows this as its newest step."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    began = time.perf_counter()
    page.goto(f"{server.address}/runs/{run.id}", wait_until="commit")
    page.locator("[data-figure=step]", has_text=re.compile(f"^{shown}$")).wait_for()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return page, time.perf_counter() - began


def grow(page: Page, run: RunDir, steps: int) -> None:
    """Add a tenth as many steps while the page is open, and print what that does to its memory."""
    before, slice_ = heap(page), steps // 100
    for first in range(steps + 2, steps + 2 + 10 * slice_, slice_):
        append_steps(run, first, [0.2] * slice_)
        page.locator("[data-figure=step]", has_text=f"{first + slice_ - 1:,}").wait_for()
    print(f"the page's heap: {before:.1f} MB, and {heap(page):.1f} MB after {10 * slice_:,} more steps")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder) / "home")
        browser = playwright.chromium.launch(executable_path=find_chromium(playwright), args=FLAGS)
        try:
            run = write_run(server.home, steps)
            print(f"{steps:,} steps, {run.events.stat().st_size / 1e6:.0f} MB", flush=True)
            with run.lock():  # it is still going on
                ask(server, run)
                server.kill()
                server.start()
                open_page(browser, server, make_run(server.home), ".")[0].close()  # Chromium itself starts slowly
                for label in ("on a server that has not seen the run", "again"):
                    page, seconds = open_page(browser, server, run, f"{steps:,}")
                    print(f"page, {label}: {seconds:.2f} s", flush=True)
                grow(page, run, steps)
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main()
