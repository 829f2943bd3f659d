import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FIXTURE
from trainer_core import config_checks, model
from trainer_core.config import RunConfig, allowed, fields
from trainer_core.config_checks import ConfigError, validate


def problems(settings: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(settings)
    return caught.value.fields


def test_the_defaults_are_the_demo_and_valid() -> None:
    config = validate({})
    assert (config.model.source, config.dataset.source) == ("demo", "demo")
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_every_field_has_a_label_help_and_a_description_of_what_it_takes() -> None:
    for name, field in fields().items():
        assert field.title, name
        assert field.description, name
        assert field.description.endswith("."), name
        assert allowed(field), name


def test_all_problems_are_reported_at_once_each_at_its_field() -> None:
    found = problems(
        {
            "name": "",
            "model": {"source": "/no/such/model"},
            "dataset": {"source": "/no/such/data"},
            "adapter": {"rank": 0},
            "training": {"learning_rate": "abc", "epochs": 2.5, "seed": -1},
            "hardware": {"device": "tpu"},
            "surprise": 1,
        }
    )
    assert set(found) == {
        "name",
        "model.source",
        "dataset.source",
        "adapter.rank",
        "training.learning_rate",
        "training.epochs",
        "training.seed",
        "hardware.device",
        "surprise",
    }
    assert found["adapter.rank"] == "0 was given; this takes a whole number from 1 to 1,024."
    assert found["training.learning_rate"] == "'abc' was given; this takes a number above 0, up to 1."
    assert allowed(fields()["training.max_grad_norm"]) == "a number above 0, up to 1,000,000"
    assert found["hardware.device"] == "'tpu' was given; this takes one of auto, cuda, mps, xpu, cpu."
    assert found["name"] == "Nothing was given; this takes 1 to 80 characters."
    assert "/no/such/model" in found["model.source"]
    assert "no such field" in found["surprise"]


@pytest.mark.parametrize("value", ["nan", "inf", float("inf"), None, [], {}, "1e999", 0, -1, True])
def test_a_learning_rate_is_a_finite_number_above_zero(value: object) -> None:
    assert set(problems({"training": {"learning_rate": value}})) == {"training.learning_rate"}


@pytest.mark.parametrize("value", ["x", 3, None, []])
def test_a_section_must_be_an_object(value: object) -> None:
    assert "JSON object" in problems({"training": value})["training"]


def test_a_folder_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FIXTURE.parent)
    config = validate(
        {"model": {"source": f"{FIXTURE.name}/checkpoint"}, "dataset": {"source": f"{FIXTURE.name}/tensors"}}
    )
    assert Path(config.model.source) == FIXTURE / "checkpoint"
    assert Path(config.dataset.source) == FIXTURE / "tensors"


def test_a_hub_id_stays_as_it_is() -> None:
    assert validate({"model": {"source": "owner/some-model"}}).model.source == "owner/some-model"


def test_a_saved_run_still_loads_after_its_folders_are_gone(tmp_path: Path) -> None:
    text = json.dumps({"dataset": {"source": str(tmp_path / "gone")}})
    assert RunConfig.model_validate_json(text).dataset.source == str(tmp_path / "gone")


def test_nul_in_a_path_is_refused() -> None:
    assert "NUL" in problems({"dataset": {"source": "a\0b"}})["dataset.source"]


def test_fields_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = {"base_dtype": "bf16"}
    found = problems({"model": bf16, "hardware": {"precision": "16-mixed"}})
    assert found == {
        "hardware.precision": "16-mixed was given with base weights in bf16; they go with bf16-mixed, 32-true, or auto."
    }
    for precision in ("auto", "bf16-mixed", "32-true"):
        assert validate({"model": bf16, "hardware": {"precision": precision}})
    for kind in ("dora", "lokr"):
        found = problems({"model": {"base_dtype": "nf4"}, "adapter": {"type": kind}})
        assert f"nf4 goes with a lora, not with a {kind}" in found["model.base_dtype"]
    for base_dtype in ("int8", "nf4"):
        found = problems({"model": {"base_dtype": base_dtype}, "hardware": {"device": "cpu"}})
        assert found == {"model.base_dtype": f"{base_dtype} works on cuda only, not on cpu. Use bf16."}


def test_a_package_that_is_missing_or_too_old_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: before any model is loaded."""
    assert validate({"training": {"optimizer": "prodigy"}})  # installed with what tests need
    wanted = f'Install it with {sys.executable} -m pip install "prodigyopt>=1.1", or choose adamw.'
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.9")
    found = problems({"training": {"optimizer": "prodigy"}})
    assert found["training.optimizer"] == (
        f"prodigy needs the package prodigyopt 1.1 or later, and 1.0.9 is installed. {wanted}"
    )
    monkeypatch.setattr(config_checks, "find_spec", lambda name: None)
    found = problems({"training": {"optimizer": "prodigy"}, "model": {"base_dtype": "nf4"}})
    assert found["training.optimizer"] == (
        f"prodigy needs the package prodigyopt 1.1 or later, which is not installed. {wanted}"
    )
    assert "nf4 needs the package bitsandbytes 0.45 or later, which is not installed." in found["model.base_dtype"]


def test_what_contradicts_is_said_beside_what_is_missing() -> None:
    found = problems(
        {"dataset": {"source": "/no/data"}, "resume_from": "/no/checkpoint", "model": {"base_dtype": "bf16"}}
        | {"hardware": {"precision": "16-mixed"}}
    )
    assert set(found) == {"dataset.source", "resume_from", "hardware.precision"}


def test_true_is_no_number_and_space_around_a_choice_is_none() -> None:
    for name in ("condition_dropout", "scheduler_cycles", "epochs", "learning_rate"):
        assert problems({"training": {name: True}})[f"training.{name}"].startswith("True was given; this takes")
    assert validate({"training": {"condition_dropout": " auto ", "gradient_checkpointing": " full "}})
    assert len(problems({"hardware": {"device": "x" * 100_000}})["hardware.device"]) < 300


def test_gradient_checkpointing_is_a_word_or_every_so_many_blocks_and_once_was_a_switch() -> None:
    """Runs of before say true and false, drafts of forms on and off."""
    same: list[Any] = ["off", "auto", "full", 2, 512]
    for given, meant in [*zip(same, same, strict=True), ("3", 3), (True, "full"), ("on", "full"), (False, "off")]:
        config = validate({"training": {"gradient_checkpointing": given}})
        assert config.training.gradient_checkpointing == meant
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
    for bad in (1, 0, 513, 2.5, "some", None):
        found = problems({"training": {"gradient_checkpointing": bad}})
        assert found["training.gradient_checkpointing"].endswith(
            " was given; this takes one of off, auto, full, or a whole number from 2 to 512."
        )


def test_names_of_targets_come_as_a_list_or_apart_by_commas_and_spaces() -> None:
    for given in (["mlp", "q_proj"], "mlp,q_proj", " mlp  q_proj ", "mlp,\tq_proj,"):
        assert validate({"adapter": {"targets": given}}).adapter.targets == ("mlp", "q_proj")
    for bad in ([], "", " , ", 7, [7], [["mlp"]], [""], ["mlp", " "], ["x" * 100_000]):
        assert problems({"adapter": {"targets": bad}})["adapter.targets"].endswith("this takes names, apart by commas.")


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_targets_that_the_model_does_not_have_are_refused_at_the_field(layout: str, tmp_path: Path) -> None:
    source = str(FIXTURE / "checkpoint")
    if layout == "diffusers":
        model.load(source).transformer.save_pretrained(tmp_path / "transformer")
        source = str(tmp_path / "transformer")
    for lost in ("drums", "layers.99.mlp.up_proj", "0", "norm_q"):
        given = {"model": {"source": source}, "adapter": {"targets": ["mlp", lost]}}
        message = problems(given)["adapter.targets"]
        assert message.startswith(f"No linear layer of this model is called {lost}. Targets are self_attention,")
        assert message.endswith("from layers.0 to layers.3.")
    for there in ("q_proj", "layers.3.cross_attn.o_proj", "to_out.0", "condition_embedder", "time_embed.linear_1"):
        assert validate({"model": {"source": source}, "adapter": {"targets": [there]}})
    (tmp_path / "config.json").write_text((FIXTURE / "checkpoint" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert validate({"model": {"source": str(tmp_path)}})  # the trainer says what is wrong with it


def test_8_bit_adamw_is_refused_off_cuda_before_its_package_is_asked_for() -> None:
    found = problems({"training": {"optimizer": "adamw8bit"}, "hardware": {"device": "cpu"}})
    assert found == {"training.optimizer": "adamw8bit works on cuda only, not on cpu. Use adamw."}
