"""H1: a pickle that would run code, in every place where weights or state are read. (Samples: test_dataset.py.)"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import FIXTURE, fixture_settings
from tests.trainer_core.test_dataset import pickled
from trainer_core import adapter_files, model, sample_shapes, tensor_files
from trainer_core.config_checks import validate


def base_model(folder: Path, weights: bytes) -> None:
    shutil.copy(FIXTURE / "checkpoint" / "config.json", folder)
    (folder / "model.safetensors").write_bytes(weights)
    model.load(str(folder))


def base_model_in_pickles(folder: Path, weights: bytes) -> None:
    shutil.copy(FIXTURE / "checkpoint" / "config.json", folder)
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt"):
        (folder / name).write_bytes(weights)
    model.load(str(folder))


def adapter(folder: Path, weights: bytes) -> None:
    shutil.copytree(FIXTURE / "adapter", folder, dirs_exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    adapter_files.read(folder)


def adapter_in_pickles(folder: Path, weights: bytes) -> None:
    shutil.copy(FIXTURE / "adapter" / "adapter_config.json", folder)
    (folder / "adapter_model.bin").write_bytes(weights)
    adapter_files.read(folder)


def named_adapter(folder: Path, weights: bytes) -> None:
    (folder / "a.safetensors").write_bytes(weights)
    validate(fixture_settings(start_from=str(folder / "a.safetensors")))


def state(folder: Path, weights: bytes) -> None:
    (folder / "state.safetensors").write_bytes(weights)
    tensor_files.load(folder / "state.safetensors")


def sample_that_is_measured(folder: Path, weights: bytes) -> None:
    (folder / "a.pt").write_bytes(weights)
    sample_shapes.measure(str(folder))


@pytest.mark.parametrize(
    "read",
    [
        base_model,
        base_model_in_pickles,
        adapter,
        adapter_in_pickles,
        named_adapter,
        state,
        sample_that_is_measured,
    ],
)
def test_a_pickle_is_refused_and_not_run(read: Callable[[Path, bytes], None], tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"can't be read|no weights|not the whole folder"):
        read(folder, pickled(sentinel))
    assert not sentinel.exists()
