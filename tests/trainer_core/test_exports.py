"""Every kind of adapter in every format, at the strength that each program gives it."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AceStepPipeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.conftest import FIXTURE, make_run
from tests.trainer_core import programs
from tests.trainer_core.programs import Changes
from tests.trainer_core.test_checkpoint import save
from tests.trainer_core.test_model import output
from trainer_core import adapter, adapter_files, exports, model
from trainer_core.config import AdapterConfig
from trainer_core.formats import FORMATS, PRECISIONS, FormatName, Precision, refusal
from trainer_core.model import LoadedModel
from trainer_core.sources import SourceError

EVERYWHERE = ["self_attention", "cross_attention", "mlp", "condition_embedder", "time_embed.linear_1"]
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"type": "lora", "rank": 16, "alpha": 32},
    "LoRA of odd strength": {"type": "lora", "rank": 3, "alpha": 7},
    "rank-stabilised LoRA": {"type": "lora", "rank": 8, "alpha": 32, "rank_stabilized": True},
    "DoRA": {"type": "dora", "rank": 16, "alpha": 32},
    "LoKr": {"type": "lokr", "rank": 4, "alpha": 10, "decompose_factor": 4},
    "LoKr with both decomposed": {
        "type": "lokr", "rank": 1, "alpha": 3, "decompose_factor": 4, "decompose_both": True, "targets": EVERYWHERE[:1]
    },
    "LoKr of whole matrices": {"type": "lokr", "rank": 16, "alpha": 32, "decompose_factor": -1},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
CLOSE: dict[Precision, float] = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def trained(kind: str) -> LoadedModel:
    """The fixture model with an adapter that is as far from its beginning as a long training would bring it."""
    loaded = model.load(str(FIXTURE / "checkpoint"))
    adapter.inject(loaded.transformer, AdapterConfig.model_validate({"targets": EVERYWHERE} | KINDS[kind]))
    torch.manual_seed(1)
    for name, parameter in adapter.trainable(loaded.transformer):
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.randn_like(parameter)
        else:
            nn.init.normal_(parameter, std=0.2)
    return loaded


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Changes]]:
    """A checkpoint of each kind, and what PEFT's merge in the trained model changes of the base weights."""
    made = {}
    for kind, settings in KINDS.items():
        run = make_run(tmp_path_factory.mktemp("home"), name=kind, adapter={"targets": EVERYWHERE} | settings)
        loaded = trained(kind)
        save(run, loaded)
        made[kind] = run.checkpoints / "step-000006", programs.merged(loaded.transformer)
    return made


def difference(found: Changes, expected: Changes) -> float:
    """The largest difference of a weight's change, relative to that change."""
    assert set(found) == set(expected)
    return max(((found[name] - change).norm() / change.norm()).item() for name, change in expected.items())


@every_precision
@every_kind
def test_the_zip_gives_peft_the_trained_change(
    kind: str, precision: Precision, checkpoints: dict[str, tuple[Path, Changes]], tmp_path: Path
) -> None:
    checkpoint, expected = checkpoints[kind]
    exports.export(checkpoint, "peft", precision, tmp_path / "a.zip")
    assert difference(programs.peft(tmp_path / "a.zip", tmp_path / "unpacked"), expected) <= CLOSE[precision]


@every_precision
@every_kind
def test_the_comfyui_file_gives_comfyui_the_trained_change(
    kind: str, precision: Precision, checkpoints: dict[str, tuple[Path, Changes]], tmp_path: Path
) -> None:
    """E2, E5: rank 16 alpha 32, rank-stabilised, whole factors; a DoRA's magnitudes by ComfyUI's own norm."""
    checkpoint, expected = checkpoints[kind]
    file = tmp_path / "a.safetensors"
    exports.export(checkpoint, "comfyui", precision, file)
    assert difference(programs.comfyui(file), expected) <= CLOSE[precision]
    assert not any("magnitude" in name for name in load_file(file))
    assert any(name.endswith(".dora_scale") for name in load_file(file)) == (kind == "DoRA")


@every_kind
def test_every_exported_name_is_one_that_comfyui_accepts(
    kind: str, checkpoints: dict[str, tuple[Path, Changes]], tmp_path: Path
) -> None:
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
    kind: str, precision: Precision, checkpoints: dict[str, tuple[Path, Changes]], tmp_path: Path
) -> None:
    """In use and merged: LyCORIS itself."""
    checkpoint, expected = checkpoints[kind]
    exports.export(checkpoint, "comfyui", precision, tmp_path / "a.safetensors")
    assert [difference(found, expected) <= CLOSE[precision] for found in programs.ace_step_lokr(tmp_path / "a.safetensors")] == [True] * 2
