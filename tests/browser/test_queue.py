"""Runs that wait, and one that won't stop, as a person sees them."""

import os
import time

from playwright.sync_api import Dialog, expect

from tests.browser.conftest import OpenPage
from tests.conftest import Server, make_run, started, writing
from trainer_core.run_dir import GRACE_SECONDS


def test_runs_are_queued_moved_and_taken_out(shared_server: Server, open_page: OpenPage) -> None:
    active = make_run(shared_server.home)
    with writing(active) as writer:
        writer.write(started())
        page = open_page(f"{shared_server.address}/runs/new")
        expect(page.locator("[data-active-run]")).to_contain_text("fixture is training")
        for name in ("First", "Second"):
            page.goto(f"{shared_server.address}/runs/new")
            page.get_by_label("Name", exact=True).fill(name)
            # As fast as a double click: the second press comes before the answer to the first.
            page.get_by_role("button", name="Add to queue").evaluate("button => { button.click(); button.click(); }")
            expect(page.locator("[data-status]")).to_have_text("queued")
            expect(page.locator("[data-chart-empty]")).to_contain_text("This run waits in the queue.")
            expect(page.get_by_role("button", name="Delete")).to_be_hidden()
        page.get_by_role("link", name="Runs").click()
        waiting = page.locator("[data-queue] [data-cell=name]")
        expect(waiting).to_have_text(["First", "Second"])
        expect(page.locator("[data-runs] [data-cell=name]")).to_have_text(["fixture"])
        page.get_by_role("button", name="Move up").last.click()
        expect(waiting).to_have_text(["Second", "First"])
        expect(page.get_by_role("button", name="Move up").first).to_be_disabled()
        expect(page.get_by_role("button", name="Move down").last).to_be_disabled()
        page.locator("[data-queue]").get_by_role("button", name="Take out").first.click()
        expect(waiting).to_have_text(["First"])
        page.get_by_role("link", name="Second").click()
        expect(page.locator("[data-outcome]")).to_contain_text("Taken out of the queue before it began.")
        expect(page.get_by_role("link", name="Use these settings again")).to_be_visible()
        page.get_by_role("link", name="Runs").click()
        expect(waiting).to_have_text(["First"])


def test_a_trainer_that_does_not_stop_can_be_ended_without_saving_after_a_while(
    shared_server: Server, open_page: OpenPage
) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(started())
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        end = page.get_by_role("button", name="End without saving")
        page.get_by_role("button", name="Stop and save").click()
        expect(page.locator("[data-status]")).to_have_text("stopping")
        expect(end).to_be_hidden()
        asked = time.time() - GRACE_SECONDS
        os.utime(run.stop, (asked, asked))
        expect(end).to_be_visible()
        questions: list[str] = []

        def decline(dialog: Dialog) -> None:
            questions.append(dialog.message)
            dialog.dismiss()

        page.once("dialog", decline)
        end.click()
        assert questions == ["End the trainer at once? What it has not saved is lost."]
        expect(page.locator("[data-status]")).to_have_text("stopping")
