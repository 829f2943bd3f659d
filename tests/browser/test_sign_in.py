"""A person with the key, in a real browser."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.conftest import Server, make_run, started, step, writing

KEY = "correct-horse-battery-staple"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    """A server with a key."""
    server = Server(tmp_path / "home", api_key=KEY)
    yield server
    server.stop()


def test_a_person_signs_in_sees_a_run_live_and_signs_out(guarded: Server, open_page: OpenPage) -> None:
    run = make_run(guarded.home)
    with writing(run) as writer:
        writer.write(started())
        page = open_page(f"{guarded.address}/runs/{run.id}")
        expect(page).to_have_title("Sign in · Descant")
        expect(page.get_by_role("link", name="New run")).to_have_count(0)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This is not the key.")
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{guarded.address}/runs/{run.id}")
        writer.write(step(1))
        expect(page.get_by_text("Step 1 of 9")).to_be_visible()  # over the websocket, by the cookie
        (cookie,) = page.context.cookies()
        assert cookie["httpOnly"]
        assert KEY not in cookie["value"]

        other = open_page(guarded.address)
        expect(other.get_by_role("link", name="fixture")).to_be_visible()
        watching = open_page(f"{guarded.address}/runs/{run.id}")
        expect(watching.get_by_text("Step 1 of 9")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page).to_have_title("Sign in · Descant")
        expect(other).to_have_title("Sign in · Descant")  # by itself
        guarded.kill()
        guarded.start()
        expect(watching).to_have_title("Sign in · Descant")  # once it has to connect again


def test_a_link_on_another_site_finds_the_person_signed_in_but_its_form_does_nothing(
    guarded: Server, open_page: OpenPage
) -> None:
    """H3. With SameSite=Strict the link would lead to the sign-in page."""
    run = make_run(guarded.home)

    class OtherSite(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            run_address = f"{guarded.address}/runs/{run.id}"
            self.wfile.write(
                f'<link rel=icon href="data:,"><a href="{run_address}">The run</a>'
                f'<form method="post" action="{run_address}/delete"><button>Win</button></form>'.encode()
            )

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OtherSite) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page = open_page(f"{guarded.address}/sign-in")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page).to_have_title("Runs · Descant")
        page.goto(f"http://localhost:{other.server_port}")
        page.get_by_role("link").click()
        expect(page.get_by_role("heading", name="fixture")).to_be_visible()
        page.go_back()
        page.get_by_role("button", name="Win").click()
        expect(page.get_by_text("comes from a page of http://localhost")).to_be_visible()
        assert run.config.exists()
        other.shutdown()
