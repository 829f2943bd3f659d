"""First light: a newcomer presses Start on the prefilled form and takes home an adapter that works elsewhere."""

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.conftest import Server, read_events
from trainer_core.sources import DEMO_MODEL

# Knows nothing of Descant but its demo's base weights: what any program does with a downloaded adapter.
USE_THE_ADAPTER = """
    import sys
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    base_file, folder = sys.argv[1:]
    base = {n.removeprefix("decoder."): t.float() for n, t in load_file(base_file).items() if n.startswith("decoder.")}
    decoder = torch.nn.Module()
    for name, weight in base.items():
        if not name.endswith("_proj.weight") or "attn" not in name:
            continue
        *parents, leaf = name.removesuffix(".weight").split(".")
        place = decoder
        for part in parents:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone())
        place.add_module(leaf, linear)

    adapted = PeftModel.from_pretrained(decoder, folder)
    saved = load_file(folder + "/adapter_model.safetensors")
    loaded = {n.replace(".default.", "."): p for n, p in adapted.named_parameters() if "lora_" in n}
    assert loaded.keys() == saved.keys(), (len(loaded), len(saved))
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    merged = adapted.merge_and_unload()
    changed = sum(not torch.equal(p, base[name]) for name, p in merged.named_parameters())
    print(len(saved), "tensors loaded,", changed, "modules changed")
"""

# Then how much better the demo's model does on its data with what came of it.
COMPARE = """
    from trainer_core import dataset, model, naming, objective

    def loss(weights):
        base = model.load("demo")
        if weights:
            result = base.transformer.load_state_dict(weights, strict=False)
            assert not result.unexpected_keys
        generator = torch.Generator().manual_seed(1)
        losses = []
        for sample in dataset.load("demo"):
            x, noise = sample.target_latents[None], torch.randn(1, sample.shape[0], 64, generator=generator)
            for t in torch.tensor([[0.3], [0.6], [0.9]]):
                with torch.no_grad():
                    prediction = base.transformer(
                        hidden_states=objective.noisy(x, noise, t), timestep=t, timestep_r=t,
                        encoder_hidden_states=sample.encoder_hidden_states[None],
                        context_latents=sample.context_latents[None], return_dict=False,
                    )[0]
                losses.append(objective.sample_losses(prediction, x, noise).item())
        return sum(losses) / len(losses)

    print(loss({naming.to_diffusers(n): p.detach() for n, p in merged.named_parameters()}) / loss(None))
"""


def run_code(code: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_first_light(server: Server, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(server.address)
    page.locator("[data-empty]").get_by_role("link", name="New run").click()
    expect(page.locator("[name='model.source']")).to_have_value("demo")
    expect(page.locator("[name='dataset.source']")).to_have_value("demo")
    page.get_by_role("button", name="Start training").click()
    expect(page.locator("[data-status]")).to_have_text("running", timeout=60_000)
    expect(page.locator("[data-stop]")).to_be_visible()
    expect(page.locator("[data-status]")).to_have_text("completed", timeout=240_000)

    (run,) = server.runs
    epochs = [event["loss"] for event in read_events(run, "epoch")]
    assert len(epochs) == 40
    assert epochs[-1] <= 0.8 * epochs[0]

    newest = page.locator("[data-checkpoints] [data-checkpoint]").first
    expect(newest).to_contain_text("Step 160 · epoch 40")
    page.locator("[data-download=precision]").select_option("fp32")
    with page.expect_download() as download:
        newest.get_by_role("link", name="Download").click()
    archive = tmp_path / download.value.suggested_filename
    download.value.save_as(archive)
    assert archive.name == "my-adapter-step-000160-peft-fp32.zip"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path)
    folder = tmp_path / archive.stem

    printed = run_code(USE_THE_ADAPTER + COMPARE, DEMO_MODEL / "model.safetensors", folder)
    loaded, ratio = printed.splitlines()
    assert loaded == "64 tensors loaded, 32 modules changed"
    assert float(ratio) < 0.8
