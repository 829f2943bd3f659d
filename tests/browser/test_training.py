"""A person at the page, and a trainer that really trains."""

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.conftest import FIXTURE, Server, kill_trainer, read_events, wait_for
from trainer_core.adapter_files import ADAPTER_FILES
from trainer_core.run_dir import RunDir

LONG = {"epochs": 100_000, "save_every_epochs": 100_000}


def fill_fixture(page: Page, **values: str) -> None:
    """Fill the form for a quick run on the fixture model."""
    fields = {
        "model.source": str(FIXTURE / "checkpoint"),
        "dataset.source": str(FIXTURE / "tensors"),
        "adapter.rank": "4",
        "training.epochs": "2",
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    for name, value in fields.items():
        page.locator(f"[name='{name}']").fill(value)


def epochs_shown(page: Page) -> list[int]:
    """The numbers of the epoch lines in the feed, oldest first."""
    lines = page.locator("[data-feed] [data-kind=epoch] span").all_inner_texts()
    return [int(re.findall(r"Epoch ([\d,]+)", line)[0].replace(",", "")) for line in reversed(lines)]


def begin(server: Server, open_page: OpenPage) -> tuple[RunDir, Page]:
    """A long run with its page open, some epochs done."""
    run = server.begin(training=LONG)
    page = open_page(f"{server.address}/runs/{run.id}")
    expect(page.locator("[data-feed] [data-kind=epoch]").nth(2)).to_be_visible(timeout=60_000)
    return run, page


def test_errors_stand_at_their_fields_nothing_typed_is_lost_and_start_works_then(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    """I3."""
    page = open_page(f"{server.address}/runs/new")
    fill_fixture(page, name="Étude", training__learning_rate="abc", dataset__source=str(tmp_path / "gone"))
    page.reload()
    expect(page.locator("[name='training.learning_rate']")).to_have_value("abc")

    page.get_by_role("button", name="Start training").click()
    expect(page.locator("[data-error-summary]")).to_be_visible()
    expect(page.locator("[data-field='training.learning_rate'] [data-error]")).to_contain_text("'abc' was given")
    expect(page.locator("[data-field='dataset.source'] [data-error]")).to_contain_text("There is no folder")
    assert page.locator("[data-error]").count() == 2
    for name, value in (("name", "Étude"), ("training.learning_rate", "abc"), ("adapter.rank", "4")):
        expect(page.locator(f"[name='{name}']")).to_have_value(value)

    page.goto(f"{server.address}/runs/new")
    expect(page.locator("[name='name']")).to_have_value("Étude")
    page.locator("[name='training.learning_rate']").fill("1e-4")
    page.locator("[name='dataset.source']").fill(str(FIXTURE / "tensors"))
    page.get_by_role("button", name="Start training").dblclick()
    expect(page).to_have_url(re.compile(r"/runs/\d{8}-\d{6}-etude$"))
    expect(page.locator("[data-status]")).to_have_text("completed", timeout=90_000)
    expect(page.locator("[data-figure=step]")).to_have_text("6")
    assert len(list(server.runs)) == 1

    page.goto(f"{server.address}/runs/new")
    expect(page.locator("[name='name']")).to_have_value("My adapter")


def test_a_reload_a_second_tab_and_a_restarted_server_show_one_history(server: Server, open_page: OpenPage) -> None:
    """G1, G4."""
    run, first = begin(server, open_page)
    second = open_page(f"{server.address}/runs/{run.id}")
    first.reload()
    server.kill()
    expect(first.locator("[data-connection]")).to_contain_text("Reconnecting", timeout=10_000)
    done = len(read_events(run, "epoch"))
    wait_for(lambda: len(read_events(run, "epoch")) > done + 2, "training without a server")
    server.start()
    for page in (first, second):
        expect(page.locator("[data-connection]")).to_contain_text("Live", timeout=15_000)
        expect(page.locator("[data-status]")).to_have_text("running")
    first.close()
    second.locator("[data-stop]").click()
    expect(second.locator("[data-status]")).to_have_text("stopped", timeout=15_000)
    third = open_page(f"{server.address}/runs/{run.id}")
    expect(third.locator("[data-feed] [data-kind=finished]")).to_be_visible()
    expected = [event["epoch"] for event in read_events(run, "epoch")]
    assert 5 <= len(expected) < 190  # within what the feed holds
    assert epochs_shown(second) == epochs_shown(third) == expected == list(range(1, len(expected) + 1))


def test_stop_saves_a_checkpoint_that_can_be_downloaded(server: Server, open_page: OpenPage, tmp_path: Path) -> None:
    """G7."""
    run, page = begin(server, open_page)
    page.locator("[data-stop]").click()
    expect(page.locator("[data-status]")).to_have_text("stopped", timeout=15_000)
    last = read_events(run, "step")[-1]["step"]
    expect(page.locator("[data-outcome]")).to_contain_text(f"Stopped after step {last}")
    row = page.locator("[data-checkpoints] [data-checkpoint]")
    expect(row).to_contain_text(f"Step {last:,}")
    for chosen, suffix in (("comfyui", "-comfyui-bf16.safetensors"), ("peft", "-peft-bf16.zip")):
        page.locator("[data-download=format]").select_option(chosen)
        with page.expect_download() as download:
            row.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename.endswith(f"-{run.list_checkpoints()[0].name}{suffix}")
        download.value.save_as(tmp_path / chosen)
        assert (tmp_path / chosen).stat().st_size > run.list_checkpoints()[0].bytes / 2
    page.get_by_role("button", name="Continue from step").click()
    expect(page.locator("[data-origin]")).to_contain_text(
        f"Continues {run.summary().name}, {run.list_checkpoints()[0].name}"
    )
    expect(page.locator("h1")).to_have_text(f"{run.summary().name} (from step {last})")
    expect(page.locator("[data-feed]")).to_contain_text(f"Resuming after step {last} of", timeout=30_000)
    expect(page.locator("[data-status]")).to_have_text("running", timeout=30_000)
    resumed = next(iter(server.runs))
    wait_for(lambda: read_events(resumed, "step"), "a step")
    assert read_events(resumed, "step")[0]["step"] == last + 1
    page.locator("[data-stop]").click()
    expect(page.locator("[data-status]")).to_have_text("stopped", timeout=15_000)
    page.locator("[data-origin]").get_by_role("link").click()

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page).to_have_url(f"{server.address}/")
    assert not run.path.exists()


def test_a_killed_trainer_is_shown_as_crashed_with_why(server: Server, open_page: OpenPage) -> None:
    """G3."""
    run, page = begin(server, open_page)
    kill_trainer(run)
    expect(page.locator("[data-status]")).to_have_text("crashed", timeout=3_000)
    expect(page.locator("[data-outcome]")).to_contain_text("killed by signal 9 (SIGKILL)", timeout=3_000)
    expect(page.locator("[data-log-tail]")).to_contain_text("loading_model")
    page.get_by_role("link", name="Use these settings again").click()
    expect(page.locator("[name='training.epochs']")).to_have_value("100000")


def test_an_upload_fills_the_form_and_hides_what_is_read_from_it(server: Server, open_page: OpenPage) -> None:
    """Both of PEFT's files at once; then what is none, which says so and can be mended."""
    page = open_page(f"{server.address}/runs/new")
    rank, found = page.locator("[data-field='adapter.rank']"), page.locator("[data-adapter-found]")
    expect(rank).to_be_visible()
    page.locator("[data-adapter-upload]").set_input_files([FIXTURE / "adapter" / name for name in ADAPTER_FILES])
    expect(found).to_contain_text("LoRA of rank 4, alpha 8, on 32 modules (self_attention, cross_attention)")
    expect(page.locator("[name=start_from]")).to_have_value(re.compile(r"/adapters/adapter-\w{12}$"))
    expect(rank).to_be_hidden()
    expect(page.locator("[data-field='adapter.dropout']")).to_be_visible()

    page.locator("[data-adapter-upload]").set_input_files(FIXTURE / "reference.safetensors")
    expect(found).to_contain_text("holds no adapter for ACE-Step 1.5 that Descant knows: 0 of its")
    expect(page.locator("[name=start_from]")).to_have_value(re.compile(r"/adapters/adapter-\w{12}$"))
    page.get_by_role("button", name="Start training").click()  # with another adapter than was meant last
    expect(found).to_contain_text("Not started: upload another, or press Start training again")
    page.locator("[name=start_from]").fill("")
    page.locator("[name=start_from]").blur()
    expect(found).to_have_text("")
    expect(rank).to_be_visible()

    page.locator("[data-adapter-upload]").set_input_files([FIXTURE / "adapter" / name for name in ADAPTER_FILES])
    expect(rank).to_be_hidden()
    page.locator("[name='model.source']").fill(str(FIXTURE / "checkpoint"))
    page.locator("[name='dataset.source']").fill(str(FIXTURE / "tensors"))
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("[data-origin]")).to_contain_text("Started from the weights of")
    assert next(iter(server.runs)).load_config().adapter.alpha == 8
