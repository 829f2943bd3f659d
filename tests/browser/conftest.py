"""A real Chromium. Every page of a test is watched: an error in its console fails the test."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, sync_playwright

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
ADVICE = (
    "The browser tests need a Chromium. On Debian or Ubuntu: apt install chromium. "
    "Elsewhere: .venv/bin/playwright install chromium."
)
EXPECTED_ERRORS = ("Failed to load resource", "WebSocket connection to")
"""What Chromium itself prints of a 4xx answer or of a server that a test has killed."""

OpenPage = Callable[..., Page]


def find_chromium(playwright: Playwright) -> str:
    """The system's Chromium or Playwright's own; fails saying how to get one."""
    own = playwright.chromium.executable_path
    found = next(filter(None, map(shutil.which, (*CHROMIUM_NAMES, own))), None)
    if not found:
        pytest.fail(ADVICE)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium from the system, or Playwright's own."""
    with sync_playwright() as playwright:
        path = find_chromium(playwright)
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open an address in a fresh window; the test fails if its console shows an error."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, accept_downloads=True)

    def watch(message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith(EXPECTED_ERRORS):
            errors.append(message.text)

    def open_page(address: str) -> Page:
        page = context.new_page()
        page.on("console", watch)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    context.close()
    assert errors == []
