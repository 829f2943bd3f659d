"""How long an event takes from the trainer's write to the pixels of the page: median and 99th percentile.

`.venv/bin/python -m benchmarks.live_latency [--events 400]` starts a real server and a real Chromium, writes steps as
a trainer does, and takes for each the clock in the browser in the frame after the one that painted the step number.
Both ends read one machine's clock. A loop in the page that does the same without a server gives the share of that
figure that is Chromium's own two frames.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import find_chromium
from tests.conftest import Server, make_run, started, step, writing

WATCH = """() => {
    window.shown = {};
    const cell = document.querySelector("[data-figure=step]");
    new MutationObserver(() => {
        const step = cell.textContent.replaceAll(",", "");
        requestAnimationFrame(() => setTimeout(() => (window.shown[step] ??= Date.now() / 1000)));
    }).observe(cell, { childList: true, characterData: true, subtree: true });
}"""

FLOOR = """async (count) => {
    const delays = [];
    for (let i = 0; i < count; i++) {
        const written = performance.now();
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))));
        delays.push((performance.now() - written) / 1000);
    }
    return delays;
}"""


def report(label: str, delays: list[float]) -> float:
    """Print the median and 99th percentile in milliseconds; returns the median in seconds."""
    percentiles = statistics.quantiles(delays, n=100, method="inclusive")
    print(
        f"{label}: median {1000 * percentiles[49]:.0f} ms, 99th percentile {1000 * percentiles[98]:.0f} ms,"
        f" worst {1000 * max(delays):.0f} ms, {len(delays)} measured"
    )
    return percentiles[49]


def measure(page: Page, server: Server, count: int) -> None:
    """Write `count` steps at irregular times and compare when each was written with when it was shown."""
    run = make_run(server.home)
    written: dict[int, float] = {}
    with writing(run) as writer:
        writer.write(started(total_steps=count))
        page.goto(f"{server.address}/runs/{run.id}")
        page.locator("[data-connection=connected]").wait_for()
        page.evaluate(WATCH)
        for number in range(1, count + 1):
            event = step(number, loss=1 / number)
            writer.write(event)
            written[number] = event.time
            time.sleep(random.uniform(0.05, 0.15))
        page.wait_for_timeout(1000)
    shown: dict[str, float] = page.evaluate("window.shown")
    delays = [shown[str(number)] - at for number, at in written.items() if str(number) in shown]
    median = report("event written to pixel shown", delays)
    print(f"steps replaced by a later one before they were painted: {count - len(delays)} of {count}")
    floor = report("two frames of this browser alone", page.evaluate(FLOOR, count // 4))
    print(f"ratio of the medians: {median / floor:.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=400)
    count = parser.parse_args().events
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder))
        browser = playwright.chromium.launch(executable_path=find_chromium(playwright), args=["--no-sandbox"])
        try:
            measure(browser.new_page(viewport={"width": 1440, "height": 1000}), server, count)
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main()
