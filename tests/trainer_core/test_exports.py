"""Every kind of adapter in every format, at the strength that each program gives it."""

import json
import logging
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import FIXTURE, make_run
from tests.trainer_core import programs
from tests.trainer_core.conftest import CLOSE, KINDS, Checkpoints, difference, trained
from tests.trainer_core.test_checkpoint import save
from tests.trainer_core.test_model import output
from trainer_core import adapter, adapter_files, exports, model
from trainer_core.config import AdapterConfig
from trainer_core.formats import FORMATS, PRECISIONS, FormatName, Precision, refusal
from trainer_core.sources import SourceError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
full_and_half = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@full_and_half
@every_kind
def test_the_zip_gives_peft_the_trained_change_and_output(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint, expected, wanted = checkpoints[kind]
    exports.export(checkpoint, "peft", precision, tmp_path / "a.zip")
    loaded = programs.peft(tmp_path / "a.zip", tmp_path / "unpacked")
    assert difference(programs.merged(loaded), expected) <= CLOSE[precision]
    base = output(model.load(str(FIXTURE / "checkpoint")))
    assert (output(programs.in_transformer(loaded)) - wanted).norm() / (base - wanted).norm() <= 10 * CLOSE[precision]
    dtypes = {
        (name.endswith("magnitude_vector"), tensor.dtype)
        for name, tensor in load_file(tmp_path / "unpacked" / "a" / "adapter_model.safetensors").items()
    }
    assert dtypes == {(False, DTYPES[precision])} | ({(True, torch.float32)} if "DoRA" in kind else set())


@every_precision
@every_kind
def test_the_comfyui_file_gives_comfyui_the_trained_change(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """E1, E2, E5: rank 16 alpha 32, rank-stabilised, whole factors; a DoRA's magnitudes by ComfyUI's own norm.

    It accepts every name in the file, and finds every module.
    """
    checkpoint, expected, _ = checkpoints[kind]
    file = tmp_path / "a.safetensors"
    exports.export(checkpoint, "comfyui", precision, file)
    assert difference(programs.comfyui(file), expected) <= CLOSE[precision]
    assert not any("magnitude" in name for name in load_file(file))
    for name, tensor in load_file(file).items():
        assert tensor.dtype == (torch.float32 if name.endswith((".alpha", ".dora_scale")) else DTYPES[precision])
    assert any(name.endswith(".dora_scale") for name in load_file(file)) == ("DoRA" in kind)


@every_precision
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "LoKr" in kind])
def test_lycoris_loads_a_lokr_as_ace_step_does(
    kind: str, precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """In use and merged: LyCORIS itself."""
    checkpoint, expected, _ = checkpoints[kind]
    exports.export(checkpoint, "comfyui", precision, tmp_path / "a.safetensors")
    for found in programs.ace_step_lokr(tmp_path / "a.safetensors"):
        assert difference(found, expected) <= CLOSE[precision]


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    programs.tiny_pipeline(folder)
    return folder


@full_and_half
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "LoRA" in kind])
def test_the_pipeline_loads_the_diffusers_file_and_its_transformer_gives_the_trained_output(
    kind: str,
    precision: Precision,
    checkpoints: Checkpoints,
    pipeline_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E4. AceStepPipeline itself, from disk: it warns of nothing, and differs from the base model."""
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    checkpoint, expected, wanted = checkpoints[kind]
    exports.export(checkpoint, "diffusers", precision, tmp_path / "a.safetensors")
    pipeline = programs.load_pipeline(pipeline_folder)
    base = output(pipeline)
    pipeline.load_lora_weights(str(tmp_path / "a.safetensors"))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert difference(programs.merged(pipeline.transformer), expected) <= CLOSE[precision]
    assert (output(pipeline) - wanted).norm() / (base - wanted).norm() <= 10 * CLOSE[precision]


@every_kind
def test_a_format_that_can_not_hold_an_adapter_says_so(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    refused: list[FormatName] = ["diffusers"] if "LoRA" not in kind else []
    assert [name for name in FORMATS if refusal(name, KINDS[kind]["type"])] == refused
    for name in refused:
        with pytest.raises(SourceError, match=r"can't load a DoRA|loads LoRA only"):
            exports.export(checkpoints[kind].checkpoint, name, "bf16", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# What a person does with downloads, knowing nothing else of the run, in a process of its own.
LOAD_ALL = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from tests.trainer_core import programs

folder, pipeline_folder = map(Path, sys.argv[1:])
for file in list(folder.iterdir()):
    kind, name = file.stem.split("-")
    if name == "peft":
        changes = programs.merged(programs.peft(file, folder / f"{kind} unpacked"))
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
        exports.export(checkpoints[kind].checkpoint, name, "fp32", file)
    subprocess.run([sys.executable, "-c", LOAD_ALL, tmp_path, pipeline_folder], check=True)
    for (kind, name), file in made.items():
        assert difference(load_file(file.with_suffix(".changes")), checkpoints[kind].changes) <= 1e-5, (kind, name)
    assert len(made) == 7


@pytest.mark.parametrize("name", FORMATS)
def test_the_header_says_what_the_file_is_and_no_place_of_this_machine(
    name: FormatName, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    file = tmp_path / f"a{FORMATS[name].suffix}"
    exports.export(checkpoints["LoRA"].checkpoint, name, "bf16", file)
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
    for place in (FIXTURE, checkpoints["LoRA"].checkpoint, Path.home(), tmp_path):
        assert str(place).encode() not in contents


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_checkpoint_gives_the_same_bytes(name: FormatName, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """What a download is resumed by."""
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        exports.export(checkpoints["LoRA"].checkpoint, name, "bf16", folder / "a")
        written.append((folder / "a").read_bytes())
    assert written[0] == written[1]


def test_the_original_adapter_comes_back_with_the_same_tensors(tmp_path: Path) -> None:
    """ACE-Step's own adapter, imported, saved, exported."""
    theirs = adapter_files.read(FIXTURE / "adapter")
    assert theirs.settings.items() >= {"type": "lora", "rank": 4, "alpha": 8, "rank_stabilized": False}.items()
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


@every_precision
def test_weights_that_are_no_numbers_are_refused(
    precision: Precision, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints["LoRA"].checkpoint, tmp_path / "bad"))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor / 0 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="holds NaN or infinite values"):
        exports.export(folder, "comfyui", precision, tmp_path / "a")


def test_weights_too_large_for_fp16_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    loaded = trained("LoRA")
    next(parameter for _, parameter in adapter.trainable(loaded.transformer)).data[0, 0] = 1e6
    run = make_run(tmp_path, adapter=KINDS["LoRA"])
    save(run, loaded)
    for name in FORMATS:
        with pytest.raises(SourceError, match=r"fp16 can't hold the values of .* Choose bf16"):
            exports.export(run.checkpoints / "step-000006", name, "fp16", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"junk"),
        lambda file: save_file(dict(list(load_file(file).items())[1:]), file),
        lambda file: save_file({name: tensor[:1] for name, tensor in load_file(file).items()}, file),
    ],
    ids=["missing", "junk", "lacks one", "too short"],
)
def test_a_dora_without_its_scales_is_refused_for_comfyui_only(
    damage: Callable[[Path], None], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints["DoRA"].checkpoint, tmp_path / "old"))
    damage(folder / "dora_scale.safetensors")
    with pytest.raises(SourceError, match="dora_scale"):
        exports.export(folder, "comfyui", "bf16", tmp_path / "a.safetensors")
    assert exports.export(folder, "peft", "bf16", tmp_path / "a.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "old"]


def test_a_folder_that_is_not_as_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """An alpha that AdapterConfig has not, and what is no PEFT folder."""
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "odd"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | {"lora_alpha": 6.3}))
    with pytest.raises(SourceError, match="is no checkpoint of Descant, nor a PEFT folder"):
        exports.export(folder, "peft", "bf16", tmp_path / "a.zip")
    exports.export(FIXTURE / "adapter", "comfyui", "bf16", tmp_path / "a.safetensors")
    with pytest.raises(SourceError, match="is no checkpoint of Descant, nor a PEFT folder"):
        exports.export(tmp_path / "a.safetensors", "peft", "bf16", tmp_path / "a.zip")


def test_a_folders_own_base_model_is_not_passed_on(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "theirs"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": "/home/x/model"}))
    exports.export(folder, "peft", "bf16", tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert json.loads(archive.read("a/adapter_config.json")) == described


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under the zip."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        exports.export(FIXTURE / "adapter", "peft", "bf16", tmp_path / "a.zip")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_adapter(tmp_path: Path) -> None:
    """Tensors are cast and written one by one: 160 MB of them take the memory of a few."""
    tensors = {
        f"base_model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.ones(shape)
        for layer in range(40)
        for part, shape in (("A", (256, 2048)), ("B", (2048, 256)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    described = json.loads((FIXTURE / "adapter" / "adapter_config.json").read_text()) | {"r": 256}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    tracemalloc.start()
    try:
        for name in FORMATS:
            exports.export(tmp_path, name, "bf16", tmp_path / name)
            assert (tmp_path / name).stat().st_size > 80_000_000
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
