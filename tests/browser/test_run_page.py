"""The run page over hand-written events: what it shows of each, and that it survives what a night brings."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.conftest import Server, make_run, started, step, writing
from trainer_core.events import Checkpoint, Epoch, Event, EventWriter, Finished, Phase, Skipped, Validation, Warning
from trainer_core.run_dir import RunDir

SKIPPED = Skipped(
    step=3,
    epoch=1,
    reason="non-finite gradients",
    nonfinite_tensors=2,
    total_tensors=64,
    names=["layers.0.self_attn.q_proj.lora_B"],
)


def figure(page: Page, name: str) -> str:
    """The text of a figure."""
    return page.locator(f"[data-figure={name}]").inner_text()


def test_the_page_understands_every_event_type_that_python_defines(shared_server: Server, open_page: OpenPage) -> None:
    page = open_page(shared_server.address)
    handled = page.evaluate("import('/static/js/run_store.js').then((store) => Object.keys(store.handlers))")
    defined = [kind.model_fields["type"].default for kind in Event.__subclasses__()]
    assert sorted(handled) == sorted(defined)


def test_each_event_is_shown(shared_server: Server, open_page: OpenPage) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        expect(page.locator("[data-status]")).to_have_text("starting")
        assert figure(page, "loss") == "\N{EN DASH}"
        writer.write(Phase(name="loading_model", message="Loading the base model"))
        expect(page.locator("[data-phase]")).to_contain_text("Loading the base model")
        writer.write(started(phase_seconds={"starting": 0.5, "importing": 7.5, "loading_data": 0.01}))
        expect(page.locator("[data-status]")).to_have_text("running")
        writer.write(step(1, loss=1.0))
        writer.write(step(2, loss=float("nan"), grad_norm=float("inf")))
        writer.write(SKIPPED.model_copy())
        writer.write(step(3, loss=0.25, learning_rate=2e-4, grad_norm=0.5, seconds=0.42, memory_bytes=2_100_000_000))
        writer.write(Epoch(epoch=1, loss=0.625, updates=3, skipped=1, seconds=2))
        writer.write(Validation(step=3, epoch=1, loss=0.75))
        writer.write(Warning(message="<b>careful</b>"))
        writer.write(Checkpoint(name="step-000003", step=3, epoch=1, bytes=458_000, tensors=64))

        feed = page.locator("[data-feed]")
        expect(feed.locator("[data-kind=started]")).to_have_text(
            re.compile("modules. Ready after 8.01 s: starting 0.50 s, importing 7.50 s$")
        )
        expect(feed.locator("[data-kind=checkpoint]")).to_contain_text("458 kB")
        expect(feed.locator("[data-kind=skipped]")).to_contain_text("2 of 64 tensors")
        expect(feed.locator("[data-kind=warning]")).to_contain_text("<b>careful</b>")
        expect(feed.locator("[data-kind=epoch]")).to_contain_text("0.6250")
        expect(feed.locator("[data-kind=validation]")).to_have_text(re.compile("Validation loss 0.7500 after epoch 1$"))
        expect(page.locator("[data-key-validation]")).to_be_visible()
        expect(page.locator("[data-figure=step]")).to_have_text("3")
        assert figure(page, "loss") == "0.2500"
        weights = (1 * 0.95 + 0.25) / (1 + 0.95)  # two finite losses, the older one decayed once
        assert float(figure(page, "smoothed_loss")) == pytest.approx(weights, abs=1e-4)
        assert figure(page, "learning_rate") == "2.00e-4"
        assert figure(page, "grad_norm") == "0.500"
        assert figure(page, "seconds") == "0.21 s a step"  # the mean of 0.1, 0.1 and 0.42
        assert figure(page, "memory_bytes") == "2.1 GB"
        assert figure(page, "total_steps") == "9"
        assert "left" in figure(page, "time_left")
        assert page.locator("[data-chart] canvas").count() == 1

        writer.write(Finished(reason="aborted", message="Every step was bad. Try another rate.", step=3, epoch=1))
        expect(page.locator("[data-status]")).to_have_text("aborted")
        expect(page.locator("[data-outcome]")).to_contain_text("Every step was bad. Try another rate.")
        expect(page.locator("[data-stop]")).to_be_hidden()
    expect(page.locator("[data-connection]")).to_have_attribute("data-connection", "ended", timeout=10_000)
    page.reload()
    expect(page.locator("[data-feed] [data-kind=skipped]")).to_contain_text("2 of 64 tensors")
    expect(page.locator("[data-outcome]")).to_contain_text("Every step was bad.")


def test_the_curve_is_drawn_and_goes_on_after_a_bad_point(shared_server: Server, open_page: OpenPage) -> None:
    """I1: the number of coloured pixels grows with the points behind a NaN."""
    run = make_run(shared_server.home)
    accent = """() => {
        const canvas = document.querySelector("[data-chart] canvas");
        const { data } = canvas.getContext("2d").getImageData(canvas.width / 2, 0, canvas.width / 2, canvas.height);
        const probe = document.createElement("canvas").getContext("2d");
        probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
        probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return count;
    }"""
    with writing(run) as writer:
        writer.write(started(total_steps=40))
        for number in range(1, 6):
            writer.write(step(number, loss=float("nan") if number == 3 else 1 / number))
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        expect(page.locator("[data-figure=step]")).to_have_text("5")
        page.wait_for_timeout(200)
        before = page.evaluate(accent)
        for number in range(6, 41):
            writer.write(step(number, loss=1 / number))
        expect(page.locator("[data-figure=step]")).to_have_text("40")
        page.wait_for_timeout(200)
        assert page.evaluate(accent) > before + 200


def test_a_thousand_lines_keep_the_feed_bounded(shared_server: Server, open_page: OpenPage) -> None:
    """I4."""
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(started())
        for number in range(1000):
            writer.write(Warning(message=f"warning {number}"))
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        expect(page.locator("[data-feed] li").first).to_contain_text("warning 999")
        assert page.locator("[data-feed] li").count() == 200
        expect(page.locator("[data-stop]")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_scrolls_sideways(width: int, scheme: str, shared_server: Server, open_page: OpenPage) -> None:
    name = "A very long name without much sense that is meant to break the layout of narrow screens"[:80]
    run = make_run(shared_server.home)
    run.config.write_text(run.config.read_text().replace('"fixture"', f'"{name}"', 1))
    with writing(run) as writer:
        writer.write(started(total_steps=1_000_000, total_epochs=100_000))
        writer.write(step(123_456, epoch=12_345, loss=12.3456, seconds=123.4, memory_bytes=10**12))
        writer.write(Warning(message="x" * 500))
        for path in ("/", "/runs/new", f"/runs/{run.id}", "/nothing"):
            page = open_page(shared_server.address + path)
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.wait_for_timeout(150)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            page.close()


def test_the_run_page_with_all_assets_is_light(shared_server: Server, open_page: OpenPage) -> None:
    run = make_run(shared_server.home)
    page = open_page("about:blank")
    sizes: dict[str, int] = {}
    page.on("response", lambda response: sizes.update({response.url: len(response.body())}))
    page.goto(f"{shared_server.address}/runs/{run.id}", wait_until="networkidle")
    assert any(url.endswith("uPlot.iife.js") for url in sizes)
    assert any(url.endswith("run_store.js") for url in sizes)
    assert sum(sizes.values()) < 200_000


def test_the_list_stays_current_by_itself(shared_server: Server, open_page: OpenPage) -> None:
    page = open_page(shared_server.address)
    expect(page.locator("[data-empty]")).to_be_visible()
    run = make_run(shared_server.home)
    row = page.locator(f"[data-run-row='{run.id}']")
    expect(row).to_contain_text(re.compile("queued", re.IGNORECASE))
    with writing(run) as writer:
        writer.write(started())
        writer.write(step(4, epoch=2, loss=0.125))
        expect(row).to_contain_text(re.compile("running", re.IGNORECASE))
        expect(row).to_contain_text("Epoch 2 of 3 · step 4 of 9")
        expect(row).to_contain_text("0.1250")
        writer.write(Finished(reason="completed", message="m", step=4, epoch=2))
    expect(row).to_contain_text(re.compile("completed", re.IGNORECASE))
    row.get_by_role("link").click()
    expect(page.locator("[data-status]")).to_have_text("completed")


def test_a_resumed_run_counts_on_from_its_parent_before_its_first_step(
    shared_server: Server, open_page: OpenPage
) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        writer.write(
            started(
                first_step=5,
                validation_samples=2,
                base_dtype="bf16",
                gradient_checkpointing="2 of 4 blocks",
                estimated_bytes=9_400_000_000,
            )
        )
        expect(page.locator("[data-figure=step]")).to_have_text("4")
        expect(page.locator("[data-feed] [data-kind=started]")).to_contain_text(
            "2 held out, 1,000 trainable parameters in 32 modules, base in bf16, "
            "gradient checkpointing of 2 of 4 blocks; about 9.4 GB of memory at the peak"
        )
        expect(page.locator("[data-key-validation]")).to_be_visible()
    assert shared_server.http.get(f"/api/runs/{run.id}").json()["step"] == 4


def save(run: RunDir, writer: EventWriter, step: int, loss: float) -> None:
    """A checkpoint as the page sees one."""
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "state.safetensors"):
        (folder / name).touch()
    state = {"step": step, "epoch": step, "validation_loss": loss}
    (folder / "state.json").write_text(json.dumps(state))
    writer.write(Checkpoint(name=folder.name, step=step, epoch=step, bytes=0, tensors=64))


def test_the_best_checkpoint_is_marked_and_the_mark_moves(shared_server: Server, open_page: OpenPage) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(started())
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        row = page.locator("[data-checkpoint='step-000001']")
        expect(page.locator("[data-key-validation]")).to_be_hidden()
        save(run, writer, 1, 0.75)
        expect(row.locator("[data-cell=best]")).to_be_visible()
        expect(row).to_contain_text("validation 0.7500")
        expect(row.get_by_role("link", name="Continue")).to_be_hidden()
        save(run, writer, 2, 0.5)
        expect(page.locator("[data-checkpoint='step-000002'] [data-cell=best]")).to_be_visible()
        expect(row.locator("[data-cell=best]")).to_be_hidden()
        writer.write(Finished(reason="stopped", message="Stopped.", step=2, epoch=2))
    expect(row.get_by_role("link", name="Continue")).to_have_attribute(
        "href", f"/runs/new?resume={run.id}&checkpoint=step-000001"
    )
    expect(page.get_by_role("button", name="Continue from step")).to_be_visible()
    expect(page.get_by_role("link", name="Train longer")).to_be_hidden()


def test_fields_that_mean_nothing_beside_the_others_are_out_of_the_way(
    shared_server: Server, open_page: OpenPage
) -> None:
    page = open_page(f"{shared_server.address}/runs/new")
    rank_stabilized, factor = (
        page.locator(f"[name='adapter.{name}']") for name in ("rank_stabilized", "decompose_factor")
    )
    expect(rank_stabilized).to_be_visible()
    expect(factor).to_be_hidden()
    page.locator("[name='adapter.type']").select_option("lokr")
    expect(rank_stabilized).to_be_hidden()
    expect(factor).to_be_visible()
    page.reload()  # the draft is shown as it was
    expect(factor).to_be_visible()
    factor.fill("0")
    page.locator("[name='adapter.type']").select_option("lora")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("[data-field='adapter.decompose_factor'] [data-error]")).to_be_visible()


def test_every_checkpoint_downloads_in_the_chosen_format_and_precision(
    shared_server: Server, open_page: OpenPage
) -> None:
    """One choice for all rows, those that come later too; what the format can't hold is said, not offered."""
    run = make_run(shared_server.home, adapter={"type": "dora"})
    with writing(run) as writer:
        writer.write(started())
        page = open_page(f"{shared_server.address}/runs/{run.id}")
        choice = page.locator("[data-download-as]")
        expect(choice).to_be_hidden()
        save(run, writer, 3, 0.75)
        links = page.locator("[data-cell=download]:visible")
        expect(links).to_have_attribute("href", re.compile(r"step-000003/download\?format=peft&precision=bf16$"))
        expect(choice.locator("option[value=diffusers]")).to_be_disabled()
        expect(choice).to_contain_text("diffusers can't load a DoRA")
        choice.locator("[data-download=format]").select_option("comfyui")
        choice.locator("[data-download=precision]").select_option("fp32")
        expect(choice).to_contain_text("One file for ComfyUI")
        save(run, writer, 6, 0.75)
        expect(links).to_have_count(2)
        for link, name in zip(links.all(), ("step-000006", "step-000003"), strict=True):
            expect(link).to_have_attribute("href", re.compile(rf"{name}/download\?format=comfyui&precision=fp32$"))


def test_the_form_says_how_much_memory_the_settings_take(shared_server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{shared_server.address}/runs/new")
    line = page.locator("[data-estimate]")
    expect(line).to_contain_text(
        re.compile(r"[\d.]+ MB off, [\d.]+ MB with one block in 2, [\d.]+ MB full\. .+ are free")
    )
    before = line.inner_text()
    buttons = page.get_by_role("button", name="Start training").bounding_box()
    page.locator("[name='training.batch_size']").fill("8")
    expect(line).not_to_have_text(before)
    page.locator("[name='training.gradient_checkpointing']").fill("3")
    expect(line).to_contain_text("with one block in 3")
    page.locator("[name='adapter.rank']").fill("0")
    expect(line).to_have_text("The memory that it takes is told once these are right: Rank.")
    page.locator("[name='adapter.type']").select_option("lokr")
    page.locator("[name='adapter.decompose_factor']").fill("1")
    expect(line).to_contain_text("Rank, Kronecker factor")
    page.locator("[name='adapter.rank']").fill("8")
    page.locator("[name='adapter.type']").select_option("lora")  # the factor is out of the way again
    expect(line).to_contain_text("with one block in 3")
    assert page.get_by_role("button", name="Start training").bounding_box() == buttons
