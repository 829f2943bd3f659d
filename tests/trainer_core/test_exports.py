"""Every kind of adapter in every format, at the strength that each program gives it."""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import FIXTURE, make_run
from tests.trainer_core import programs
from tests.trainer_core.conftest import CLOSE, KINDS, Checkpoints, difference, trained
from tests.trainer_core.test_checkpoint import save
from tests.trainer_core.test_model import output
from trainer_core import adapter, adapter_files, exports, model
from trainer_core.config import AdapterConfig
from trainer_core.formats import FORMATS, PRECISIONS, FormatName, Precision, refusal
from trainer_core.sources import SourceError

every_kind = pytest.mark.parametrize("kind", KINDS)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


@every_precision
@every_kind
def test_the_zip_gives_peft_the_trained_change(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint, expected = checkpoints[kind]
    exports.export(checkpoint, "peft", precision, tmp_path / "a.zip")
    assert difference(programs.peft(tmp_path / "a.zip", tmp_path / "unpacked"), expected) <= CLOSE[precision]


@every_precision
@every_kind
def test_the_comfyui_file_gives_comfyui_the_trained_change(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """E2, E5: rank 16 alpha 32, rank-stabilised, whole factors; a DoRA's magnitudes by ComfyUI's own norm."""
    checkpoint, expected = checkpoints[kind]
    file = tmp_path / "a.safetensors"
    exports.export(checkpoint, "comfyui", precision, file)
    assert difference(programs.comfyui(file), expected) <= CLOSE[precision]
    assert not any("magnitude" in name for name in load_file(file))
    assert any(name.endswith(".dora_scale") for name in load_file(file)) == (kind == "DoRA")


@every_kind
def test_every_exported_name_is_one_that_comfyui_accepts(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """E1."""
    count = exports.export(checkpoints[kind][0], "comfyui", "bf16", tmp_path / "a.safetensors")
    names = load_file(tmp_path / "a.safetensors")
    modules = {name.partition(".lo" if ".lo" in name else ".alpha")[0].removesuffix(".dora_scale") for name in names}
    assert modules <= programs.comfyui_names()
    assert len(names) == count
    assert len(modules) == len(checkpoints[kind][1])


@every_precision
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "LoKr" in kind])
def test_lycoris_loads_a_lokr_as_ace_step_does(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """In use and merged: LyCORIS itself."""
    checkpoint, expected = checkpoints[kind]
    exports.export(checkpoint, "comfyui", precision, tmp_path / "a.safetensors")
    assert [
        difference(found, expected) <= CLOSE[precision] for found in programs.ace_step_lokr(tmp_path / "a.safetensors")
    ] == [True] * 2


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    programs.tiny_pipeline(folder)
    return folder


@every_precision
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "LoRA" in kind])
def test_the_pipeline_loads_the_diffusers_file_and_its_transformer_gives_the_trained_output(
    kind: str,
    precision: Precision,
    checkpoints: Checkpoints,
    pipeline_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """E4. AceStepPipeline itself, from disk: it warns of no key, and differs from the base model."""
    checkpoint, expected = checkpoints[kind]
    exports.export(checkpoint, "diffusers", precision, tmp_path / "a.safetensors")
    pipeline = programs.load_pipeline(pipeline_folder)
    base = output(pipeline)
    pipeline.load_lora_weights(str(tmp_path / "a.safetensors"))
    assert "unexpected keys" not in caplog.text
    assert "missing keys" not in caplog.text
    assert difference(programs.merged(pipeline.transformer), expected) <= CLOSE[precision]
    wanted = output(trained(kind))
    assert (output(pipeline) - wanted).norm() / (base - wanted).norm() <= 10 * CLOSE[precision]


@every_kind
def test_a_format_that_can_not_hold_an_adapter_says_so(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    refused: list[FormatName] = ["diffusers"] if "LoRA" not in kind else []
    assert [name for name in FORMATS if refusal(name, KINDS[kind]["type"])] == refused
    for name in refused:
        with pytest.raises(SourceError, match=r"drops a DoRA's magnitudes|takes LoRA only"):
            exports.export(checkpoints[kind][0], name, "bf16", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# What a person does with downloads, knowing nothing else of the run, in a process of its own.
LOAD_ALL = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from tests.trainer_core import programs
from tests.trainer_core.conftest import CLOSE, KINDS, Checkpoints, difference, trained

folder, pipeline_folder = map(Path, sys.argv[1:])
for file in list(folder.iterdir()):
    kind, name = file.stem.split("-")
    if name == "peft":
        changes = programs.peft(file, folder / f"{kind} unpacked")
    elif name == "comfyui":
        changes = programs.comfyui(file)
    else:
        pipeline = programs.load_pipeline(pipeline_folder)
        pipeline.load_lora_weights(str(file))
        changes = programs.merged(pipeline.transformer)
    save_file(changes, folder / f"{kind}-{name}.changes")
"""


def test_downloads_alone_load_in_a_fresh_process(
    checkpoints: Checkpoints, pipeline_folder: Path, tmp_path: Path
) -> None:
    """E3. LoRA, DoRA and LoKr in every format that holds them; the process has the files and the base model."""
    made = {
        (kind, name): tmp_path / f"{kind}-{name}{FORMATS[name].suffix}"
        for kind in ("LoRA", "DoRA", "LoKr")
        for name in FORMATS
        if not refusal(name, KINDS[kind]["type"])
    }
    for (kind, name), file in made.items():
        exports.export(checkpoints[kind][0], name, "fp32", file)
    subprocess.run([sys.executable, "-c", LOAD_ALL, tmp_path, pipeline_folder], check=True)
    for (kind, name), file in made.items():
        assert difference(load_file(file.with_suffix(".changes")), checkpoints[kind][1]) <= 1e-5, (kind, name)
    assert len(made) == 7


@pytest.mark.parametrize("name", FORMATS)
def test_the_header_says_what_the_file_is_and_no_place_of_this_machine(
    name: FormatName, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    file = tmp_path / f"a{FORMATS[name].suffix}"
    exports.export(checkpoints["LoRA"][0], name, "bf16", file)
    contents = file.read_bytes()
    if name == "peft":
        with zipfile.ZipFile(file) as archive:
            contents = b"".join(archive.read(entry) for entry in archive.namelist())
            archive.extractall(tmp_path)
        file = tmp_path / "a" / "adapter_model.safetensors"
        text = (tmp_path / "a" / "HOW-TO-LOAD.txt").read_text()
        assert "LoRA of rank 16, alpha 32" in text
        assert 'PeftModel.from_pretrained(model.decoder, "a")' in text
        described = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert (described["r"], described["lora_alpha"], described["peft_type"]) == (16, 32, "LORA")
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    assert (
        header
        | {
            "format": "pt",
            "name": "LoRA",
            "base_model": "checkpoint",
            "variant": "base",
            "adapter": "lora",
            "rank": "16",
            "alpha": "32",
            "rank_stabilized": "off",
            "steps": "6",
            "epochs": "2",
            "training_loss": "1",
            "descant_version": metadata.version("descant"),
        }
        == header
    )
    assert ("lora_adapter_metadata" in header) == (name == "diffusers")
    for place in (FIXTURE, checkpoints["LoRA"][0], Path.home(), tmp_path):
        assert str(place).encode() not in contents


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_checkpoint_gives_the_same_bytes(name: FormatName, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What a download is resumed by."""
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        exports.export(checkpoints["LoRA"][0], name, "bf16", folder / "a")
        written.append((folder / "a").read_bytes())
    assert written[0] == written[1]


def test_the_original_adapter_comes_back_with_the_same_tensors(tmp_path: Path) -> None:
    """ACE-Step's own adapter, imported, saved, exported."""
    theirs = adapter_files.read(FIXTURE / "adapter")
    assert theirs.settings == {
        "type": "lora",
        "rank": 4,
        "alpha": 8,
        "rank_stabilized": False,
        "targets": ("self_attention", "cross_attention"),
    }
    loaded = model.load(str(FIXTURE / "checkpoint"))
    adapter.inject(loaded.transformer, AdapterConfig.model_validate(theirs.settings))
    assert adapter.load(loaded.transformer, theirs) == (64, 0)
    run = make_run(tmp_path, adapter=theirs.settings)
    save(run, loaded)
    exports.export(run.checkpoints / "step-000006", "peft", "fp32", tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path)
    ours, original = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "a", FIXTURE / "adapter")
    )
    assert set(ours) == set(original)
    assert all(torch.equal(ours[name], tensor) for name, tensor in original.items())


def test_weights_too_large_for_fp16_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    loaded = trained("LoRA")
    next(parameter for _, parameter in adapter.trainable(loaded.transformer)).data[0, 0] = 1e6
    run = make_run(tmp_path, adapter=KINDS["LoRA"])
    save(run, loaded)
    for name in FORMATS:
        with pytest.raises(SourceError, match=r"fp16 can't hold 1 of \d+ tensors .* Choose bf16"):
            exports.export(run.checkpoints / "step-000006", name, "fp16", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_dora_without_its_scales_is_refused_for_comfyui_only(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["DoRA"][0], tmp_path / "old"))
    (folder / "dora_scale.safetensors").unlink()
    with pytest.raises(SourceError, match=r"has no dora_scale.safetensors"):
        exports.export(folder, "comfyui", "bf16", tmp_path / "a.safetensors")
    assert exports.export(folder, "peft", "bf16", tmp_path / "a.zip")
